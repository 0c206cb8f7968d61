"""What an adapter does to a layer's output besides rank rows: gains and shifts.

    y <- y + gain * y + shift        y = W x + b, each (out_features,)

DoRA (Liu et al., 2024) replaces the norm of each row of W + s B A by a trained magnitude m. With
g = m / |W + s B A| its output is g (W x + s B A x) + b, so gain = g - 1, B becomes g B, and the
bias, which DoRA does not rescale, is given back by the shift. A trained bias b' adds b' - b, and a
bias of lora_B adds s times itself. Only this needs the base's weights, which the engine has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lorafleet.adapters.place import AdaptedModule
from lorafleet.core.errors import Internal

# Rows of W that are widened at once: a few MiB whatever the layer.
_ROWS = 256


class BaseWeights(Protocol):
    """The base's weights, by site; dequantised if need be."""

    def weight(self, site: int) -> np.ndarray:
        """W, (out_features, in_features) float32."""
        ...

    def bias(self, site: int) -> np.ndarray | None:
        """b, (out_features,) float32, if the layer has one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """A module's gain and shift, (out_features,) float32."""

    gain: np.ndarray
    shift: np.ndarray


def affine(
    module: AdaptedModule, a: np.ndarray, b: np.ndarray, weights: BaseWeights | None
) -> Affine | None:
    """Gain and shift of a module; None if it has neither.

    Parameters
    ----------
    module : AdaptedModule
        What is adapted.
    a : (r, in_features) float32
    b : (out_features, r) float32
        With the scale s.
    weights : BaseWeights, optional
        Needed for magnitudes and trained biases.

    Raises
    ------
    InvalidAdapter
        A row of W + s B A is zero, so that its direction is not defined.
    """
    if not module.is_affine:
        return None
    gain = np.zeros(module.out_features, np.float32)
    shift = np.zeros(module.out_features, np.float32)
    old = _rows_of(module, weights, bias=True)
    if module.magnitude is not None:
        norms = row_norms(_rows_of(module, weights), a, b)
        if not norms.all():
            raise module.magnitude.invalid("rescales a row of W + s B A that is zero")
        gain = module.magnitude.values() / norms - np.float32(1)
        shift -= gain * old
    if module.bias is not None:
        shift += module.bias.values() - old
    if module.lora_bias is not None:
        shift += np.float32(module.scale) * module.lora_bias.values()
    return Affine(gain=gain, shift=shift)


def row_norms(weight: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Euclidean norms of the rows of W + b a, (out_features,) float32."""
    norms = np.empty(len(weight), np.float32)
    for start in range(0, len(weight), _ROWS):
        rows = slice(start, start + _ROWS)
        norms[rows] = np.linalg.norm(weight[rows] + b[rows] @ a, axis=1)
    return norms


def _rows_of(
    module: AdaptedModule, weights: BaseWeights | None, *, bias: bool = False
) -> np.ndarray:
    """The module's rows of W, or its part of b (zeros where the layer has none)."""
    first = module.targets[0]
    if bias and weights is None and module.magnitude is None and module.bias is None:
        return np.zeros(module.out_features, np.float32)
    if weights is None:
        raise Internal(f"{module.source}: the base's weights are needed, but not given")
    whole = weights.bias(first.site) if bias else weights.weight(first.site)
    if whole is None:
        return np.zeros(module.out_features, np.float32)
    return whole[module.out_start : module.out_start + module.out_features]
