"""Combining task tensors: the arithmetic of model merging, on plain arrays.

Several tensors of one shape and their weights become one. Definitions and names are those of PEFT
0.21 (`peft.utils.merge_utils`), so that its recipes mean the same here. It knows no adapters.

References: Ilharco et al., "Editing Models with Task Arithmetic" (2022); Yadav et al.,
"TIES-Merging" (2023); Yu et al., "Language Models are Super Mario" (DARE, 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lorafleet.core.errors import InvalidInput

Pruner = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to combine.

    Parameters
    ----------
    prune : str, optional
        `magnitude` keeps the largest values of each tensor, `random` any, rescaled so that the
        expectation stays (DARE). None keeps all.
    elect : str, optional
        Only values of the majority's sign are averaged (TIES); the majority is by `total` value or
        by `frequency`. None adds all.
    density : float
        The share of values that pruning keeps, in (0, 1].
    seed : int
        Of random pruning.
    """

    prune: str | None = None
    elect: str | None = None
    density: float = 1.0
    seed: int = 0
    _random: np.random.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise InvalidInput(
                f"density: expected more than 0 and at most 1, got {self.density}", field="density"
            )
        object.__setattr__(self, "_random", np.random.default_rng(self.seed))

    def combine(self, tensors: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
        """One float32 tensor of several of the same shape."""
        pruned = np.stack([self._pruner()(tensor) for tensor in tensors])
        shape = (-1, *(1,) * (pruned.ndim - 1))
        weighted = pruned * np.asarray(weights, np.float32).reshape(shape)
        if self.elect is None:
            return np.asarray(weighted.sum(axis=0, dtype=np.float32))
        kept = majority(pruned, self.elect)
        counts = np.maximum(kept.sum(axis=0), 1).astype(np.float32)
        return np.asarray((weighted * kept).sum(axis=0) / counts)

    def _pruner(self) -> Pruner:
        if self.prune is None or self.density == 1:
            return lambda tensor: tensor
        if self.prune == "magnitude":
            return partial(keep_largest, density=self.density)
        return partial(keep_random, density=self.density, random=self._random)


def keep_largest(tensor: np.ndarray, density: float) -> np.ndarray:
    """The tensor with all but its largest magnitudes zeroed; int(density * size) are kept."""
    count = int(density * tensor.size)
    kept = np.zeros(tensor.size, bool)
    if count:
        kept[np.argpartition(np.abs(tensor).ravel(), -count)[-count:]] = True
    return np.where(kept.reshape(tensor.shape), tensor, np.float32(0))


def keep_random(tensor: np.ndarray, density: float, random: np.random.Generator) -> np.ndarray:
    """The tensor with each value kept with a probability, and scaled by its inverse."""
    kept = random.random(tensor.shape) < density
    return np.where(kept, tensor, np.float32(0)) / np.float32(density)


def majority(tensors: np.ndarray, method: str) -> np.ndarray:
    """Which values, of tensors stacked on the first axis, have the sign of their majority.

    An element whose signs balance counts as positive.
    """
    votes = tensors if method == "total" else np.sign(tensors)
    sign = np.where(votes.sum(axis=0) >= 0, 1, -1)
    return np.asarray(np.sign(tensors) == sign)


def truncated(b: np.ndarray, a: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The best (B', A') of a rank for the product of b (out, R) and a (R, in).

    By the singular values of the small R x R matrix between two orthonormal bases: the whole
    product is never made. B' has the singular values.
    """
    q_b, r_b = np.linalg.qr(b.astype(np.float64))
    q_a, r_a = np.linalg.qr(a.T.astype(np.float64))
    u, s, vt = np.linalg.svd(r_b @ r_a.T)
    return _factors(q_b @ u, s, vt @ q_a.T, rank)


def truncated_whole(delta: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The best (B', A') of a rank for a whole matrix (out, in)."""
    u, s, vt = np.linalg.svd(delta.astype(np.float64), full_matrices=False)
    return _factors(u, s, vt, rank)


def _factors(
    u: np.ndarray, s: np.ndarray, vt: np.ndarray, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    rank = min(rank, len(s))
    return (u[:, :rank] * s[:rank]).astype(np.float32), vt[:rank].astype(np.float32)
