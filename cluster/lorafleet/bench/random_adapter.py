"""Random PEFT adapters for a described base model: real files, seeded, as loud as trained ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lorafleet.core.model import BaseModel


def write_random_adapter(
    directory: Path, base: BaseModel, *, rank: int, seed: int, alpha: float | None = None
) -> Path:
    """Write a PEFT LoRA directory that adapts every part of every site.

    A is drawn as N(0, 1/in_features) and B as N(0, 1/(16 rank)), so that the delta moves the logits
    of a trained model visibly without drowning them. Returns `directory`.
    """
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    targets = set()
    for site in base.sites:
        for part in site.parts:
            prefix = f"base_model.model.{part.source}"
            a = rng.standard_normal((rank, site.in_features)) / np.sqrt(site.in_features)
            b = rng.standard_normal((part.out_features, rank)) / (4 * np.sqrt(rank))
            tensors[f"{prefix}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = b.astype(np.float32)
            targets.add(part.source.rsplit(".", 1)[-1])
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": alpha if alpha is not None else rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(targets),
        "inference_mode": True,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
