"""What strangers wrote is quoted and cut before it enters a message."""

from __future__ import annotations

import json

import pytest

from lorafleet.adapters.faults import invalid, shown, unsupported


@pytest.mark.parametrize(
    ("value", "text"),
    [("LORA", "'LORA'"), (None, "null"), (True, "true"), ([1], "[1]"), ("\ud800\n", r"'\ud800\n'")],
)
def test_values_are_shown_as_in_the_file(value: object, text: str) -> None:
    assert shown(value) == text


def test_long_values_are_cut() -> None:
    assert len(shown("x" * 10**6)) == 80
    assert shown(["x" * 100]).endswith("...")


def test_deep_values_are_not_followed() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert shown(value) == "a list that cannot be shown"
    while value:  # the interpreter would free it recursively
        value = value.pop()  # type: ignore[assignment]


def test_messages_and_facts_are_short_and_can_be_encoded() -> None:
    error = unsupported("f.json", "is wrong", field="\ud800" * 10**5, tensor="t\n")
    assert error.message == "f.json: is wrong"
    assert error.facts["file"] == "f.json"
    assert error.facts["tensor"] == r"t\n"
    assert len(error.facts["field"].encode()) <= 200
    assert json.dumps(invalid("f.json", "is wrong").facts) == '{"file": "f.json"}'
