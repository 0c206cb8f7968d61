"""Which requests run, and which of their tokens go into the next step.

It owns the waiting and running queues and decides admission; the step thread alone calls it. It
does not run models, choose tokens or know clients.

Admission is in order of arrival, with one exception: a request whose adapter is not in rank pages
yet is overtaken. To bound its wait, once an adapter has waited for pages longer than the age limit,
no further adapter request is admitted before it has them. A request is admitted only when the
blocks for its longest possible answer are free, so it never has to be taken back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lorafleet.core.errors import LorafleetError
from lorafleet.engine.blocks import BlockTable
from lorafleet.engine.plan import Chunk, StepPlan, build_plan
from lorafleet.engine.request import Failed, Request
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
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Take a new request."""
        self.waiting.append(request)

    def schedule(self, now_s: float) -> StepPlan | None:
        """Admit what can run, advance loads, and lay out the next step; None when nothing can."""
        self._drop_cancelled()
        self._admit(now_s)
        if self.residency is not None:
            self._advance_loads(self.residency, now_s)
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
            self.residency.pool.check()

    def _drop_cancelled(self) -> None:
        for request in [request for request in self.running if request.cancelled.is_set()]:
            self.finish(request)
        if any(request.cancelled.is_set() for request in self.waiting):
            self.waiting = deque(r for r in self.waiting if not r.cancelled.is_set())

    def _admit(self, now_s: float) -> None:
        starving = (
            self.residency.starving(now_s, self.limits.age_limit_s) if self.residency else None
        )
        overtaken: deque[Request] = deque()
        while self.waiting and len(self.running) < self.limits.max_batch:
            request = self.waiting[0]
            needed = self.blocks.needed(request.max_length)
            if not self.blocks.can_allocate(needed):
                break
            self.waiting.popleft()
            if not self._can_use_adapters(request, starving, now_s):
                overtaken.append(request)
                continue
            request.blocks = self.blocks.allocate(needed)
            request.admitted_s = now_s
            self.running.append(request)
        self.waiting.extendleft(reversed(overtaken))

    def _can_use_adapters(self, request: Request, starving: str | None, now_s: float) -> bool:
        """Pin the request's versions if all are in pages; else see to it that they will be."""
        if not request.mix or self.residency is None:
            return True
        if starving is None:
            references = self.residency.pin(request.mix)
            if references is not None:
                request.page_refs = references
                return True
        for version, _ in request.mix:
            self.residency.ensure(version, now_s)
        return False

    def _advance_loads(self, residency: Residency, now_s: float) -> None:
        # Loads were started for the oldest waiting requests first, so protecting what waiting
        # requests could use already keeps one load from throwing out another's result.
        starving = residency.starving(now_s, self.limits.age_limit_s)
        protected = (
            set()
            if starving is not None
            else {version for request in self.waiting for version, _ in request.mix}
        )
        for version, error in residency.advance(protected).items():
            self._fail_waiters(version, error)

    def _fail_waiters(self, version: str, error: LorafleetError) -> None:
        kept: deque[Request] = deque()
        for request in self.waiting:
            if any(name == version for name, _ in request.mix):
                request.emit(Failed(error=error))
            else:
                kept.append(request)
        self.waiting = kept

    def _chunks(self) -> list[Chunk]:
        """One token for every answer in progress, then prompts in order, up to the token budget."""
        budget = self.limits.max_step_tokens
        chunks = []
        for request in sorted(self.running, key=lambda request: request.num_pending):
            count = min(request.num_pending, budget)
            if count > 0:
                chunks.append(Chunk(request=request, num_tokens=count))
                budget -= count
        return chunks
