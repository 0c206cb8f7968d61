"""What a fleet on this machine says of itself: `run/fleet.json`, and the lock of its supervisor.

It owns the two files. The lock is the truth about whether a fleet runs: it falls with its process,
however that ends, so a file left by a killed supervisor is never taken for a fleet. It starts and
stops nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lorafleet.core.errors import Conflict
from lorafleet.core.home import run_dir

_LOCK_TRIES = 10
_LOCK_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """Addresses and processes of a fleet; written when it is ready, removed when it stops.

    Parameters
    ----------
    pid : int
        The supervisor.
    gateway, admin, redis : str
        Where the two planes and Redis are.
    model_dir, logs_dir : str
        The base model; each part's log file.
    replicas : int
        How many were asked for.
    processes : mapping of str to int
        Process ids of the parts that the supervisor starts itself.
    """

    pid: int
    gateway: str
    admin: str
    redis: str
    model_dir: str
    logs_dir: str
    replicas: int
    processes: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def path() -> Path:
        return run_dir() / "fleet.json"

    @classmethod
    def read(cls) -> FleetState | None:
        """The running fleet of this home; None when there is none."""
        holder = FleetLock.holder()
        if holder is None:
            return None
        try:
            state = cls(**json.loads(cls.path().read_text()))
        except (OSError, ValueError, TypeError):
            return None
        # Of an earlier supervisor that was killed, while the next one is starting.
        return state if state.pid == holder.pid else None

    def write(self) -> None:
        """Publish, whole or not at all."""
        path = self.path()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(asdict(self), indent=1))
        partial.replace(path)

    @classmethod
    def remove(cls) -> None:
        """Take the file away."""
        cls.path().unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who has a lock: its process, and the mark that all of its parts carry."""

    pid: int
    mark: str


class FleetLock:
    """The right to run the fleet of this home; held from `take` to `release`.

    Notes
    -----
    The file tells who has it, and after a crash who had it: it is written, never removed.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None

    @staticmethod
    def path() -> Path:
        return run_dir() / "fleet.lock"

    @property
    def held(self) -> bool:
        """Whether this object has it."""
        return self._descriptor is not None

    def take(self, mark: str) -> Holder | None:
        """Take it, and return the holder before if that one did not release it.

        Raises
        ------
        Conflict
            Another process has it.
        """
        path = self.path()
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if not _lock(descriptor):
            os.close(descriptor)
            other = self._read()
            raise Conflict(
                f"a fleet is running already in {run_dir().parent}"
                + (f" (process {other.pid})" if other else "")
                + "; stop it with `lorafleet down`",
                pid=other.pid if other else None,
            )
        before = self._read()
        self._write(descriptor, Holder(pid=os.getpid(), mark=mark))
        self._descriptor = descriptor
        return before

    def release(self) -> None:
        """Let go of it; does nothing when it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.ftruncate(descriptor, 0)
            os.close(descriptor)

    @classmethod
    def holder(cls) -> Holder | None:
        """Who runs, starts or stops a fleet here now; None when nobody does."""
        return cls._read() if cls._is_held() else None

    @classmethod
    def left_by(cls) -> Holder | None:
        """Who had it last and ended without releasing it; None when somebody has it now."""
        return None if cls._is_held() else cls._read()

    @classmethod
    def _is_held(cls) -> bool:
        try:
            descriptor = os.open(cls.path(), os.O_RDWR)
        except OSError:
            return False
        try:
            # A shared lock, so that two who ask at once do not take each other for a holder.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    @classmethod
    def _read(cls) -> Holder | None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Holder(**json.loads(cls.path().read_text()))
        return None

    @staticmethod
    def _write(descriptor: int, holder: Holder) -> None:
        text = json.dumps(asdict(holder)).encode()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)


def _lock(descriptor: int) -> bool:
    """Take the lock, or find that another process has it for longer than a question takes."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(_LOCK_PAUSE_S)
        else:
            return True
    return False
