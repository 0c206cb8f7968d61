"""A request's input is checked where it is made; a client can do no harm from where it listens."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lorafleet.core.errors import InvalidInput
from lorafleet.engine.request import Event, Prompt, Request, SamplingParams, Started

STARTED = Started(resident=True, prompt_tokens=1)


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**64},
        {"stop": ("",)},
        {"stop": "END"},  # would be taken letter by letter
    ],
)
def test_sampling_out_of_range_is_refused_by_field(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        SamplingParams(**change)
    assert caught.value.facts["field"] == next(iter(change))


def test_the_ends_of_the_ranges_are_allowed() -> None:
    SamplingParams(max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, seed=0)
    SamplingParams(temperature=2.0, top_p=1e-9, seed=2**64 - 1)


@pytest.mark.parametrize(
    "parts", [{}, {"text": "a", "token_ids": [1]}, {"text": "", "messages": []}]
)
def test_a_prompt_is_exactly_one_thing(parts: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="expected one of"):
        Prompt(**parts)


def make(emit: Any) -> Request:
    return Request(
        prompt_length=3,
        tokens=[1, 2, 3],
        mix=(),
        sampling=SamplingParams(max_tokens=4),
        emit=emit,
        arrived_s=0.0,
    )


def test_counts_follow_the_tokens() -> None:
    request = make(print)
    assert (request.num_generated, request.num_pending, request.max_length) == (0, 3, 7)
    request.num_cached = 3
    request.tokens.append(9)
    assert (request.num_generated, request.num_pending) == (1, 1)


def test_events_reach_the_client() -> None:
    seen: list[Event] = []
    request = make(seen.append)
    request.send(STARTED)
    assert seen == [STARTED]
    assert not request.cancelled.is_set()


def test_a_client_that_cannot_listen_has_gone_away() -> None:
    def gone(event: Event) -> None:
        raise RuntimeError("Event loop is closed")

    request = make(gone)
    request.send(STARTED)
    assert request.cancelled.is_set()
