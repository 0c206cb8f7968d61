"""A step as the compiled model takes it: which tokens of which sequences, and their adapters.

Pure: requests in, arrays out. Rows with equal adapters stand together, so that each distinct mix is
one segment however many sequences share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lorafleet.engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The next `num_tokens` pending tokens of a request."""

    request: Request
    num_tokens: int

    @property
    def completes(self) -> bool:
        """Whether the step leaves nothing pending, so that its logits choose the next token."""
        return self.num_tokens == self.request.num_pending


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Arrays of one step. T tokens, S sequences, L rows of logits, G segments, R page references.

    tokens (T,), query_starts (S + 1,), context_lens (S,), block_table (S, M), logit_positions (L,),
    segment_starts (G + 1,), page_starts (G + 1,), page_ids (R,): int32; page_scales (R,): float32.
    `sampled` are the requests of the logits' rows.
    """

    chunks: tuple[Chunk, ...]
    sampled: tuple[Request, ...]
    tokens: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray
    block_table: np.ndarray
    logit_positions: np.ndarray
    segment_starts: np.ndarray
    page_starts: np.ndarray
    page_ids: np.ndarray
    page_scales: np.ndarray

    @property
    def has_adapters(self) -> bool:
        return len(self.page_ids) > 0

    @property
    def is_decode(self) -> bool:
        """Every sequence has one token and wants its logits."""
        return len(self.tokens) == len(self.context_lens) == len(self.sampled)


def build_plan(chunks: Sequence[Chunk]) -> StepPlan:
    """Lay out a step; at least one chunk."""
    chunks = sorted(chunks, key=lambda chunk: chunk.request.page_refs)
    tokens: list[int] = []
    query_starts, logit_positions = [0], []
    segment_starts, page_starts = [0], [0]
    page_ids: list[int] = []
    page_scales: list[float] = []
    sampled: list[Request] = []
    previous: tuple[tuple[int, float], ...] | None = None
    for chunk in chunks:
        request = chunk.request
        tokens += request.tokens[request.num_cached : request.num_cached + chunk.num_tokens]
        query_starts.append(len(tokens))
        if chunk.completes:
            logit_positions.append(len(tokens) - 1)
            sampled.append(request)
        if request.page_refs == previous:
            segment_starts[-1] = len(tokens)
            continue
        previous = request.page_refs
        page_ids += [page for page, _ in previous]
        page_scales += [scale for _, scale in previous]
        segment_starts.append(len(tokens))
        page_starts.append(len(page_ids))
    width = max(len(chunk.request.blocks) for chunk in chunks)
    block_table = np.zeros((len(chunks), width), dtype=np.int32)
    for row, chunk in enumerate(chunks):
        block_table[row, : len(chunk.request.blocks)] = chunk.request.blocks
    return StepPlan(
        chunks=tuple(chunks),
        sampled=tuple(sampled),
        tokens=np.array(tokens, dtype=np.int32),
        query_starts=np.array(query_starts, dtype=np.int32),
        context_lens=np.array([chunk.request.num_cached for chunk in chunks], dtype=np.int32),
        block_table=block_table,
        logit_positions=np.array(logit_positions, dtype=np.int32),
        segment_starts=np.array(segment_starts, dtype=np.int32),
        page_starts=np.array(page_starts, dtype=np.int32),
        page_ids=np.array(page_ids, dtype=np.int32),
        page_scales=np.array(page_scales, dtype=np.float32),
    )
