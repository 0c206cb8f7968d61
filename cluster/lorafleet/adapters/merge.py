"""Merging adapters into a base's weights: the change of each of its linear layers.

References: Hu et al., "LoRA" (2021), section 4.1; PEFT 0.21, `merge_and_unload`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from lorafleet.adapters.adapter import LoraAdapter
from lorafleet.core.errors import InvalidInput, Unsupported
from lorafleet.core.model import Site

Read = Callable[[str], np.ndarray]
"""A tensor of the checkpoint by name, float32; raises NotFound when there is none."""


class Merger:
    """W + the sum of scale * (the change by an adapter), layer by layer.

    Parameters
    ----------
    adapters : sequence of (LoraAdapter, float)
        With the scale of each, which may be negative.
    read : callable
        Reads the checkpoint's own tensors.

    Raises
    ------
    InvalidInput
        A scale is not finite.
    Unsupported
        An adapter has a bias for a layer without one.
    """

    def __init__(self, adapters: Sequence[tuple[LoraAdapter, float]], read: Read) -> None:
        self._adapters = adapters
        self._places: dict[str, tuple[int, slice]] = {}
        for adapter, scale in adapters:
            if not math.isfinite(scale):
                raise InvalidInput(f"scale: expected a finite number, got {scale}", field="scale")
            for module in adapter.modules:
                self._add(adapter.base.sites[module.targets[0].site], module.targets[0].site)
                has_bias = adapter.base.sites[module.targets[0].site].has_bias
                if module.lora_bias is not None and not has_bias:
                    raise Unsupported(
                        f"{module.source}: lora_bias cannot be merged into a layer without a bias",
                        field="lora_bias",
                    )
        sites = adapters[0][0].base.sites if adapters else ()
        self._weights = SourceWeights(sites, read)

    def change(self, name: str, values: np.ndarray) -> np.ndarray:
        """New values of a tensor of the checkpoint; the same array when nothing changes."""
        module, _, kind = name.rpartition(".")
        if module not in self._places or kind not in ("weight", "bias"):
            return values
        index, rows = self._places[module]
        for adapter, scale in self._adapters:
            site = adapter.base.sites[index].name
            delta = adapter.delta if kind == "weight" else adapter.bias_delta
            values = values + np.float32(scale) * delta(site, self._weights)[rows]
        return values

    def _add(self, site: Site, index: int) -> None:
        for part in site.parts:
            self._places[part.source] = (index, slice(part.out_start, part.out_end))


class SourceWeights:
    """The base's weights by site, from a checkpoint's own tensors; see `BaseWeights`."""

    def __init__(self, sites: Sequence[Site], read: Read) -> None:
        self._sites = sites
        self._read = read

    def weight(self, site: int) -> np.ndarray:
        """W, (out_features, in_features) float32."""
        return self._rows(site, "weight")

    def bias(self, site: int) -> np.ndarray | None:
        """b, (out_features,) float32, if the layer has one."""
        return self._rows(site, "bias") if self._sites[site].has_bias else None

    def _rows(self, site: int, kind: str) -> np.ndarray:
        parts = self._sites[site].parts
        return np.concatenate([self._read(f"{part.source}.{kind}") for part in parts])
