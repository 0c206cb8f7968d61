"""Real Redis clusters and sentinels on free ports, made of the same redis-server as the rest."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from lorafleet.core.errors import Internal
from lorafleet.registry.embedded import find_server


def free_port() -> int:
    """A port, such that the cluster's bus port 10,000 above it exists."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 50_000:
            return port


class Server:
    """One redis-server process with a configuration of its own."""

    def __init__(self, folder: Path, *options: str, sentinel: bool = False) -> None:
        folder.mkdir(parents=True)
        self.port = free_port()
        config = folder / "redis.conf"
        lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {folder}", 'save ""', *options]
        config.write_text("\n".join(lines) + "\n")
        self._command = [str(find_server()), str(config), *(["--sentinel"] if sentinel else [])]
        self._log = folder / "log"
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Start it and return when it answers."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until(self.answers)

    def answers(self) -> bool:
        """Whether it does."""
        with contextlib.suppress(redis.RedisError):
            return bool(self.client().ping())
        return False

    def client(self) -> redis.Redis:
        """A client of it."""
        return redis.Redis(port=self.port, protocol=2)

    def ask(self, *command: str | int) -> Any:
        """Run a command."""
        return self.client().execute_command(*command)  # type: ignore[no-untyped-call]

    def kill(self) -> None:
        """End it without a warning."""
        self.process.kill()
        self.process.wait()


def until(true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait until something holds."""
    deadline_s = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline_s:
            raise Internal("a Redis server did not do in time what was waited for")
        time.sleep(0.05)


@contextlib.contextmanager
def cluster(folder: Path, size: int = 3) -> Iterator[list[Server]]:
    """A cluster of primaries that own all slots."""
    nodes = [
        Server(folder / str(index), "cluster-enabled yes", "cluster-node-timeout 2000")
        for index in range(size)
    ]
    try:
        slots = [range(i * 16384 // size, (i + 1) * 16384 // size) for i in range(size)]
        for node, own in zip(nodes, slots, strict=True):
            node.ask("CLUSTER", "ADDSLOTS", *own)
            node.ask("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)

        def joined() -> bool:
            states = [node.ask("CLUSTER", "INFO") for node in nodes]
            return all(b"cluster_state:ok" in _raw(state) for state in states)

        until(joined)
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def _raw(info: object) -> bytes:
    if isinstance(info, dict):
        return b"cluster_state:" + str(info.get("cluster_state")).encode()
    return info if isinstance(info, bytes) else str(info).encode()


class Watched:
    """A primary and a replica, watched by three sentinels."""

    SERVICE = "registry"

    def __init__(self, folder: Path) -> None:
        self.servers = [Server(folder / "a", "appendonly yes", "appendfsync always")]
        primary = self.servers[0].port
        self.servers.append(
            Server(folder / "b", f"replicaof 127.0.0.1 {primary}", "repl-diskless-sync-delay 0")
        )
        self.sentinels = [
            Server(
                folder / f"sentinel-{index}",
                f"sentinel monitor {self.SERVICE} 127.0.0.1 {primary} 2",
                f"sentinel down-after-milliseconds {self.SERVICE} 500",
                f"sentinel failover-timeout {self.SERVICE} 3000",
                sentinel=True,
            )
            for index in range(3)
        ]
        until(self._agreed)

    @property
    def url(self) -> str:
        """By which the primary is found."""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.SERVICE}/0"

    def primary(self) -> Server:
        """Who the sentinels say it is."""
        sentinel = self.sentinels[0]
        found = sentinel.ask("SENTINEL", "get-master-addr-by-name", self.SERVICE)
        port = int(found[1])
        return next(server for server in self.servers if server.port == port)

    def stop(self) -> None:
        """End all of them."""
        for server in (*self.sentinels, *self.servers):
            server.kill()

    def _agreed(self) -> bool:
        replica = self.servers[1].client().info("replication")
        if replica.get("master_link_status") != "up":
            return False
        for sentinel in self.sentinels:
            master = sentinel.client().info("sentinel")["master0"]
            if int(master["sentinels"]) < 3 or int(master["slaves"]) < 1:
                return False
        return True
