"""The tree of errors: codes, retries, facts, and what survives a process border."""

from __future__ import annotations

import pickle
import re

import pytest

from lorafleet.core import errors
from lorafleet.core.errors import LorafleetError, Retry

KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, LorafleetError)
}


def test_the_drawing_at_the_top_is_the_tree() -> None:
    drawn = re.findall(r"[├└]── (\w+)\s.*?([A-Z_]{5,})\s+([a-z ]+)", errors.__doc__ or "")
    assert {name for name, _, _ in drawn} == set(KINDS) - {"LorafleetError"}
    for name, code, retry in drawn:
        assert KINDS[name].code == code
        assert KINDS[name].retry.value == retry.strip().replace(" ", "_")


def test_invalid_adapters_and_refused_features_are_invalid_input() -> None:
    assert issubclass(errors.InvalidAdapter, errors.InvalidInput)
    assert issubclass(errors.Unsupported, errors.InvalidInput)


def test_facts_are_text_and_absent_ones_are_left_out() -> None:
    error = errors.InvalidAdapter("bad rank", file="adapter_config.json", rank=96, tensor=None)
    assert error.facts == {"file": "adapter_config.json", "rank": "96"}
    assert str(error) == error.message == "bad rank"


@pytest.mark.parametrize("kind", KINDS.values())
def test_an_error_survives_pickling_with_its_facts(kind: type[LorafleetError]) -> None:
    back = pickle.loads(pickle.dumps(kind("message", adapter="a")))
    assert type(back) is kind
    assert (back.message, back.facts) == ("message", {"adapter": "a"})


def test_what_changes_by_waiting_or_elsewhere_says_so() -> None:
    assert errors.NotFound.retry is Retry.NEVER
    assert errors.Conflict.retry is Retry.AFTER_CHANGE
    assert errors.Exhausted.retry is Retry.SAME_REPLICA
    assert errors.Unavailable.retry is Retry.OTHER_REPLICA
