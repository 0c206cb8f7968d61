"""An adapter as plain matrices by module, read without a base model and written as PEFT does.

For tools that turn adapters into adapters (mix, convert). Serving goes another way: `adapter` and
`place` check everything against a base.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from lorafleet.adapters.checkpoint import Factor, Kind, read_factors
from lorafleet.adapters.config import LoraConfig, read_config
from lorafleet.adapters.files import CONFIG_FILE, WEIGHTS_FILE, find_files
from lorafleet.adapters.regex import Steps
from lorafleet.core.errors import AlreadyExists, InvalidInput, Unsupported

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_STEPS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFactors:
    """One module's factors, float32: A (rank, in_features), B (out_features, rank), and s."""

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainAdapter:
    """Factors by module path, and what the new files should say besides.

    `dtype` is that of the tensors in the file: `float32`, `float16` or `bfloat16`.
    """

    modules: Mapping[str, ModuleFactors]
    dtype: np.dtype[Any]
    base_model_name: str | None = None

    def save(self, directory: Path) -> None:
        """Write a PEFT directory whole, or nothing.

        Scales are folded into the factors' alpha, so that any reader of PEFT gives the same
        product.

        Raises
        ------
        AlreadyExists
            There is something at `directory`.
        """
        if directory.exists():
            raise AlreadyExists(f"{directory} exists already; name another place")
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".adapter-") as folder:
            staged = Path(folder) / "adapter"
            staged.mkdir()
            (staged / CONFIG_FILE).write_text(json.dumps(self._config(), indent=2) + "\n")
            save_file(self._tensors(), staged / WEIGHTS_FILE, metadata={"format": "pt"})
            os.rename(staged, directory)

    def _config(self) -> dict[str, Any]:
        ranks = [module.rank for module in self.modules.values()]
        r = max(set(ranks), key=lambda rank: (ranks.count(rank), rank))
        alphas = {name: module.scale * module.rank for name, module in self.modules.items()}
        alpha = max(set(alphas.values()), key=lambda a: (list(alphas.values()).count(a), a))
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model_name,
            "r": r,
            "lora_alpha": alpha,
            "target_modules": sorted({name.rsplit(".", 1)[-1] for name in self.modules}),
            "rank_pattern": {
                _pattern(name): module.rank
                for name, module in self.modules.items()
                if module.rank != r
            },
            "alpha_pattern": {
                _pattern(name): value for name, value in alphas.items() if value != alpha
            },
            "bias": "none",
            "inference_mode": True,
        }

    def _tensors(self) -> dict[str, np.ndarray]:
        tensors = {}
        for name, module in self.modules.items():
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(module.a, self.dtype)
            tensors[f"{prefix}.lora_B.weight"] = np.ascontiguousarray(module.b, self.dtype)
        return tensors


def read_plain(directory: Path) -> PlainAdapter:
    """Read a PEFT directory as plain matrices.

    Raises
    ------
    InvalidAdapter, Unsupported
        It is broken, or is not made of rank rows alone (DoRA, biases).
    """
    files = find_files(directory)
    config = read_config(files.config)
    found: dict[str, dict[Kind, Factor]] = {}
    for factor in read_factors(files):
        if factor.kind not in ("A", "B"):
            raise Unsupported(
                f"{directory}: {factor.tensor} is no plain LoRA factor: magnitudes and biases "
                "cannot be combined or converted",
                tensor=factor.tensor,
            )
        found.setdefault(factor.module, {})[factor.kind] = factor
    steps = Steps(_STEPS)
    modules = {name: _module(name, pair, config, steps) for name, pair in sorted(found.items())}
    dtypes = {factor.dtype for pair in found.values() for factor in pair.values()}
    dtype = _DTYPES.get(dtypes.pop(), _DTYPES["F32"]) if len(dtypes) == 1 else _DTYPES["F32"]
    return PlainAdapter(modules=modules, dtype=dtype, base_model_name=config.base_model_name)


def _module(name: str, pair: dict[Kind, Factor], config: LoraConfig, steps: Steps) -> ModuleFactors:
    factor = next(iter(pair.values()))
    if len(pair) < 2:
        other = "lora_B" if factor.kind == "A" else "lora_A"
        raise factor.invalid(f"has no {other} beside it")
    a, b = pair["A"].values(), pair["B"].values()
    rank, alpha = config.rank_of(name, steps), config.alpha_of(name, steps)
    for part, axis, which in ((a, 0, "A"), (b, 1, "B")):
        if part.ndim != 2 or part.shape[axis] != rank:
            raise pair["A" if which == "A" else "B"].invalid(
                f"has shape {list(part.shape)}; by {CONFIG_FILE} its rank is {rank}"
            )
    return ModuleFactors(a=a, b=b, scale=config.scale(rank, alpha))


def _pattern(name: str) -> str:
    """A regular expression that matches one module path alone."""
    return "^" + name.replace(".", r"\.") + "$"


def check_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a name.

    Raises
    ------
    InvalidInput
        It is none of float32, float16 and bfloat16.
    """
    for dtype in _DTYPES.values():
        if dtype.name == name:
            return dtype
    raise InvalidInput(f"dtype: expected float32, float16 or bfloat16, got {name!r}", field="dtype")
