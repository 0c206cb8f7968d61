"""kill -9 of the client, the admin process or redis-server in the middle of changes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorafleet.bench.figure import Measurement
from lorafleet.bench.random_adapter import write_random_adapter
from lorafleet.bench.registry.lab import AdminProcess, base_model, write_base
from lorafleet.core.errors import LorafleetError, NotFound
from lorafleet.core.record import AdapterRecord
from lorafleet.registry import BlobStore, EmbeddedRedis, RegistryStore
from lorafleet.registry.garbage import collect_garbage

POINTS = 200
_ADAPTERS = 6
_NAMES = ("one", "org/two")
_LONGEST_MS = 40.0
_CLIENT = """
import json, sys
from lorafleet.core.errors import LorafleetError
from lorafleet.sdk import Client
client = Client(admin=sys.argv[1], timeout_s=8.0)
print("ready", flush=True)
for line in sys.stdin:
    what, name, argument = json.loads(line)
    try:
        if what == "push":
            client.push_adapter(argument, name=name)
        elif what == "alias":
            client.set_alias(name, "prod", argument)
        else:
            client.delete_adapter(name)
        print("OK", flush=True)
    except LorafleetError as error:
        print(error.code, flush=True)
"""

_DEFINITE = ("NOT_FOUND", "FAILED_PRECONDITION", "ALREADY_EXISTS", "INVALID_ARGUMENT")


@dataclass
class _Expected:
    """What may be registered under a name: one state, or two while an outcome is not known.

    A state is (versions in order, what `prod` means); None is no adapter.
    """

    states: list[tuple[tuple[str, ...], str | None] | None] = field(default_factory=lambda: [None])


def measure_crashes(report: Callable[[str], None], points: int = POINTS) -> Measurement:
    """Kill one of the three at so many random moments, and look at what is there afterwards."""
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as name:
        world = _World(Path(name))
        try:
            for number in range(points):
                if number % 20 == 0:
                    report(f"{number} of {points} kills")
                world.step(number)
            orphans = world.orphans()
        finally:
            world.close()
    problems = world.problems
    return Measurement(
        value=float(len(problems)),
        holds=not problems and not orphans,
        details={
            "kills": dict(world.killed),
            "outcomes": dict(world.outcomes),
            "problems": problems[:10],
            "orphan blobs after a collection": orphans,
        },
    )


class _World:
    """Redis, the admin process and a client, all real, and what ought to be registered."""

    def __init__(self, folder: Path) -> None:
        base = base_model()
        self._rng = random.Random(0)
        self._blobs_dir = folder / "blobs"
        self._directories = [
            write_random_adapter(folder / f"adapter-{seed}", base, rank=8, seed=seed)
            for seed in range(_ADAPTERS)
        ]
        self._redis = EmbeddedRedis(folder / "redis")
        url = self._redis.start()
        self._store = RegistryStore(url)
        model_dir = write_base(folder / "model", base)
        self._admin = AdminProcess(url, model_dir, self._blobs_dir)
        self._admin.start()
        self._loop = asyncio.new_event_loop()
        self._ids = [self._identify(directory, base) for directory in self._directories]
        self._client = self._start_client()
        self._expected = {name: _Expected() for name in _NAMES}
        self.killed: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []

    def step(self, number: int) -> None:
        """One change, one kill, one look."""
        name, call = self._choose()
        victim = self._rng.choice(["client", "admin", "redis"])
        self.killed[victim] += 1
        timer = threading.Timer(self._rng.random() * _LONGEST_MS / 1e3, self._kill, [victim])
        timer.start()
        outcome = self._ask(name, call)
        timer.join()
        if victim == "client":
            self._client.wait()
            self._client = self._start_client()
        self.outcomes[outcome or "no answer"] += 1
        self._expect(name, call, outcome)
        self._look(number, name, f"{call[0]}, {victim} killed, {outcome}")

    def orphans(self) -> int:
        """Blobs that nothing refers to after a collection of garbage."""

        async def collect() -> set[str]:
            blobs = BlobStore(self._blobs_dir)
            await collect_garbage(self._store, blobs, grace_s=0.0)
            kept: set[str] = set()
            for deleted in (False, True):
                async for record in self._store.adapters(deleted=deleted):
                    kept |= {entry.sha256 for m in record.versions for entry in m.files}
            return kept

        kept = self._loop.run_until_complete(collect())
        found = {path.name for path in self._blobs_dir.glob("sha256/*/*/*")}
        self.problems += [f"blob {digest} is missing" for digest in kept - found]
        return len(found - kept) + len(list(self._blobs_dir.glob("staging/*")))

    def close(self) -> None:
        """End all processes."""
        self._client.kill()
        self._client.wait()
        self._admin.kill()
        self._loop.run_until_complete(self._store.close())
        self._loop.close()
        self._redis.stop()

    def _identify(self, directory: Path, base: Any) -> str:
        from lorafleet.adapters import load_adapter

        return load_adapter(directory, base).version

    def _start_client(self) -> subprocess.Popen[str]:
        client = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, self._admin.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        return client

    def _choose(self) -> tuple[str, tuple[str, int]]:
        name = self._rng.choice(_NAMES)
        what = self._rng.choice(["push", "push", "push", "alias", "alias", "delete"])
        return name, (what, self._rng.randrange(_ADAPTERS))

    def _ask(self, name: str, call: tuple[str, int]) -> str | None:
        what, number = call
        argument = str(self._directories[number]) if what == "push" else self._ids[number]
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        try:
            self._client.stdin.write(json.dumps([what, name, argument]) + "\n")
            self._client.stdin.flush()
        except BrokenPipeError:
            return None
        return self._client.stdout.readline().strip() or None

    def _kill(self, victim: str) -> None:
        """Kill one; servers are started again at once, as a supervisor does."""
        pid = {"client": self._client.pid, "admin": self._admin.pid, "redis": self._redis.pid}
        found = pid[victim]
        assert found is not None
        os.kill(found, signal.SIGKILL)
        if victim == "admin":
            self._admin.kill()
            self._admin.start()
        elif victim == "redis":
            deadline_s = time.monotonic() + 10
            while self._redis.alive and time.monotonic() < deadline_s:
                time.sleep(0.005)
            self._redis.start()

    def _expect(self, name: str, call: tuple[str, int], outcome: str | None) -> None:
        expected = self._expected[name]
        if outcome == "OK":
            expected.states = [self._after(state, call) for state in expected.states]
        elif outcome not in _DEFINITE:  # it may have happened, or not
            expected.states += [self._after(state, call) for state in expected.states]

    def _after(self, state: Any, call: tuple[str, int]) -> Any:
        what, number = call
        version = self._ids[number]
        versions, prod = state or ((), None)
        if what == "delete":
            return None
        if what == "alias":
            return (versions, version) if version in versions else state
        return (versions if version in versions else (*versions, version)), prod

    def _look(self, number: int, name: str, story: str) -> None:
        """Compare with what is expected, and see that each version's files are whole."""
        record = self._loop.run_until_complete(self._read(name))
        seen = None
        if record is not None:
            prod = record.aliases.get("prod")
            seen = (tuple(m.id for m in record.versions), prod.version if prod else None)
        expected = self._expected[name]
        if seen not in expected.states:
            self.problems.append(f"{number}: {name}: {story}: {seen} not in {expected.states}")
        expected.states = [seen]
        for manifest in record.versions if record is not None else ():
            for entry in manifest.files:
                path = self._blobs_dir / "sha256" / entry.sha256[:2] / entry.sha256[2:4]
                data = (path / entry.sha256).read_bytes()
                if hashlib.sha256(data).hexdigest() != entry.sha256:
                    self.problems.append(f"{number}: {entry.name} of {manifest.id} is damaged")

    async def _read(self, name: str) -> AdapterRecord | None:
        deadline_s = time.monotonic() + 10
        while True:
            try:
                return await self._store.get_adapter(name)
            except NotFound:
                return None
            except LorafleetError:
                if time.monotonic() > deadline_s:
                    raise
