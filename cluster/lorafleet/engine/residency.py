"""Adapters on their way from disk into rank pages, off the step.

A version that a request waits for is loaded once, however many wait:

    reading (a loader thread: find it, check it) -> placing (the step thread gives it pages)
    -> writing (a loader thread) -> resident

Giving pages is instant and happens between steps; reading and writing never hold a step up. A
failure wakes every waiter and is forgotten, so that the next request tries again.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lorafleet.adapters import LoraAdapter
from lorafleet.core.errors import Exhausted, Internal, InvalidInput, LorafleetError
from lorafleet.engine.book import Source
from lorafleet.native import AdapterPool


class Stage(enum.Enum):
    """Where a load is."""

    READING = enum.auto()
    PLACING = enum.auto()
    WRITING = enum.auto()


@dataclass(slots=True)
class _Load:
    """`stage` and `adapter` are written by the loader thread before it wakes the step thread."""

    since_s: float
    stage: Stage = Stage.READING
    adapter: LoraAdapter | None = None
    error: LorafleetError | None = None
    done: bool = False


class Residency:
    """Loads versions into the pool. Methods are the step thread's, except where said.

    Parameters
    ----------
    pool : AdapterPool
        The rank pages.
    source : Source
        Called in loader threads.
    wake : callable
        Called in loader threads when the step thread should look again.
    max_loads : int
        Loader threads.
    """

    def __init__(
        self, pool: AdapterPool, source: Source, wake: Callable[[], None], max_loads: int
    ) -> None:
        self.pool = pool
        self._source = source
        self._wake = wake
        self._loads: dict[str, _Load] = {}
        self._threads = ThreadPoolExecutor(max_loads, thread_name_prefix="adapter-load")

    def stop(self) -> None:
        """Wait for running loads and start no more. Any thread."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def is_resident(self, version: str) -> bool:
        """Whether the version is in rank pages. Any thread."""
        return version in self.pool.residents()

    def loading(self) -> tuple[str, ...]:
        """Versions on their way in."""
        return tuple(self._loads)

    def ensure(self, version: str, now_s: float) -> None:
        """Start loading a version unless it is resident or on its way."""
        if version not in self._loads and not self.is_resident(version):
            self._loads[version] = load = _Load(since_s=now_s)
            self._threads.submit(self._read, version, load)

    def pin(self, mix: Iterable[tuple[str, float]]) -> tuple[tuple[int, float], ...] | None:
        """Pin a mix and return its (page, scale) references; None if a version is absent."""
        references: list[tuple[int, float]] = []
        pinned: list[str] = []
        for version, scale in mix:
            pages = self.pool.pin(version)
            if pages is None:
                for other in pinned:
                    self.pool.unpin(other)
                return None
            pinned.append(version)
            references += [(page, scale) for page in pages]
        return tuple(references)

    def unpin(self, mix: Iterable[tuple[str, float]]) -> None:
        """Undo `pin`."""
        for version, _ in mix:
            self.pool.unpin(version)

    def advance(self, protected: Iterable[str]) -> dict[str, LorafleetError]:
        """Give pages to loads that wait for them, oldest first, and collect finished ones.

        `protected` versions are not evicted, since requests older than these loads wait for them.
        Returns the loads that failed, with their errors.
        """
        failed: dict[str, LorafleetError] = {}
        held = [version for version in protected if self.pool.pin(version) is not None]
        for version, load in list(self._loads.items()):
            if load.stage is Stage.PLACING and not load.done:
                self._place(version, load)
            if load.done:
                del self._loads[version]
                if load.error is not None:
                    failed[version] = load.error
        for version in held:
            self.pool.unpin(version)
        return failed

    def starving(self, now_s: float, age_limit_s: float) -> str | None:
        """A version that has waited for pages longer than the limit, if any."""
        for version, load in self._loads.items():
            if load.stage is Stage.PLACING and now_s - load.since_s > age_limit_s:
                return version
        return None

    def _read(self, version: str, load: _Load) -> None:
        try:
            adapter = self._source(version)
            pages = adapter.num_pages(self.pool.page_rows)
            if pages > self.pool.num_pages:
                raise InvalidInput(
                    f"adapter {version} of rank {adapter.max_rank} needs {pages} rank pages; "
                    f"the engine has {self.pool.num_pages}: raise num_adapter_pages"
                )
            load.adapter = adapter
            load.stage = Stage.PLACING
        except Exception as error:
            _fail(load, error)
        self._wake()

    def _place(self, version: str, load: _Load) -> None:
        assert load.adapter is not None
        try:
            self.pool.reserve(version, load.adapter.num_pages(self.pool.page_rows))
        except Exhausted:
            return  # everything is in use; the next step may free pages
        load.stage = Stage.WRITING
        self._threads.submit(self._write, version, load)

    def _write(self, version: str, load: _Load) -> None:
        assert load.adapter is not None
        try:
            for rows in load.adapter.factors():
                self.pool.write(version, rows.site, rows.part, rows.a, rows.b_t)
            self.pool.commit(version)
            load.done = True
        except Exception as error:
            self.pool.abort(version)
            _fail(load, error)
        self._wake()


def _fail(load: _Load, error: Exception) -> None:
    load.error = (
        error
        if isinstance(error, LorafleetError)
        else Internal(f"loading the adapter failed: {error!r}")
    )
    load.done = True
