"""A step's arrays say exactly what its chunks say."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.engine.plan import Chunk, build_plan
from lorafleet.engine.request import Request, SamplingParams

MIXES: list[tuple[tuple[int, float], ...]] = [
    (),
    ((3, 1.0),),
    ((1, 1.0), (2, 1.0)),
    ((1, 0.5), (2, 0.5)),
    ((3, 1.0), (1, -2.0)),
]


@st.composite
def chunk(draw: st.DrawFn) -> Chunk:
    cached = draw(st.integers(0, 40))
    pending = draw(st.integers(1, 20))
    total = cached + pending
    request = Request(
        prompt_length=total,
        tokens=draw(st.lists(st.integers(0, 255), min_size=total, max_size=total)),
        mix=(),
        sampling=SamplingParams(),
        emit=print,
        arrived_s=0.0,
        num_cached=cached,
        blocks=draw(st.lists(st.integers(0, 99), min_size=1, max_size=5)),
        page_refs=draw(st.sampled_from(MIXES)),
    )
    return Chunk(request=request, num_tokens=draw(st.integers(1, pending)))


@given(st.lists(chunk(), min_size=1, max_size=8))
def test_every_sequence_has_its_own_tokens_blocks_and_pages(chunks: list[Chunk]) -> None:
    plan = build_plan(chunks)
    assert set(map(id, plan.chunks)) == set(map(id, chunks))
    assert plan.query_starts[0] == 0
    assert plan.query_starts[-1] == len(plan.tokens) == sum(c.num_tokens for c in chunks)
    for row, c in enumerate(plan.chunks):
        start, end = plan.query_starts[row : row + 2]
        request = c.request
        expected = request.tokens[request.num_cached : request.num_cached + c.num_tokens]
        assert plan.tokens[start:end].tolist() == expected
        assert plan.context_lens[row] == request.num_cached
        assert plan.block_table[row, : len(request.blocks)].tolist() == request.blocks
        segment = int(np.searchsorted(plan.segment_starts, start, side="right")) - 1
        assert end <= plan.segment_starts[segment + 1]
        first, last = plan.page_starts[segment : segment + 2]
        pages = zip(plan.page_ids[first:last], plan.page_scales[first:last], strict=True)
        assert tuple((int(p), float(s)) for p, s in pages) == request.page_refs


@given(st.lists(chunk(), min_size=1, max_size=8))
def test_equal_mixes_share_one_segment(chunks: list[Chunk]) -> None:
    plan = build_plan(chunks)
    assert len(plan.segment_starts) - 1 == len({c.request.page_refs for c in chunks})
    assert plan.segment_starts[-1] == len(plan.tokens)
    assert plan.page_starts[-1] == len(plan.page_ids) == len(plan.page_scales)
    assert plan.has_adapters == any(c.request.page_refs for c in chunks)


@given(st.lists(chunk(), min_size=1, max_size=8))
def test_logits_are_asked_of_whole_prompts_only(chunks: list[Chunk]) -> None:
    plan = build_plan(chunks)
    complete = [row for row, c in enumerate(plan.chunks) if c.completes]
    assert [plan.chunks[row].request for row in complete] == list(plan.sampled)
    assert plan.logit_positions.tolist() == [plan.query_starts[row + 1] - 1 for row in complete]
    single = all(c.num_tokens == 1 and c.completes for c in chunks)
    assert plan.is_decode == single


def test_arrays_have_the_types_of_the_kernels() -> None:
    request = Request(
        prompt_length=1, tokens=[1], mix=(), sampling=SamplingParams(), emit=print, arrived_s=0.0
    )
    request.blocks = [0]
    plan = build_plan([Chunk(request=request, num_tokens=1)])
    for name in (
        "tokens query_starts context_lens block_table logit_positions "
        "segment_starts page_starts page_ids"
    ).split():
        assert getattr(plan, name).dtype == np.int32, name
    assert plan.page_scales.dtype == np.float32
