"""From an adapter's modules to the base's sites: names, shapes, ranks, scales.

A module is found among the original linears that the sites were fused from, or it is a whole fused
site whose adapter is split over the site's parts (A shared, B by rows). It reads headers only: the
weights' values are for `adapter`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lorafleet.adapters.checkpoint import Factor, Kind
from lorafleet.adapters.config import LoraConfig
from lorafleet.adapters.faults import shown, shown_name
from lorafleet.adapters.files import CONFIG_FILE
from lorafleet.adapters.regex import Steps
from lorafleet.core.errors import InvalidInput
from lorafleet.core.model import BaseModel, SitePart

MAX_RANK = 256
"""The largest rank accepted for any one module, unless another limit is given."""

FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Scales are applied in float32: beyond these they are infinite, or switch the adapter off."""

# What matching patterns may cost: some seconds at the very worst. A key for each of 600 modules
# (EVA) costs a tenth of it.
_MATCH_STEPS = 10_000_000

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

_KIND_NAMES: Mapping[Kind, str] = {
    "magnitude": "lora_magnitude_vector",
    "lora_bias": "lora_B.bias",
}

# What a tensor cannot be without.
_NEEDS_A: tuple[Kind, str] = ("A", "lora_A")
_PARTNERS: Mapping[Kind, tuple[tuple[Kind, str], ...]] = {
    "A": (("B", "lora_B"),),
    "B": (_NEEDS_A,),
    "magnitude": (_NEEDS_A,),
    "lora_bias": (_NEEDS_A,),
}

_UNADAPTED = frozenset("embed_tokens lm_head wte word_embeddings embed_in embed_out".split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where part of a module's B rows go: rows [b_start, b_end) to one part of one site."""

    site: int
    part: int
    b_start: int
    b_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModule:
    """One adapted linear: A is (rank, in_features), B is (out_features, rank).

    Its outputs are the site's from `out_start` on. `magnitude` (DoRA), `lora_bias` (of lora_B) and
    `bias` (trained, in place of the layer's own) are (out_features,). A layer of which only the
    bias was trained has rank 0 and neither A nor B.
    """

    source: str
    rank: int
    alpha: float
    scale: float
    in_features: int
    out_features: int
    out_start: int
    dtype: str
    a: Factor | None
    b: Factor | None
    magnitude: Factor | None
    lora_bias: Factor | None
    bias: Factor | None
    targets: tuple[Target, ...]

    @property
    def factors(self) -> tuple[Factor, ...]:
        """All its tensors, in one order."""
        every = (self.a, self.b, self.magnitude, self.lora_bias, self.bias)
        return tuple(factor for factor in every if factor is not None)

    @property
    def is_affine(self) -> bool:
        """Whether it changes the layer's output by more than rank rows."""
        return len(self.factors) > 2 or self.a is None


def place(
    config: LoraConfig, factors: Iterable[Factor], base: BaseModel, *, max_rank: int = MAX_RANK
) -> list[AdaptedModule]:
    """Check every factor against the base and say where it goes, in the order of the sites.

    Raises
    ------
    InvalidAdapter
        A tensor maps to no site, has no partner, or has the wrong shape (both shapes are named).
    Unsupported
        A layer, a dtype or a rank that is not served.
    """
    directory = _Directory(base)
    found: dict[str, dict[Kind, Factor]] = {}
    for factor in factors:
        source = directory.find(factor)
        twin = found.setdefault(source, {}).setdefault(factor.kind, factor)
        if twin is not factor:
            raise factor.invalid(f"is for the same module as {shown_name(twin.tensor)}")
    rules = _Rules(config, max_rank)
    modules = [_module(source, each, rules, directory) for source, each in sorted(found.items())]
    seen: dict[tuple[int, int], AdaptedModule] = {}
    for module in modules:
        for target in module.targets:
            other = seen.setdefault((target.site, target.part), module)
            if other is not module:
                raise module.factors[0].invalid(
                    f"adapts a layer that {shown_name(other.factors[0].tensor)} adapts as well"
                )
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
        raise self._not_found(factor)

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

    def out_start(self, source: str) -> int:
        """The site's first output row that is a module's."""
        return self.parts[source][2].out_start if source in self.parts else 0

    def has_bias(self, source: str) -> bool:
        """Whether the base's layer has a bias."""
        index = self.parts[source][0] if source in self.parts else self.fused[source]
        return self.base.sites[index].has_bias

    def _not_found(self, factor: Factor) -> InvalidInput:
        if not self.base.sites:
            return factor.unsupported(
                f"cannot be served: base model {self.base.name!r} was compiled without LoRA; "
                "compile it with --lora"
            )
        if factor.kind == "bias":
            return factor.unsupported("is a trained bias of a layer that carries no LoRA")
        if factor.module.rsplit(".", 1)[-1] in _UNADAPTED:
            return factor.unsupported("is LoRA on an embedding or the head, which is not supported")
        return factor.invalid(
            f"maps to no adaptable layer of base model {self.base.name!r}: there is no "
            f"{shown_name(factor.module)}"
        )


# What wrappers of training (compilation, sharding, checkpointing, data parallelism) put into paths,
# and the name under which multi-modal classes nest the language model.
_WRAPPERS = frozenset(
    "_orig_mod _fsdp_wrapped_module _checkpoint_wrapped_module module language_model".split()
)


def _spellings(module: str) -> Iterator[str]:
    """A module's path, and the paths it has in classes that wrap or nest the model otherwise."""
    yield module
    plain = ".".join(part for part in module.split(".") if part not in _WRAPPERS)
    if plain != module:
        plain = plain.removeprefix("base_model.model.")  # a wrapper had hidden it
    yield plain
    yield f"model.{plain}"
    yield plain.removeprefix("model.")


class _Rules:
    """Rank, alpha and scale of modules, by an adapter's config and this system's limits."""

    def __init__(self, config: LoraConfig, max_rank: int) -> None:
        self._config = config
        self._max_rank = max_rank
        self._steps = Steps(_MATCH_STEPS)

    def check_kinds(self, factors: Mapping[Kind, Factor], has_bias: bool) -> None:
        """See that a module has the tensors that the config speaks of, and no others."""
        config = self._config
        flags: tuple[tuple[Kind, bool, str], ...] = (
            ("magnitude", config.use_dora, "use_dora"),
            ("lora_bias", config.lora_bias, "lora_bias"),
        )
        for kind, wanted, field in flags:
            if kind in factors and not wanted:
                raise factors[kind].invalid(f"needs {field} in {CONFIG_FILE}, which is not true")
            if wanted and kind not in factors and "A" in factors:
                raise factors["A"].invalid(f"has no {_KIND_NAMES[kind]} beside it, as {field} says")
        bias = factors.get("bias")
        if bias is None:
            return
        if not has_bias:
            raise bias.invalid("is the trained bias of a layer that has none in the base model")
        if config.bias == "none":
            raise bias.invalid(f"needs a bias in {CONFIG_FILE} that is not 'none'")

    def apply(self, source: str, a: Factor, b: Factor) -> tuple[int, float, float]:
        """(rank, alpha, scale) of a module."""
        rank, alpha = self._numbers(source, a, b)
        if rank > self._max_rank:
            raise a.unsupported(f"has rank {rank}; the limit is {self._max_rank}")
        scale = self._config.scale(rank, alpha)
        if scale != 0 and not FLOAT32_MIN <= abs(scale) <= FLOAT32_MAX:
            raise a.invalid(f"has the scale {scale:g}, which is out of float32's range")
        return rank, alpha, scale

    def _numbers(self, source: str, a: Factor, b: Factor) -> tuple[int, float]:
        # PEFT matches patterns with the path in its own model, which the file shows. Where the
        # base's path would give other numbers, a tool has renamed one and not the other.
        config, steps = self._config, self._steps
        found = {
            path: (config.rank_of(path, steps), config.alpha_of(path, steps))
            for path in dict.fromkeys((a.module, b.module, source))
        }
        if len(set(found.values())) > 1:
            each = "; ".join(
                f"rank {rank} and alpha {alpha:g} as {shown_name(path)}"
                for path, (rank, alpha) in found.items()
            )
            raise a.invalid(
                f"is ambiguous: by rank_pattern and alpha_pattern its module has {each}"
            )
        return found[a.module]


def _module(
    source: str, factors: dict[Kind, Factor], rules: _Rules, directory: _Directory
) -> AdaptedModule:
    for factor in factors.values():
        for kind, partner in _PARTNERS.get(factor.kind, ()):
            if kind not in factors:
                raise factor.invalid(f"has no {partner} beside it")
    rules.check_kinds(factors, directory.has_bias(source))
    out_features, in_features = directory.shape(source)
    rank, alpha, scale = 0, 0.0, 1.0
    if "A" in factors:
        rank, alpha, scale = rules.apply(source, factors["A"], factors["B"])
        _check_shape(factors["A"], (rank, in_features), source)
        _check_shape(factors["B"], (out_features, rank), source)
    vectors: tuple[Kind, ...] = ("magnitude", "lora_bias", "bias")
    for kind in vectors:
        if kind in factors:
            _check_shape(factors[kind], (out_features,), source)
    dtypes = {_dtype(factor) for factor in factors.values()}
    return AdaptedModule(
        source=source,
        rank=rank,
        alpha=alpha,
        scale=scale,
        in_features=in_features,
        out_features=out_features,
        out_start=directory.out_start(source),
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        a=factors.get("A"),
        b=factors.get("B"),
        magnitude=factors.get("magnitude"),
        lora_bias=factors.get("lora_bias"),
        bias=factors.get("bias"),
        targets=directory.targets(source),
    )


def _check_shape(factor: Factor, expected: tuple[int, ...], source: str) -> None:
    if factor.shape != expected:
        raise factor.invalid(
            f"has shape {shown(list(factor.shape))}, expected {list(expected)} for {source} "
            f"(the rank is adapter_config.json's r and rank_pattern)"
        )


def _dtype(factor: Factor) -> str:
    if factor.dtype not in _DTYPES:
        raise factor.unsupported(f"has dtype {factor.dtype}; expected F32, BF16 or F16")
    return _DTYPES[factor.dtype]
