"""Choosing a token from logits, by numbers that belong to the request alone."""

from __future__ import annotations

import numpy as np

from lorafleet.engine.request import SamplingParams


class Sampler:
    """One request's sampler; draws from its own generator.

    References: top-p is nucleus sampling (Holtzman et al., 2020).
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._rng = np.random.default_rng(params.seed) if params.temperature > 0 else None

    def sample(self, logits: np.ndarray) -> int:
        """Choose from (V,) float32 logits; the lowest id wins among equal ones when greedy."""
        if self._rng is None:
            return int(logits.argmax())
        params = self._params
        scaled = logits.astype(np.float64) / params.temperature
        order = np.argsort(-scaled, kind="stable")
        if params.top_k:
            order = order[: params.top_k]
        probabilities = np.exp(scaled[order] - scaled[order[0]])
        probabilities /= probabilities.sum()
        if params.top_p < 1.0:
            # The smallest set whose probability reaches top_p: never empty.
            kept = int(np.searchsorted(np.cumsum(probabilities), params.top_p)) + 1
            order, probabilities = order[:kept], probabilities[:kept]
        cumulative = np.cumsum(probabilities)
        place = np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right")
        return int(order[min(int(place), len(order) - 1)])
