"""How compiled parameters are made from a checkpoint's tensors.

A map is data plus pure functions, so that it can be run on real weights to load them and on marked
arrays to learn where each source's rows go (see `probe`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


def concat_rows(*arrays: np.ndarray) -> np.ndarray:
    """Stack along the output axis: how q, k and v become one."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One parameter's sources, in the order in which `make` takes them."""

    sources: tuple[str, ...]
    make: Callable[..., np.ndarray] = concat_rows


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Origins by parameter name."""

    origins: dict[str, Origin] = field(default_factory=dict)

    def add(self, parameter: str, *sources: str) -> None:
        """Map a parameter to sources stacked by rows."""
        self.origins[parameter] = Origin(sources=sources)
