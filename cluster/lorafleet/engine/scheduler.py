"""Which requests run, and which of their tokens go into the next step.

It owns the waiting and running queues and decides admission; the step thread alone calls it. It
does not run models, choose tokens or know clients.

Admission is in order of arrival, with one exception: a request whose adapters are not in rank pages
yet is overtaken. Its wait is bounded nevertheless: pages are given in order of arrival too, and
once it has waited for them longer than the age limit, enough resident adapters to make room for its
own are *drained*, that is, younger requests for them are not admitted until it has its pages. A
request is admitted only when the blocks for its longest possible answer are free, so it never has
to be taken back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from lorafleet.core.errors import LorafleetError
from lorafleet.engine.blocks import BlockTable
from lorafleet.engine.keeping import Keeper
from lorafleet.engine.plan import Chunk, StepPlan, build_plan
from lorafleet.engine.request import Failed, Mix, Request
from lorafleet.engine.residency import Residency


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a step and of the wait for pages."""

    max_batch: int
    max_step_tokens: int
    age_limit_s: float


class Scheduler:
    """Queues of requests over KV blocks and rank pages.

    `residency` is None for a model without LoRA.
    """

    def __init__(self, blocks: BlockTable, residency: Residency | None, limits: Limits) -> None:
        self.blocks = blocks
        self.residency = residency
        self.keeper = Keeper(residency) if residency is not None else None
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._starving: Request | None = None
        self._drained: set[str] = set()

    def add(self, request: Request) -> None:
        """Take a new request."""
        self.waiting.append(request)

    def schedule(self, now_s: float) -> StepPlan | None:
        """Admit what can run, advance loads, and lay out the next step; None when nothing can."""
        self._drop_cancelled()
        if self.residency is not None:
            self._advance_loads(self.residency, now_s)
        self._admit(now_s)
        chunks = self._chunks()
        return build_plan(chunks) if chunks else None

    def finish(self, request: Request) -> None:
        """Give back what a running request holds."""
        self.running.remove(request)
        self.blocks.release(request.blocks)
        request.blocks = []
        if self.residency is not None:
            self.residency.unpin(request.mix)

    def check(self) -> None:
        """Prove the conservation of blocks and pages; Internal if broken."""
        self.blocks.check([request.blocks for request in self.running])
        if self.residency is not None:
            self.residency.check()

    def _drop_cancelled(self) -> None:
        for request in [request for request in self.running if request.cancelled.is_set()]:
            self.finish(request)
        self._remove({request for request in self.waiting if request.cancelled.is_set()})

    def _remove(self, gone: set[Request]) -> None:
        """Take requests out of the waiting queue."""
        if gone:
            self.waiting = deque(request for request in self.waiting if request not in gone)

    # Adapters.

    def _advance_loads(self, residency: Residency, now_s: float) -> None:
        """Bring the adapters of waiting requests closer, whether or not there is room to run."""
        for version, error in residency.collect().items():
            self._fail({r for r in self.waiting if version in dict(r.mix)}, error)
        absent = [r for r in self.waiting if r.mix and not residency.can_pin(r.mix)]
        for request in absent:
            for version, _ in request.mix:
                residency.ensure(version)
            refusal = residency.refusal(request.mix)
            if refusal is not None:
                self._fail({request}, refusal)
        starving = next((r for r in absent if self._is_starving(r, residency, now_s)), None)
        if starving is not self._starving:
            self._starving = starving
            self._drained.clear()
        if self.keeper is not None:
            self.keeper.tend(others_starve=starving is not None)
        residency.place(self._claims(), others=starving is None)
        self._grow_drained(residency)

    def _is_starving(self, request: Request, residency: Residency, now_s: float) -> bool:
        """Whether it has been kept from rank pages for too long; slow reads are not the pages'."""
        return (
            now_s - request.arrived_s > self.limits.age_limit_s
            and not request.cancelled.is_set()
            and any(residency.is_placing(version) for version, _ in request.mix)
        )

    def _claims(self) -> Iterator[Mix]:
        """Mixes in the order in which they get pages; nothing is given past a starving request."""
        for request in self.waiting:
            if request.mix:
                yield request.mix
            if request is self._starving:
                return

    def _grow_drained(self, residency: Residency) -> None:
        """Pick resident adapters whose pages will do, those with the fewest running requests first.

        For one starving request the set only grows, lest one adapter be given up for another again
        and again.
        """
        if self._starving is None:
            return
        mix = self._starving.mix
        pages = residency.pages_by_version()
        self._drained &= pages.keys()
        missing = residency.missing_pages(mix) - sum(pages[version] for version in self._drained)
        users = Counter(version for request in self.running for version, _ in request.mix)
        kept = dict(mix).keys() | self._drained
        for version in sorted(pages.keys() - kept, key=lambda version: (users[version], version)):
            if missing <= 0:
                return
            self._drained.add(version)
            missing -= pages[version]

    def _fail(self, failed: set[Request], error: LorafleetError) -> None:
        self._remove(failed)
        for request in failed:
            request.send(Failed(error=error))
            request.cancelled.set()

    # Admission and steps.

    def _admit(self, now_s: float) -> None:
        admitted: set[Request] = set()
        younger = False  # than the starving request
        for request in self.waiting:
            if len(self.running) >= self.limits.max_batch:
                break
            younger |= request is self._starving
            if not self._has_adapters(request, younger=younger):
                continue
            needed = self.blocks.needed(request.max_length)
            if not self.blocks.can_allocate(needed):
                break  # whoever comes next must not take what it waits for
            request.blocks = self.blocks.allocate(needed)
            if self.residency is not None:
                request.page_refs = self.residency.pin(request.mix)
            request.admitted_s = now_s
            self.running.append(request)
            admitted.add(request)
        self._remove(admitted)

    def _has_adapters(self, request: Request, *, younger: bool) -> bool:
        if not request.mix or self.residency is None:
            return True
        if younger and any(version in self._drained for version, _ in request.mix):
            return False
        return self.residency.can_pin(request.mix)

    def _chunks(self) -> list[Chunk]:
        """One token for every answer in progress; the rest of the step's tokens go to prompts.

        The oldest prompt gets at least half of that rest, so that it ends however many short ones
        arrive; the others get theirs by shortness, so that they need not wait for its end.
        """
        chunks = [Chunk(request=r, num_tokens=1) for r in self.running if r.num_generated]
        prompts = [request for request in self.running if not request.num_generated]
        if not prompts:
            return chunks
        budget = self.limits.max_step_tokens - len(chunks)
        oldest, *others = prompts
        counts = {oldest: min(oldest.num_pending, -(-budget // 2))}
        budget -= counts[oldest]
        for request in (*sorted(others, key=lambda request: request.num_pending), oldest):
            more = min(request.num_pending - counts.get(request, 0), budget)
            counts[request] = counts.get(request, 0) + more
            budget -= more
        return chunks + [Chunk(request=r, num_tokens=count) for r, count in counts.items() if count]
