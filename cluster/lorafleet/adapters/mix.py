"""Mixing adapters offline: several in, one plain LoRA adapter out, by PEFT's definitions.

At run time a weighted mix needs no file: a request names it. This is for what only a file can be:
pruned, sign-elected or re-factored mixes, and mixes to be shipped.

References: PEFT 0.21, `LoraModel.add_weighted_adapter`. There the result inherits rsLoRA from the
first adapter, whose scale is then applied twice; here the result's scale is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lorafleet.adapters.combine import Recipe, truncated, truncated_whole
from lorafleet.adapters.modules import ModuleFactors, PlainAdapter
from lorafleet.core.errors import InvalidInput

_RECIPES = {
    "linear": Recipe(),
    "magnitude_prune": Recipe(prune="magnitude"),
    "ties": Recipe(prune="magnitude", elect="total"),
    "dare_linear": Recipe(prune="random"),
    "dare_ties": Recipe(prune="random", elect="total"),
}

METHODS = ("cat", "svd", *_RECIPES, *(f"{name}_svd" for name in _RECIPES if name != "linear"))
"""`cat` and `svd` are exact (svd at full rank); the others work on A and B apart, or with `_svd` on
their product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixOptions:
    """How to mix.

    Parameters
    ----------
    method : str
        One of `METHODS`.
    density : float
        The share of values that pruning methods keep, in (0, 1].
    sign : str
        The majority of TIES: `total` or `frequency`.
    rank : int, optional
        Of the result of `svd` methods; the largest of the adapters' if not given.
    seed : int
        Of DARE.
    """

    method: str = "cat"
    density: float = 1.0
    sign: str = "total"
    rank: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidInput(
                f"method: expected one of {', '.join(METHODS)}, got {self.method!r}",
                field="method",
            )
        if self.sign not in ("total", "frequency"):
            raise InvalidInput(
                f"sign: expected total or frequency, got {self.sign!r}", field="sign"
            )
        if self.rank is not None and self.rank < 1:
            raise InvalidInput(f"rank: expected a positive integer, got {self.rank}", field="rank")

    def recipe(self) -> Recipe:
        """The arithmetic of a method that has one."""
        recipe = _RECIPES[self.method.removesuffix("_svd")]
        elect = recipe.elect and self.sign
        return replace(recipe, elect=elect, density=self.density, seed=self.seed)


def mix(
    adapters: Sequence[PlainAdapter], weights: Sequence[float], options: MixOptions
) -> PlainAdapter:
    """Mix adapters with weights, which may be negative.

    A module that only some of them adapt is mixed of those.

    Raises
    ------
    InvalidInput
        There are no adapters, not as many weights, or shapes or ranks that do not fit; named.
    """
    if not adapters or len(adapters) != len(weights):
        raise InvalidInput(
            f"expected as many weights as adapters, and one at least; got {len(weights)} and "
            f"{len(adapters)}",
            field="weights",
        )
    if not all(math.isfinite(weight) for weight in weights):
        raise InvalidInput(f"weights: expected finite numbers, got {list(weights)}")
    rank = options.rank or max(m.rank for adapter in adapters for m in adapter.modules.values())
    combiner = _Combiner(options, rank)
    modules = {}
    for name in sorted({name for adapter in adapters for name in adapter.modules}):
        terms = [
            (adapter.modules[name], weight)
            for adapter, weight in zip(adapters, weights, strict=True)
            if name in adapter.modules
        ]
        _check_shapes(name, [module for module, _ in terms])
        modules[name] = combiner.module(name, terms)
    dtypes = {adapter.dtype for adapter in adapters}
    return PlainAdapter(
        modules=modules,
        dtype=dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32),
        base_model_name=adapters[0].base_model_name,
    )


class _Combiner:
    """Makes one module of several, each with its weight."""

    def __init__(self, options: MixOptions, rank: int) -> None:
        self._method = options.method
        self._rank = rank
        # One for all modules: its randomness goes on from one to the next.
        self._recipe = options.recipe() if options.method not in ("cat", "svd") else None

    def module(self, name: str, terms: Sequence[tuple[ModuleFactors, float]]) -> ModuleFactors:
        if self._recipe is None:
            a = np.concatenate([m.a * np.float32(w * m.scale) for m, w in terms])
            b = np.concatenate([m.b for m, _ in terms], axis=1)
            if self._method == "svd":
                b, a = truncated(b, a, self._rank)
        elif self._method.endswith("_svd"):
            deltas = [np.float32(m.scale) * (m.b @ m.a) for m, _ in terms]
            whole = self._recipe.combine(deltas, [w for _, w in terms])
            b, a = truncated_whole(whole, self._rank)
        else:
            a, b = self._apart(self._recipe, name, terms)
        return ModuleFactors(a=a, b=b, scale=1.0)

    def _apart(
        self, recipe: Recipe, name: str, terms: Sequence[tuple[ModuleFactors, float]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """A and B each by itself: half of each weight goes to either, the sign to A."""
        ranks = {module.rank for module, _ in terms}
        if len(ranks) > 1:
            raise InvalidInput(
                f"{name}: {self._method} needs equal ranks, got {sorted(ranks)}; use cat, svd or a "
                "method with _svd",
                field="method",
            )
        scales = [weight * module.scale for module, weight in terms]
        halves = [math.sqrt(abs(scale)) for scale in scales]
        signed = [math.copysign(half, scale) for half, scale in zip(halves, scales, strict=True)]
        a = recipe.combine([module.a for module, _ in terms], signed)
        return a, recipe.combine([module.b for module, _ in terms], halves)


def _check_shapes(name: str, modules: Iterable[ModuleFactors]) -> None:
    shapes = {(len(module.b), module.a.shape[1]) for module in modules}
    if len(shapes) > 1:
        raise InvalidInput(
            f"{name}: the adapters are for layers of different shapes, {sorted(shapes)}; they are "
            "not of one base model",
            field=name,
        )
