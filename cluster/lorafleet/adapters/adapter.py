"""A validated adapter: its identity, and its factors in the form that rank pages hold.

`load_adapter` reads a directory once to check and hash it; `factors` reads it again, module by
module, when the weights are wanted. Immutable.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lorafleet.adapters.checkpoint import Factor, read_factors
from lorafleet.adapters.config import read_config
from lorafleet.adapters.files import find_files, scan_directory
from lorafleet.adapters.place import FLOAT32_MAX, MAX_RANK, AdaptedModule, place
from lorafleet.core.errors import NotFound
from lorafleet.core.manifest import FileEntry, VersionManifest
from lorafleet.core.model import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFactors:
    """Rank rows of one part of one site: a (r, in) and b_t (r, part width), float32.

    The scale s is folded into b_t.
    """

    site: int
    part: int
    a: np.ndarray
    b_t: np.ndarray


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
        return sum(
            factor.file.raw(factor.tensor).nbytes
            for module in self.modules
            for factor in (module.a, module.b)
        )

    @property
    def dtype(self) -> str:
        dtypes = {module.dtype for module in self.modules}
        return dtypes.pop() if len(dtypes) == 1 else "mixed"

    def num_pages(self, page_rows: int) -> int:
        """Rank pages it takes."""
        return -(-self.max_rank // page_rows)

    def factors(self) -> Iterator[SiteFactors]:
        """All rank rows, in the order of the sites."""
        for module in self.modules:
            yield from _factors(module)

    def delta(self, site_name: str) -> np.ndarray:
        """s·B A of a site, (out_features, in_features) float32; zero where it is not adapted.

        Raises
        ------
        NotFound
            The base has no such site.
        """
        names = [site.name for site in self.base.sites]
        if site_name not in names:
            raise NotFound(f"base model {self.base.name!r} has no site {site_name!r}")
        index = names.index(site_name)
        site = self.base.sites[index]
        delta = np.zeros((site.out_features, site.in_features), dtype=np.float32)
        for module in self.modules:
            if module.targets[0].site == index:
                for factors in _factors(module):
                    part = site.parts[factors.part]
                    delta[part.out_start : part.out_end] = factors.b_t.T @ factors.a
        return delta

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


def load_adapter(directory: Path, base: BaseModel, *, max_rank: int = MAX_RANK) -> LoraAdapter:
    """Read a PEFT directory and check all of it against a base model.

    Raises
    ------
    InvalidAdapter
        Something is broken or does not fit; `facts` name the file and the field or tensor.
    Unsupported
        Something is asked for that is not honoured; named likewise.

    Notes
    -----
    Reads the weights twice: as tensors for their values and the id, as files for their entries.
    """
    files = find_files(directory)
    config = read_config(files.config)
    modules = tuple(place(config, read_factors(files), base, max_rank=max_rank))
    for module in modules:
        _check_values(module)
    return LoraAdapter(
        version=_version(modules, base),
        base=base,
        modules=modules,
        files=scan_directory(directory),
    )


def _version(modules: Iterable[AdaptedModule], base: BaseModel) -> str:
    tensors = [
        [
            module.source,
            factor.kind,
            factor.dtype,
            list(factor.shape),
            hashlib.sha256(factor.file.raw(factor.tensor).data).hexdigest(),
        ]
        for module in modules
        for factor in (module.a, module.b)
    ]
    identity = {
        "format": 1,
        "base": base.digest,
        "scales": [[module.source, module.scale] for module in modules],
        "tensors": tensors,
    }
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _factors(module: AdaptedModule) -> Iterator[SiteFactors]:
    a = module.a.file.read_f32(module.a.tensor)
    b = module.b.file.read_f32(module.b.tensor) * np.float32(module.scale)
    for target in module.targets:
        b_t = np.ascontiguousarray(b[target.b_start : target.b_end].T)
        yield SiteFactors(site=target.site, part=target.part, a=a, b_t=b_t)


def _check_values(module: AdaptedModule) -> None:
    """See that A and s·B are finite, in one pass over each tensor.

    Their product with some input may still overflow; the engine ends the requests to which that
    happens.
    """
    _largest(module.a)
    if _largest(module.b) * abs(float(np.float32(module.scale))) > FLOAT32_MAX:
        raise module.b.invalid(f"overflows float32 when scaled by {module.scale:g}")


def _largest(factor: Factor) -> float:
    values = factor.file.read_f32(factor.tensor)
    # NaN and infinity both survive the extremes.
    low, high = float(values.min()), float(values.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise factor.invalid("has values that are not finite")
    return max(-low, high)
