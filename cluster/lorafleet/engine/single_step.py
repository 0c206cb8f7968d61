"""One forward pass over whole prompts, outside the queues: how the numbers are looked at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lorafleet.core.errors import Exhausted
from lorafleet.engine.plan import Chunk, build_plan
from lorafleet.engine.request import Request
from lorafleet.engine.runner import Runner
from lorafleet.engine.scheduler import Scheduler


def single_step(requests: Sequence[Request], scheduler: Scheduler, runner: Runner) -> np.ndarray:
    """Logits (S, V) of the token after each prompt, all in one step; nothing is kept. Step thread.

    Raises
    ------
    Exhausted
        Blocks are not free, or an adapter is not resident.
    """
    taken: list[Request] = []
    try:
        for request in requests:
            _take(request, scheduler)
            taken.append(request)
        plan = build_plan([Chunk(request=r, num_tokens=r.num_pending) for r in requests])
        logits = runner.step(plan)
        rows = {id(request): row for row, request in enumerate(plan.sampled)}
        return logits[[rows[id(request)] for request in requests]].copy()
    finally:
        for request in taken:
            scheduler.blocks.release(request.blocks)
            if scheduler.residency is not None:
                scheduler.residency.unpin(request.mix)


def _take(request: Request, scheduler: Scheduler) -> None:
    needed = scheduler.blocks.needed(request.prompt_length)
    if not scheduler.blocks.can_allocate(needed):
        raise Exhausted("the batch does not fit into the engine's free KV blocks")
    if scheduler.residency is not None:
        if not scheduler.residency.can_pin(request.mix):
            raise Exhausted("an adapter of the batch is not resident")
        request.page_refs = scheduler.residency.pin(request.mix)
    request.blocks = scheduler.blocks.allocate(needed)
