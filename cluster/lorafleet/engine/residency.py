"""Adapters on their way from disk into rank pages, off the step.

A version that a request waits for is loaded once, however many wait:

    READING (a loader thread: find it, check it) -> PLACING (the step thread gives it pages)
    -> WRITING (a loader thread) -> resident

Giving pages and making a written version resident are instant and happen between steps; reading and
writing never hold a step up, nor each other. A failure is told to every waiter and forgotten, so
that the next request tries again. Which load gets pages first, and whom it may evict for them, is
decided by the order of the requests that wait: see `place`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lorafleet.adapters import BaseWeights, LoraAdapter
from lorafleet.core.errors import Exhausted, Internal, InvalidInput, LorafleetError
from lorafleet.engine.book import Source
from lorafleet.engine.request import Mix
from lorafleet.native import AdapterPool


class Stage(enum.Enum):
    """Where a load is."""

    READING = enum.auto()
    PLACING = enum.auto()
    WRITING = enum.auto()


@dataclass(slots=True)
class _Load:
    """`work` is what a loader thread does for it now; it is done in PLACING."""

    work: Future[Any]
    stage: Stage = Stage.READING
    adapter: LoraAdapter | None = None
    waiters: list[Future[None]] = field(default_factory=list)


class Residency:
    """Loads versions into the pool. All methods are the step thread's, except where said.

    Parameters
    ----------
    pool : AdapterPool
        The rank pages.
    source : Source
        Called in loader threads.
    wake : callable
        Called in loader threads when the step thread should look again.
    max_loads : int
        Threads that read, and threads that write.
    weights : BaseWeights, optional
        The base's, for adapters that need them.
    """

    def __init__(
        self,
        pool: AdapterPool,
        source: Source,
        wake: Callable[[], None],
        max_loads: int,
        weights: BaseWeights | None = None,
    ) -> None:
        self.pool = pool
        self._weights = weights
        self._source = source
        self._wake = wake
        self._loads: dict[str, _Load] = {}
        self._num_pages: dict[str, int] = {}  # of versions that are resident, placing or writing
        self._resident: dict[str, None] = {}
        self._unloading: set[str] = set()
        # Threads of their own: an adapter that has been read must not queue behind slow reads.
        self._readers = ThreadPoolExecutor(max_loads, thread_name_prefix="adapter-read")
        self._writers = ThreadPoolExecutor(max_loads, thread_name_prefix="adapter-write")

    def stop(self) -> None:
        """Wait for running loads and start no more. Any thread."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._writers.shutdown(wait=True, cancel_futures=True)

    def is_resident(self, version: str) -> bool:
        """Whether the version is in rank pages. Any thread."""
        return version in self._resident

    def resident(self) -> tuple[str, ...]:
        """Versions in rank pages."""
        return tuple(self._resident)

    def loading(self) -> tuple[str, ...]:
        """Versions on their way in."""
        return tuple(self._loads)

    def is_placing(self, version: str) -> bool:
        """Whether the version has been read and waits for pages."""
        load = self._loads.get(version)
        return load is not None and load.stage is Stage.PLACING

    def ensure(self, version: str) -> None:
        """Start loading a version unless it is resident or on its way."""
        if version not in self._loads and version not in self._resident:
            work = self._readers.submit(self._read, version)
            self._loads[version] = _Load(work)
            work.add_done_callback(self._woken)

    def wait(self, version: str) -> Future[None]:
        """Like `ensure`; the result is set when it is resident, or its load's error."""
        done: Future[None] = Future()
        if version in self._resident:
            done.set_result(None)
        else:
            self.ensure(version)
            self._loads[version].waiters.append(done)
        return done

    def refusal(self, mix: Mix) -> InvalidInput | None:
        """Why a mix can never be in rank pages all at once; None if it can, or is not known yet."""
        versions = {version for version, _ in mix}
        if not versions <= self._num_pages.keys():
            return None
        needed = sum(self._num_pages[version] for version in versions)
        if needed <= self.pool.num_pages:
            return None
        return InvalidInput(
            f"the request's {len(versions)} adapters need {needed} rank pages together; the engine "
            f"has {self.pool.num_pages}: mix fewer or raise num_adapter_pages",
            field="adapter",
        )

    def can_pin(self, mix: Mix) -> bool:
        """Whether `pin` would succeed."""
        return all(
            version in self._resident and version not in self._unloading for version, _ in mix
        )

    def pin(self, mix: Mix) -> tuple[tuple[int, float], ...]:
        """Pin a mix and return its (page, scale) references; ask `can_pin` first."""
        references: list[tuple[int, float]] = []
        for version, scale in mix:
            pages = self.pool.pin(version)
            if pages is None:
                raise Internal(f"adapter {version} was pinned but is not resident")
            references += [(page, scale) for page in pages]
        return tuple(references)

    def unpin(self, mix: Mix) -> None:
        """Undo `pin`."""
        for version, _ in mix:
            self.pool.unpin(version)
            self._try_unload(version)

    def unload(self, version: str) -> bool:
        """Drop a version: now, or as soon as the last request that uses it has ended.

        Until then no further request gets it. True when it was there and is gone.
        """
        if version not in self._loads and version not in self._resident:
            return False
        self._unloading.add(version)
        return self._try_unload(version)

    def collect(self) -> dict[str, LorafleetError]:
        """Take in what loader threads have done; the loads that failed, with their errors."""
        failed: dict[str, LorafleetError] = {}
        for version, load in list(self._loads.items()):
            if load.stage is Stage.PLACING or not load.work.done():
                continue
            error = load.work.exception()
            if error is not None:
                failed[version] = self._fail(version, load, _ours(error))
            elif load.stage is Stage.READING:
                load.adapter = load.work.result()
                self._num_pages[version] = load.adapter.num_pages(self.pool.page_rows)
                load.stage = Stage.PLACING
                self._try_unload(version)
            else:
                self._finish(version, load)
        return failed

    def place(self, waiting: Iterable[Mix], *, others: bool) -> None:
        """Give pages to loads that wait for them.

        `waiting` are the mixes of waiting requests, the oldest first. A load for one of them may
        evict anything unpinned but what this or an older request wants: so no two requests throw
        out each other's adapters for ever, and the oldest gets its own. Loads that no request waits
        for come last, and only if `others`.
        """
        if not any(load.stage is Stage.PLACING for load in self._loads.values()):
            return
        seen: set[str] = set()
        held: list[str] = []
        for mix in waiting:
            new = [version for version, _ in mix if version not in seen]
            seen.update(new)
            held += [v for v in new if v in self._resident and self.pool.pin(v) is not None]
            for version in new:
                self._place(version)
        if others:
            for version in [version for version in self._loads if version not in seen]:
                self._place(version)
        for version in held:
            self.pool.unpin(version)

    def missing_pages(self, mix: Mix) -> int:
        """Pages that the mix's waiting loads lack beyond the free ones."""
        wanted = {version for version, _ in mix if self.is_placing(version)}
        return sum(self._num_pages[version] for version in wanted) - self.pool.free_pages()

    def pages_by_version(self) -> Mapping[str, int]:
        """Pages of each resident version."""
        return {version: self._num_pages[version] for version in self._resident}

    def abandon(self, error: LorafleetError) -> None:
        """Tell everybody who waits for a load that there will be none."""
        for version, load in list(self._loads.items()):
            self._fail(version, load, error)

    def check(self) -> None:
        """Prove that this book agrees with the pool's, and the pool's with itself; or Internal."""
        self.pool.check()
        writing = {v for v, load in self._loads.items() if load.stage is Stage.WRITING}
        if set(self.pool.residents()) != self._resident.keys():
            raise Internal("resident versions differ between the engine and the pool")
        if set(self.pool.loading()) != writing:
            raise Internal("loading versions differ between the engine and the pool")
        owned = sum(self._num_pages[version] for version in (*self._resident, *writing))
        if owned + self.pool.free_pages() != self.pool.num_pages:
            raise Internal(f"{self.pool.num_pages} rank pages, but {owned} owned and the free ones")

    def _read(self, version: str) -> LoraAdapter:
        adapter = self._source(version)
        if adapter.version != version:
            raise Internal(f"asked for adapter {version}, got {adapter.version}")
        pages = adapter.num_pages(self.pool.page_rows)
        if pages > self.pool.num_pages:
            raise InvalidInput(
                f"adapter {version} of rank {adapter.max_rank} needs {pages} rank pages; "
                f"the engine has {self.pool.num_pages}: raise num_adapter_pages"
            )
        return adapter

    def _place(self, version: str) -> None:
        load = self._loads.get(version)
        if load is None or load.stage is not Stage.PLACING:
            return
        try:
            evicted = self.pool.reserve(version, self._num_pages[version])
        except Exhausted:
            return  # everything is in use or wanted; a later step may free pages
        for other in evicted:
            self._forget(other)
        assert load.adapter is not None
        load.work = self._writers.submit(self._write, version, load.adapter)
        load.stage = Stage.WRITING
        load.work.add_done_callback(self._woken)

    def _write(self, version: str, adapter: LoraAdapter) -> None:
        for rows in adapter.factors(self._weights):
            self.pool.write(version, rows.site, rows.part, rows.a, rows.b_t)
            if rows.affine is not None:
                gain, shift = rows.affine.gain, rows.affine.shift
                self.pool.write_affine(version, rows.site, rows.part, gain, shift)

    def _finish(self, version: str, load: _Load) -> None:
        self.pool.commit(version)
        del self._loads[version]
        self._resident[version] = None
        for waiter in load.waiters:
            waiter.set_result(None)
        self._try_unload(version)

    def _fail(self, version: str, load: _Load, error: LorafleetError) -> LorafleetError:
        if load.stage is Stage.WRITING:
            self.pool.abort(version)
        del self._loads[version]
        self._forget(version)
        for waiter in load.waiters:
            waiter.set_exception(error)
        return error

    def _try_unload(self, version: str) -> bool:
        if version not in self._unloading:
            return False
        if self.is_placing(version):
            # Who waits for it starts anew, and hears from the source whether there is such a one.
            load = self._loads.pop(version)
            for waiter in load.waiters:
                waiter.set_exception(Exhausted(f"adapter {version} was unloaded; try again"))
        elif not self.pool.evict(version):
            return False  # still read, written or used
        self._forget(version)
        return True

    def _forget(self, version: str) -> None:
        self._resident.pop(version, None)
        self._num_pages.pop(version, None)
        self._unloading.discard(version)

    def _woken(self, work: Future[Any]) -> None:
        del work
        self._wake()


def _ours(error: BaseException) -> LorafleetError:
    if isinstance(error, LorafleetError):
        return error
    return Internal(f"loading the adapter failed: {error!r}")
