"""The processes of a fleet: those that the supervisor starts itself, and whatever is left of all.

It owns starting, watching and ending a part that runs as `python -m lorafleet.<part>`, and finding
what a killed supervisor left behind: by the fleet's mark, which all that it starts inherit in their
environment, or by the files they have open. It knows nothing of what the parts do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from lorafleet.core.errors import Internal
from lorafleet.core.log import get_logger

MARK_VARIABLE = "LORAFLEET_FLEET"
"""Names the fleet that a process belongs to; inherited by all that the supervisor starts."""

_STOP_TIMEOUT_S = 20.0
_END_TIMEOUT_S = 5.0
_POLL_S = 0.05
_TAIL_LINES = 5

# A part that dies as soon as it starts is not started again at every look.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_SETTLED_S = 10.0

_log = get_logger(__name__)


class Part:
    """A process of ours that writes a file once it serves: `python -m lorafleet.<module>`.

    Parameters
    ----------
    name : str
        Names its files in `logs_dir`: its log, and what it says on standard error.
    module : str
        Below `lorafleet`.
    arguments : callable
        Gives its command line, beside `--log-file`, at each start.
    ready_file : Path
        What it writes.
    logs_dir : Path
        For its log.
    stop_timeout_s : float
        How long it may take to end.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        arguments: Callable[[], list[str]],
        ready_file: Path,
        logs_dir: Path,
        stop_timeout_s: float = _STOP_TIMEOUT_S,
    ) -> None:
        self.name = name
        self.log_file = logs_dir / f"{name}.log"
        self._module = f"lorafleet.{module}"
        self._arguments = arguments
        self._ready_file = ready_file
        self._errors = logs_dir / f"{name}.stderr"
        self._stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._pause_s = _FIRST_PAUSE_S

    @property
    def pid(self) -> int | None:
        """The process; None when it is stopped."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process; does not wait for it."""
        self._ready_file.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", self._module, f"--log-file={self.log_file}"),
            *self._arguments(),
        ]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for the supervisor, who stops it in order
                preexec_fn=_end_with_parent,
            )
        self._started_s = time.monotonic()

    def serves(self) -> str | None:
        """What it wrote once it served; None before that."""
        try:
            return self._ready_file.read_text().strip()
        except OSError:
            return None

    def wait(self, deadline_s: float) -> str:
        """Return what it wrote once it serves.

        Raises
        ------
        Internal
            It ended, or does not serve in time.
        """
        while time.monotonic() < deadline_s:
            self.check()
            said = self.serves()
            if said is not None:
                return said
            time.sleep(_POLL_S)
        raise Internal(
            f"{self.name} does not start; {self.log_file} ends with:\n{tail(self.log_file)}"
        )

    def check(self) -> None:
        """Do nothing while it runs.

        Raises
        ------
        Internal
            It has ended; the message has its last words.
        """
        if self._process is not None and self._process.poll() is not None:
            words = tail(self._errors, lines=1) or tail(self.log_file) or "it said nothing"
            raise Internal(f"{self.name} ended: {words}", log=self.log_file)

    def revive(self) -> bool:
        """Start it again if it has died; tells whether it did. Later and later if that repeats."""
        if self._process is None or self._process.poll() is None:
            return False
        lived_s = time.monotonic() - self._started_s
        if lived_s > _SETTLED_S:
            self._pause_s = _FIRST_PAUSE_S
        elif lived_s < self._pause_s:
            return False
        else:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        words = tail(self._errors, lines=1)
        _log.error("part died; starting it again", part=self.name, last_words=words)
        self.start()
        return True

    def stop(self) -> None:
        """End it, gently first; does nothing when it is stopped."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(self._stop_timeout_s)
        except subprocess.TimeoutExpired:
            _log.warning("part does not stop; killing it", part=self.name)
            process.kill()
            process.wait()


@contextlib.contextmanager
def marking(mark: str) -> Iterator[None]:
    """Give the mark to every process started while the block runs."""
    before = os.environ.get(MARK_VARIABLE)
    os.environ[MARK_VARIABLE] = mark
    try:
        yield
    finally:
        if before is None:
            del os.environ[MARK_VARIABLE]
        else:
            os.environ[MARK_VARIABLE] = before


def marked(mark: str) -> list[psutil.Process]:
    """All live processes with this mark, except the one that asks.

    Programs that write their state into their title, as redis-server and Ray's workers do, have
    overwritten it: see `using`.
    """
    return _find(lambda process: process.environ().get(MARK_VARIABLE) == mark)


def using(folder: Path) -> list[psutil.Process]:
    """All live processes that have a file of this folder open, except the one that asks."""
    return _find(
        lambda process: any(folder in Path(file.path).parents for file in process.open_files())
    )


def end(find: Callable[[], list[psutil.Process]], timeout_s: float = _END_TIMEOUT_S) -> int:
    """End the processes found, gently first; returns how many they were."""
    found = find()
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    deadline_s = time.monotonic() + timeout_s
    while any(runs(process) for process in found) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    for process in find() if found else ():  # also what they started meanwhile
        with contextlib.suppress(psutil.Error):
            process.kill()
    return len(found)


def runs(process: psutil.Process) -> bool:
    """Whether a process is there and not a zombie, which nobody may ever reap in a container."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _find(wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        # Processes of other users cannot be read, and are not ours.
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and wanted(process):
                found.append(process)
    return found


def tail(path: Path, *, lines: int = _TAIL_LINES) -> str:
    """The last lines of a log; empty when there is none."""
    try:
        return "\n".join(path.read_text(errors="replace").strip().splitlines()[-lines:])
    except OSError:
        return ""


def _end_with_parent() -> None:
    """In a new process: be told to end when the supervisor is killed. Linux."""
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_pdeathsig = 1
    libc.prctl(pr_set_pdeathsig, signal.SIGTERM)
