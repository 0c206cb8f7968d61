"""What tests of a running engine share: waiting for it, adapters for it, a source for them."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from lorafleet.adapters import LoraAdapter, load_adapter
from lorafleet.core.errors import LorafleetError
from lorafleet.core.model import BaseModel
from lorafleet.engine import Engine
from support.adapters import factors, write_adapter


def eventually(holds: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Whether something becomes true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def idle(engine: Engine, timeout_s: float = 10.0) -> bool:
    """Whether the engine comes to rest in time."""

    def resting() -> bool:
        snapshot = engine.residency()
        return snapshot.running == snapshot.waiting == 0

    return eventually(resting, timeout_s)


def many_adapters(folder: Path, count: int, rank: int = 8) -> list[Path]:
    """Adapter directories; no two tests share weights, hence versions."""
    first = zlib.crc32(str(folder).encode())
    return [
        write_adapter(folder / f"a{i}", factors(rank=rank, seed=first + i), {"r": rank})
        for i in range(count)
    ]


class Shelf:
    """A source of adapters that counts, delays, holds back and fails as told."""

    def __init__(self, base: BaseModel, directories: Sequence[Path]) -> None:
        self.adapters = {a.version: a for a in (load_adapter(d, base) for d in directories)}
        self.versions = list(self.adapters)
        self.reads: list[str] = []
        self.delay_s: Callable[[str], float] = lambda version: 0.0
        self.error: LorafleetError | None = None
        self.gates: dict[str, threading.Event] = {}

    def __call__(self, version: str) -> LoraAdapter:
        self.reads.append(version)
        time.sleep(self.delay_s(version))
        if version in self.gates:
            self.gates[version].wait(30)
        if self.error is not None:
            raise self.error
        return self.adapters[version]
