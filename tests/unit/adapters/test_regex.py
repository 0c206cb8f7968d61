"""The bounded expressions mean what Python's mean, and cost what they were given at most."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.adapters.regex import RegexError, Steps, parse

ATOMS = st.sampled_from(
    ["a", "b", "1", "_", ".", r"\.", r"\d", r"\w", r"\W", "[ab]", "[^a]", "[a-b.]", r"[\d_-]", ""]
)
REPEATS = st.sampled_from(["", "", "*", "+", "?", "*?", "+?", "{2}", "{1,}", "{,2}", "{1,2}"])
ATOM = st.tuples(ATOMS, REPEATS).map(lambda pair: "".join(pair) if pair[0] else "")
EXPRESSIONS = st.recursive(
    ATOM,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map("|".join),
        st.tuples(inner, REPEATS).map(lambda pair: f"({pair[0]}){pair[1]}"),
        inner.map(lambda text: f"(?:{text})"),
        inner.map(lambda text: f"^{text}"),
        inner.map(lambda text: f"{text}$"),
    ),
    max_leaves=6,
)


def fully_matches(expression: str, text: str, steps: int = 1_000_000) -> bool:
    return len(text) in parse(expression)(text, {0}, Steps(steps))


@settings(max_examples=600, deadline=None)
@given(EXPRESSIONS, st.text("ab1_.", max_size=6))
def test_it_matches_what_python_matches(expression: str, text: str) -> None:
    assert fully_matches(expression, text) == bool(re.fullmatch(expression, text)), expression


@pytest.mark.parametrize(
    "expression",
    [
        "[]a]",
        "[^]a]",
        "[a-]",
        "[-a]",
        r"[\]]",
        "a{0}",
        "(|a)",
        "a||b",
        "()",
        r"\-",
        r"[.]",
        "]",
        "}",
    ],
)
def test_corners_of_the_syntax_are_pythons(expression: str) -> None:
    for text in ("", "a", "b", "-", "]", "}", ".", "aa", "]a"):
        assert fully_matches(expression, text) == bool(re.fullmatch(expression, text)), text


@pytest.mark.parametrize(
    "expression",
    ["(", ")", "a)|(b", "[", "[]", "*", "a**", "a{2}{3}", "a{3,2}", "[b-a]", "\\", r"[\d-z]"],
)
def test_what_python_refuses_is_refused(expression: str) -> None:
    with pytest.raises(RegexError):
        parse(expression)
    if expression != "a)|(b":  # in PEFT's own wrapping even this is one
        with pytest.raises(re.error):
            re.compile(expression)


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("(?=a)", "look-around"),
        ("(?i:a)", "flags"),
        ("(?P<x>a)", "named groups"),
        (r"(a)\1", r"\\1 is not supported"),
        (r"\bq_proj", r"\\b is not supported"),
        ("a*+", "possessive"),
        ("a{b", "write"),
        ("(" * 40 + ")" * 40, "deeper than 32"),
        ("a" * 600, "longer than 512"),
    ],
)
def test_what_is_not_supported_is_named(expression: str, why: str) -> None:
    with pytest.raises(RegexError, match=why):
        parse(expression)


@pytest.mark.parametrize(
    "expression",
    ["(a+)+X", "(([a-z._0-9]+)+)+X", "(a|a)*X", "(.|.)" * 90 + "X", ".*" * 60 + "X", "(a?){99}X"],
)
def test_expressions_that_hang_python_are_matched_in_few_steps(expression: str) -> None:
    assert not fully_matches(expression, "a" * 80, steps=200_000)


def test_what_costs_more_than_it_was_given_ends_there() -> None:
    with pytest.raises(RegexError, match="too many steps"):
        fully_matches("(a*b?)*X", "ab" * 50, steps=100)
