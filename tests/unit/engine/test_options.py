"""Options that cannot work stop the start, by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lorafleet.core.errors import InvalidInput
from lorafleet.engine import EngineOptions


@pytest.mark.parametrize(
    "change",
    [
        {"kv_tokens": 0},
        {"num_adapter_pages": 0},
        {"max_batch": 0},
        {"max_step_tokens": 0},
        {"max_waiting": 0},
        {"max_loads": 0},
        {"num_threads": 0},
        {"age_limit_s": -1.0},
        {"age_limit_s": math.nan},
    ],
)
def test_options_out_of_range_are_refused_by_field(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        EngineOptions(**change)
    assert caught.value.facts["field"] == next(iter(change))


def test_a_step_has_room_for_every_sequence() -> None:
    with pytest.raises(InvalidInput, match=r"max_step_tokens \(8\) must not be below max_batch"):
        EngineOptions(max_batch=9, max_step_tokens=8)
    EngineOptions(max_batch=8, max_step_tokens=8)


def test_unknown_options_fail() -> None:
    with pytest.raises(TypeError):
        EngineOptions(kv_token=1)  # type: ignore[call-arg]
