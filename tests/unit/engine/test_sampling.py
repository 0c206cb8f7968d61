"""Tokens are drawn from the right distribution, by the request's own numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.engine.request import SamplingParams
from lorafleet.engine.sampling import Sampler


def expected_share(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The definition, plainly: softmax, the k likeliest, of them the fewest that reach p."""
    logits = logits.astype(np.float64) / params.temperature
    share = np.exp(logits - logits.max())
    order = np.argsort(-share, kind="stable")
    order = order[: params.top_k or len(order)]
    reached = np.cumsum(share[order]) / share[order].sum()
    order = order[: int(np.searchsorted(reached, params.top_p)) + 1]
    result = np.zeros_like(share)
    result[order] = share[order] / share[order].sum()
    return result


def draws(logits: np.ndarray, params: SamplingParams, count: int) -> list[int]:
    sampler = Sampler(params)
    return [token for _ in range(count) if (token := sampler.sample(logits)) is not None]


@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_shares_of_draws_are_the_defined_ones(temperature: float, top_p: float, top_k: int) -> None:
    logits = np.random.default_rng(0).standard_normal(50).astype(np.float32) * 2
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=1)
    expected = expected_share(logits, params)
    found = np.bincount(draws(logits, params, 4000), minlength=50) / 4000
    assert not (found[expected == 0]).any()
    # Four standard deviations of a share over so many draws.
    assert (np.abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / 4000) + 1e-9).all()


@settings(max_examples=200)
@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    st.integers(0, 45),
    st.floats(0.01, 1.0),
    st.floats(0.01, 2.0),
)
def test_only_what_the_limits_leave_is_ever_drawn(
    values: list[float], top_k: int, top_p: float, temperature: float
) -> None:
    logits = np.array(values, dtype=np.float32)
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=0)
    # A hair more of p: where shares reach it exactly, rounding decides.
    wider = SamplingParams(temperature=temperature, top_p=min(1.0, top_p * (1 + 1e-9)), top_k=top_k)
    allowed = expected_share(logits, wider)
    assert all(
        allowed[token] > 0 or logits[token] == logits.max() for token in draws(logits, params, 20)
    )


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert draws(np.array([0, 3, 1, 3], dtype=np.float32), SamplingParams(), 2) == [1, 1]


def test_a_seed_repeats_and_another_does_not() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    first = draws(logits, SamplingParams(temperature=1.0, seed=5), 20)
    assert first == draws(logits, SamplingParams(temperature=1.0, seed=5), 20)
    assert first != draws(logits, SamplingParams(temperature=1.0, seed=6), 20)
    # Without a seed no two requests are alike.
    assert draws(logits, SamplingParams(temperature=1.0), 20) != first


@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e-10, 1e-3])
def test_no_temperature_is_too_low(temperature: float) -> None:
    logits = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    params = SamplingParams(temperature=temperature, seed=0)
    assert set(draws(logits, params, 5)) == {int(logits.argmax())}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_c22_logits_that_are_not_finite_choose_nothing(bad: float, temperature: float) -> None:
    logits = np.zeros(10, dtype=np.float32)
    logits[4] = bad
    assert Sampler(SamplingParams(temperature=temperature)).sample(logits) is None
