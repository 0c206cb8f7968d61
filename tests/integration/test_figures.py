"""The figures of the first light, held to their goals."""

from __future__ import annotations

import importlib.util

import pytest

from lorafleet.bench import FIGURES, run

needs_oracle = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "peft")),
    reason="the oracle (torch, transformers, peft) is not installed",
)


@needs_oracle
@pytest.mark.timeout(900)
def test_logits_and_greedy_tokens_are_those_of_peft() -> None:
    result = run(FIGURES["first_light_logits_vs_peft"], print)
    assert result["holds"], result


@pytest.mark.timeout(900)
def test_requests_find_their_adapter() -> None:
    result = run(FIGURES["first_light_affinity"], print)
    assert result["holds"], result
