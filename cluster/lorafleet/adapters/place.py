"""From an adapter's modules to the base's sites: names, shapes, ranks, scales.

A module is found among the original linears that the sites were fused from, or it is a whole fused
site whose adapter is split over the site's parts (A shared, B by rows).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lorafleet.adapters.checkpoint import Factor
from lorafleet.adapters.config import LoraConfig
from lorafleet.core.errors import InvalidAdapter, Unsupported
from lorafleet.core.model import BaseModel, SitePart

MAX_RANK = 256
"""The largest rank accepted, for any one module."""

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where part of a module's B rows go: rows [b_start, b_end) to one part of one site."""

    site: int
    part: int
    b_start: int
    b_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModule:
    """One adapted linear: A is (rank, in_features), B is (out_features, rank)."""

    source: str
    rank: int
    alpha: float
    scale: float
    in_features: int
    out_features: int
    dtype: str
    a: Factor
    b: Factor
    targets: tuple[Target, ...]


def place(config: LoraConfig, factors: Iterable[Factor], base: BaseModel) -> list[AdaptedModule]:
    """Check every factor against the base and say where it goes, in the order of the sites.

    Raises
    ------
    InvalidAdapter
        A tensor maps to no site, has no partner, or has the wrong shape (both shapes are named).
    Unsupported
        A dtype or a rank beyond what is served.
    """
    directory = _Directory(base)
    pairs: dict[str, dict[str, Factor]] = {}
    for factor in factors:
        source = directory.find(factor)
        twin = pairs.setdefault(source, {}).setdefault(factor.kind, factor)
        if twin is not factor:
            raise _at(factor, f"{twin.tensor!r} is for the same module")
    modules = [_module(source, pair, config, directory) for source, pair in sorted(pairs.items())]
    seen: dict[tuple[int, int], AdaptedModule] = {}
    for module in modules:
        for target in module.targets:
            other = seen.setdefault((target.site, target.part), module)
            if other is not module:
                raise _at(module.a, f"adapts a layer that {other.a.tensor!r} adapts as well")
    return sorted(modules, key=lambda module: module.targets[0].site)


class _Directory:
    """Sites and parts of a base by the names that adapters use."""

    def __init__(self, base: BaseModel) -> None:
        self.base = base
        self.parts: dict[str, tuple[int, int, SitePart]] = {}
        self.fused: dict[str, int] = {}
        for i, site in enumerate(base.sites):
            self.fused[site.name] = i
            for j, part in enumerate(site.parts):
                self.parts[part.source] = (i, j, part)

    def find(self, factor: Factor) -> str:
        for name in _spellings(factor.module):
            if name in self.parts or name in self.fused:
                return name
        raise _at(
            factor,
            f"maps to no adaptable layer of base model {self.base.name!r}: there is no "
            f"{factor.module!r}",
        )

    def targets(self, source: str) -> tuple[Target, ...]:
        if source in self.parts:
            i, j, part = self.parts[source]
            return (Target(site=i, part=j, b_start=0, b_end=part.out_features),)
        i = self.fused[source]
        return tuple(
            Target(site=i, part=j, b_start=part.out_start, b_end=part.out_end)
            for j, part in enumerate(self.base.sites[i].parts)
        )

    def shape(self, source: str) -> tuple[int, int]:
        """(out_features, in_features) of a module."""
        if source in self.parts:
            i, _, part = self.parts[source]
            return part.out_features, self.base.sites[i].in_features
        site = self.base.sites[self.fused[source]]
        return site.out_features, site.in_features


def _spellings(module: str) -> Iterator[str]:
    """A module's path, and the paths it has in classes that nest the language model otherwise."""
    yield module
    plain = ".".join(part for part in module.split(".") if part != "language_model")
    yield plain
    yield f"model.{plain}"
    yield plain.removeprefix("model.")


def _module(
    source: str, pair: dict[str, Factor], config: LoraConfig, directory: _Directory
) -> AdaptedModule:
    for kind, partner in (("A", "B"), ("B", "A")):
        if kind not in pair:
            raise _at(pair[partner], f"has no lora_{kind} beside it")
    a, b = pair["A"], pair["B"]
    rank = config.rank_of(a.module)
    out_features, in_features = directory.shape(source)
    _check_shape(a, (rank, in_features), source)
    _check_shape(b, (out_features, rank), source)
    if rank > MAX_RANK:
        raise _refuse(a, f"has rank {rank}; the limit is {MAX_RANK}")
    dtypes = {_dtype(a), _dtype(b)}
    scale = config.scale_of(a.module)
    if not math.isfinite(scale):
        raise _at(a, f"has a scale that is not finite: {scale}")
    return AdaptedModule(
        source=source,
        rank=rank,
        alpha=config.alpha_of(a.module),
        scale=scale,
        in_features=in_features,
        out_features=out_features,
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        a=a,
        b=b,
        targets=directory.targets(source),
    )


def _check_shape(factor: Factor, expected: tuple[int, int], source: str) -> None:
    _, shape = factor.file.info(factor.tensor)
    if shape != expected:
        raise _at(
            factor,
            f"has shape {list(shape)}, expected {list(expected)} for {source} "
            f"(the rank is adapter_config.json's r and rank_pattern)",
        )


def _dtype(factor: Factor) -> str:
    dtype, _ = factor.file.info(factor.tensor)
    if dtype not in _DTYPES:
        raise _refuse(factor, f"has dtype {dtype}; expected F32, BF16 or F16")
    return _DTYPES[dtype]


def _at(factor: Factor, what: str) -> InvalidAdapter:
    file = factor.file.path.name
    return InvalidAdapter(
        f"{file}: tensor {factor.tensor!r} {what}", file=file, tensor=factor.tensor
    )


def _refuse(factor: Factor, what: str) -> Unsupported:
    file = factor.file.path.name
    return Unsupported(f"{file}: tensor {factor.tensor!r} {what}", file=file, tensor=factor.tensor)
