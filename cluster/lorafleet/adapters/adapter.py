"""A validated adapter: its identity, and its factors in the form that rank pages hold.

`load_adapter` reads a directory once to check and hash it; `factors` reads it again, module by
module, when the weights are wanted. Immutable.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lorafleet.adapters.affine import Affine, BaseWeights, affine
from lorafleet.adapters.checkpoint import Factor, read_factors
from lorafleet.adapters.config import read_config
from lorafleet.adapters.files import find_files, scan_directory
from lorafleet.adapters.place import FLOAT32_MAX, MAX_RANK, AdaptedModule, place
from lorafleet.core.errors import NotFound
from lorafleet.core.manifest import FileEntry, VersionManifest
from lorafleet.core.model import BaseModel

_MOST_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFactors:
    """What one part of one site gets: rank rows a (r, in) and b_t (r, part width), float32.

    The scale s is folded into b_t. `affine`, (part width,) each, is there for some adapters only.
    """

    site: int
    part: int
    a: np.ndarray
    b_t: np.ndarray
    affine: Affine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """One version of an adapter, checked against one base.

    `version` is `sha256:` and 64 hex digits over the canonical config, the weights and the base's
    digest: it does not depend on the adapter's name or on how its tensors are spelled.
    """

    version: str
    base: BaseModel
    modules: tuple[AdaptedModule, ...]
    files: tuple[FileEntry, ...]

    @property
    def max_rank(self) -> int:
        return max(module.rank for module in self.modules)

    @property
    def num_modules(self) -> int:
        return len(self.modules)

    @property
    def target_modules(self) -> tuple[str, ...]:
        return tuple(sorted({module.source.rsplit(".", 1)[-1] for module in self.modules}))

    @property
    def weights_bytes(self) -> int:
        return sum(factor.num_bytes for module in self.modules for factor in module.factors)

    @property
    def dtype(self) -> str:
        dtypes = {module.dtype for module in self.modules}
        return dtypes.pop() if len(dtypes) == 1 else "mixed"

    def num_pages(self, page_rows: int) -> int:
        """Rank pages it takes, the affine page included."""
        return -(-self.max_rank // page_rows) + self.is_affine

    @property
    def is_affine(self) -> bool:
        """Whether some layer's output is rescaled or shifted, which takes a page of its own."""
        return any(module.is_affine for module in self.modules)

    def factors(self, weights: BaseWeights | None = None) -> Iterator[SiteFactors]:
        """All rank rows, in the order of the sites.

        `weights` are the base's; they are needed by DoRA and trained biases alone.
        """
        for module in self.modules:
            yield from _factors(module, weights)

    def delta(self, site_name: str, weights: BaseWeights | None = None) -> np.ndarray:
        """The change of a site's weight, (out_features, in_features) float32.

        It is s·B A, or DoRA's W' - W, and zero where the site is not adapted. Biases are no part
        of it. `weights` as in `factors`.

        Raises
        ------
        NotFound
            The base has no such site.
        """
        index = self._site(site_name)
        site = self.base.sites[index]
        delta = np.zeros((site.out_features, site.in_features), dtype=np.float32)
        for module in self.modules:
            if module.targets[0].site == index:
                for factors in _factors(module, weights):
                    part = site.parts[factors.part]
                    rows = slice(part.out_start, part.out_end)
                    delta[rows] = factors.b_t.T @ factors.a
                    if module.magnitude is not None and factors.affine and weights:
                        delta[rows] += factors.affine.gain[:, None] * weights.weight(index)[rows]
        return delta

    def bias_delta(self, site_name: str, weights: BaseWeights | None = None) -> np.ndarray:
        """The change of a site's bias, (out_features,) float32; zero where it has none.

        `weights` as in `factors`; NotFound as in `delta`.
        """
        index = self._site(site_name)
        delta = np.zeros(self.base.sites[index].out_features, np.float32)
        for module in self.modules:
            if module.targets[0].site != index:
                continue
            change = affine(module, *_scaled(module), weights)
            if change is not None:
                rows = slice(module.out_start, module.out_start + module.out_features)
                bias = weights.bias(index) if weights is not None else None
                # The shift of DoRA gives the base's bias back; a merged layer keeps it anyway.
                kept = change.gain * bias[rows] if bias is not None else np.float32(0)
                delta[rows] = change.shift + kept
        return delta

    def _site(self, name: str) -> int:
        for index, site in enumerate(self.base.sites):
            if site.name == name:
                return index
        raise NotFound(f"base model {self.base.name!r} has no site {name!r}")

    def manifest(self, name: str, created_at_s: float) -> VersionManifest:
        """What the registry keeps of it."""
        return VersionManifest(
            id=self.version,
            adapter=name,
            base_digest=self.base.digest,
            max_rank=self.max_rank,
            num_modules=self.num_modules,
            target_modules=self.target_modules,
            weights_bytes=self.weights_bytes,
            dtype=self.dtype,
            files=self.files,
            created_at_s=created_at_s,
        )


def load_adapter(
    directory: Path,
    base: BaseModel,
    *,
    max_rank: int = MAX_RANK,
    known: Sequence[FileEntry] = (),
) -> LoraAdapter:
    """Read a PEFT directory and check all of it against a base model.

    Parameters
    ----------
    directory : Path
        The adapter's files.
    base : BaseModel
        What it is for.
    max_rank : int
        The largest rank that is accepted.
    known : sequence of FileEntry
        The directory's files, where whoever wrote them has taken their digests already.

    Raises
    ------
    InvalidAdapter
        Something is broken or does not fit; `facts` name the file and the field or tensor.
    Unsupported
        Something is asked for that is not honoured; named likewise.

    Notes
    -----
    Reads the weights twice: as tensors for their values and the id, and as files for their entries
    unless those are known.
    """
    files = find_files(directory)
    config = read_config(files.config)
    modules = tuple(place(config, read_factors(files), base, max_rank=max_rank))
    digests = _check_and_hash(modules)
    entries = {entry.name: entry for entry in known}
    names = [path.name for path in files.paths]
    return LoraAdapter(
        version=_version(modules, digests, base),
        base=base,
        modules=modules,
        files=(
            tuple(entries[name] for name in names)
            if entries.keys() >= set(names)
            else scan_directory(directory)
        ),
    )


def _check_and_hash(modules: Sequence[AdaptedModule]) -> list[str]:
    """Check every tensor's values and return the sha256 of each, in order."""

    def one(pair: tuple[AdaptedModule, Factor]) -> str:
        _check_values(*pair)
        return hashlib.sha256(pair[1].raw().data).hexdigest()

    pairs = [(module, factor) for module in modules for factor in module.factors]
    # NumPy and hashlib let other threads run while they look at much data.
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        return list(threads.map(one, pairs))


def _version(modules: Sequence[AdaptedModule], digests: Sequence[str], base: BaseModel) -> str:
    factors = [(module, factor) for module in modules for factor in module.factors]
    tensors = [
        [module.source, factor.kind, factor.dtype, list(factor.shape), digest]
        for (module, factor), digest in zip(factors, digests, strict=True)
    ]
    identity = {
        "format": 1,
        "base": base.digest,
        "scales": [[module.source, module.scale] for module in modules],
        "tensors": tensors,
    }
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _factors(module: AdaptedModule, weights: BaseWeights | None) -> Iterator[SiteFactors]:
    a, b = _scaled(module)
    change = affine(module, a, b, weights)
    if module.magnitude is not None and change is not None:
        b *= change.gain[:, None] + np.float32(1)
    for target in module.targets:
        rows = slice(target.b_start, target.b_end)
        yield SiteFactors(
            site=target.site,
            part=target.part,
            a=a,
            b_t=np.ascontiguousarray(b[rows].T),
            affine=change and Affine(gain=change.gain[rows], shift=change.shift[rows]),
        )


def _scaled(module: AdaptedModule) -> tuple[np.ndarray, np.ndarray]:
    """A (r, in_features) and s·B (out_features, r); r is 0 where only a bias was trained."""
    if module.a is None or module.b is None:
        empty = np.zeros((0, module.in_features), np.float32)
        return empty, np.zeros((module.out_features, 0), np.float32)
    return module.a.values(), module.b.values() * np.float32(module.scale)


def _check_values(module: AdaptedModule, factor: Factor) -> None:
    """See that a tensor is finite, also scaled by s where it is, in one pass.

    Their product with some input may still overflow; the engine ends the requests to which that
    happens.
    """
    largest = _largest(factor)
    scaled = factor.kind in ("B", "lora_bias")
    if scaled and largest * abs(float(np.float32(module.scale))) > FLOAT32_MAX:
        raise factor.invalid(f"overflows float32 when scaled by {module.scale:g}")


def _largest(factor: Factor) -> float:
    values = factor.values()
    # NaN and infinity both survive the extremes.
    low, high = float(values.min()), float(values.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise factor.invalid("has values that are not finite")
    return max(-low, high)
