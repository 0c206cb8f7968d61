"""Choosing a token from logits, by numbers that belong to the request alone."""

from __future__ import annotations

import numpy as np

from lorafleet.engine.request import SamplingParams


class Sampler:
    """One request's sampler; draws from its own generator, once a token.

    References: top-p is nucleus sampling (Holtzman et al., 2020).
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._rng = np.random.default_rng(params.seed) if params.temperature > 0 else None

    def sample(self, logits: np.ndarray) -> int | None:
        """Choose from (V,) float32 logits; the lowest id wins among equal ones when greedy.

        None when the logits hold NaN or infinity: there is nothing to choose from.
        """
        best = int(logits.argmax())  # the first NaN, if there is one
        if not np.isfinite(logits[best]):
            return None
        if self._rng is None:
            return best
        # Relative to the largest before the division: no temperature is too low for that.
        with np.errstate(over="ignore"):
            weights = np.exp((logits.astype(np.float64) - logits[best]) / self._params.temperature)
        ids = self._candidates(weights)
        cumulative = np.cumsum(weights if ids is None else weights[ids])
        place = int(np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right"))
        place = min(place, len(cumulative) - 1)
        return place if ids is None else int(ids[place])

    def _candidates(self, weights: np.ndarray) -> np.ndarray | None:
        """Ids that top-k and top-p leave, the likeliest first; None when all are left."""
        top_k, top_p = self._params.top_k, self._params.top_p
        num_tokens = len(weights)
        limited = 0 < top_k < num_tokens
        if not limited and top_p >= 1.0:
            return None
        # Sorting a whole vocabulary takes as long as a small model's step, so what cannot be chosen
        # goes first: below the k-th largest weight; or so small that all of its kind together are
        # less than 1 - p.
        floor = np.partition(weights, num_tokens - top_k)[num_tokens - top_k] if limited else 0.0
        if top_p < 1.0 and not limited:
            floor = weights.sum() * (1.0 - top_p) / num_tokens
        ids = np.flatnonzero(weights >= floor)
        ids = ids[np.argsort(-weights[ids], kind="stable")]
        if limited:
            ids = ids[:top_k]
        if top_p < 1.0:
            # The smallest set whose share reaches p: never empty. Shares are of what top-k leaves.
            total = weights[ids].sum() if limited else weights.sum()
            kept = int(np.searchsorted(np.cumsum(weights[ids]), top_p * total)) + 1
            ids = ids[:kept]
        return ids
