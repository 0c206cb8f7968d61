"""PEFT adapter directories for `tiny4`, made tensor by tensor so that any of them can be wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lorafleet.core.model import BaseModel, KvLayout, Site, SitePart
from support.tiny import LINEARS

DEFAULT_CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "tiny4",
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj"],
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "init_lora_weights": True,
    "inference_mode": True,
}
PREFIX = "base_model.model."
ALL_LINEARS = tuple(name.rsplit(".", 1)[-1] for name in LINEARS)


def path_of(layer: int, target: str) -> str:
    """Module path of a linear by its short name."""
    full = next(name for name in LINEARS if name.endswith(f".{target}"))
    return f"model.layers.{layer}.{full}"


def shape_of(target: str) -> tuple[int, int]:
    """(out, in) of a linear by its short name."""
    return next(shape for name, shape in LINEARS.items() if name.endswith(f".{target}"))


def factors(
    *,
    targets: Iterable[str] = ("q_proj", "v_proj"),
    rank: int = 4,
    ranks: Mapping[str, int] | None = None,
    layers: Iterable[int] = range(4),
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Canonically named lora_A and lora_B tensors, B loud enough to change greedy tokens."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in layers:
        for target in targets:
            rows, columns = shape_of(target)
            r = (ranks or {}).get(target, rank)
            name = PREFIX + path_of(layer, target)
            a = rng.standard_normal((r, columns)) * columns**-0.5
            b = rng.standard_normal((rows, r)) * 0.5
            tensors[f"{name}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = b.astype(np.float32)
    return tensors


def write_adapter(
    directory: Path,
    tensors: Mapping[str, np.ndarray] | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    drop: Iterable[str] = (),
) -> Path:
    """Write adapter_config.json (defaults, overridden by `config`) and the tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {**DEFAULT_CONFIG, **(config or {})}
    for key in drop:
        del settings[key]
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    chosen = factors() if tensors is None else tensors
    save_file(
        {key: np.ascontiguousarray(value) for key, value in chosen.items()},
        directory / "adapter_model.safetensors",
    )
    return directory


def tiny_base() -> BaseModel:
    """The description of a compiled `tiny4`, without compiling it."""
    sites = []
    for layer in range(4):
        for name, parts in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("self_attn.o_proj", ("self_attn.o_proj",)),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
            ("mlp.down_proj", ("mlp.down_proj",)),
        ):
            ends = np.cumsum([LINEARS[part][0] for part in parts])
            sites.append(
                Site(
                    name=f"model.layers.{layer}.{name}",
                    in_features=LINEARS[parts[0]][1],
                    out_features=int(ends[-1]),
                    parts=tuple(
                        SitePart(
                            source=f"model.layers.{layer}.{part}",
                            out_start=int(end) - LINEARS[part][0],
                            out_end=int(end),
                        )
                        for part, end in zip(parts, ends, strict=True)
                    ),
                )
            )
    return BaseModel(
        name="tiny4",
        digest="sha256:" + "0" * 64,
        library="lib/llvm.so",
        target="llvm",
        vocab_size=256,
        context_window=1024,
        max_batch_tokens=2048,
        page_rows=8,
        kv=KvLayout(
            num_layers=4, num_qo_heads=4, num_kv_heads=2, head_dim=16, rope_inv_freq=(1.0,) * 8
        ),
        sites=tuple(sites),
    )
