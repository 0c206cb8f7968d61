"""`adapter_config.json`: every option is honoured, known to be harmless, or refused by name.

The tensors in the file are the truth about which modules are adapted, so options that only choose
modules for training are accepted and not interpreted.

References: PEFT 0.21, `LoraConfig` and `get_pattern_key`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafleet.core.errors import InvalidAdapter, Unsupported

_FILE = "adapter_config.json"

_HONOURED = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
)

# They choose modules for training, steer training, or describe the file.
_HARMLESS = frozenset(
    (
        "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode "
        "target_modules exclude_modules layers_to_transform layers_pattern lora_dropout "
        "megatron_core loftq_config eva_config lora_ga_config corda_config qalora_group_size "
        "runtime_config"
    ).split()
)

# What each would change; the text goes into the refusal.
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA rescales the base weights' rows",
    "lora_bias": "a bias on lora_B is part of the output",
    "modules_to_save": "whole replaced modules are part of the model",
    "trainable_token_indices": "changed embedding rows are part of the model",
    "fan_in_fan_out": "transposed layers do not exist in this base",
    "layer_replication": "repeated layers make another network",
    "megatron_config": "Megatron's parallel layers are laid out differently",
    "alora_invocation_tokens": "an activated LoRA applies after its invocation tokens only",
    "use_qalora": "QALoRA pools the input of lora_A",
    "target_parameters": "LoRA on bare parameters is no linear layer",
    "use_bdlora": "block-diagonal LoRA has another product",
    "arrow_config": "Arrow routes between adapters by token",
    "kasa_config": "KaSA adds singular values to the product",
    "velora_config": "VeLoRA changes the input of lora_A",
    "monteclora_config": "MonteCLoRA samples its factors",
    "ensure_weight_tying": "tied embeddings would be adapted together",
}

# Initialisations that take nothing out of the base; the others move part of it into the factors.
_NEUTRAL_INITS = frozenset({"gaussian", "eva", "orthogonal", "true", "false"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The options that decide the numbers."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    base_model_name: str | None = None

    def rank_of(self, module: str) -> int:
        """The rank that PEFT gives to a module path."""
        return self.rank_pattern.get(_pattern_key(self.rank_pattern, module), self.r)

    def alpha_of(self, module: str) -> float:
        """The alpha that PEFT gives to a module path."""
        return self.alpha_pattern.get(_pattern_key(self.alpha_pattern, module), self.lora_alpha)

    def scale_of(self, module: str) -> float:
        """S in y = W x + s·B(A x): α/r, or α/√r with rsLoRA (Kalajdzievski, 2023)."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.use_rslora else rank)


def _pattern_key(patterns: Mapping[str, object], module: str) -> str:
    """The first pattern that matches the end of the path at a dot, as PEFT searches."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


def read_config(path: Path) -> LoraConfig:
    """Read and check `adapter_config.json`.

    Raises
    ------
    InvalidAdapter
        Not JSON, a required key is missing, or a value has the wrong form; `facts` name the field.
    Unsupported
        An option that would change the output and is not honoured.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidAdapter(f"{_FILE}: cannot be read: {error.strerror}", file=_FILE) from None
    except (ValueError, RecursionError) as error:
        raise InvalidAdapter(f"{_FILE}: not valid JSON: {error}", file=_FILE) from None
    if not isinstance(data, dict):
        raise InvalidAdapter(f"{_FILE}: expected a JSON object", file=_FILE)
    return parse_config(data)


def parse_config(data: Mapping[str, Any]) -> LoraConfig:
    """Check the parsed JSON object; see `read_config`."""
    _refuse_other_families(data)
    for key, value in data.items():
        _check_option(key, value)
    return LoraConfig(
        r=_rank("r", data.get("r")),
        lora_alpha=_number("lora_alpha", data.get("lora_alpha")),
        use_rslora=_flag("use_rslora", data.get("use_rslora")),
        rank_pattern={
            key: _rank(f"rank_pattern[{key!r}]", value)
            for key, value in _patterns("rank_pattern", data).items()
        },
        alpha_pattern={
            key: _number(f"alpha_pattern[{key!r}]", value)
            for key, value in _patterns("alpha_pattern", data).items()
        },
        base_model_name=data.get("base_model_name_or_path"),
    )


def _refuse_other_families(data: Mapping[str, Any]) -> None:
    family = data.get("peft_type")
    if family is None:
        raise InvalidAdapter(f"{_FILE}: peft_type is missing", file=_FILE, field="peft_type")
    if family != "LORA":
        raise Unsupported(
            f"{_FILE}: peft_type {family!r} is not supported; expected 'LORA'",
            file=_FILE,
            field="peft_type",
        )


def _check_option(key: str, value: object) -> None:
    if key in _HONOURED or key in _HARMLESS or not value:
        return
    if key == "bias":
        if value != "none":
            raise Unsupported(
                f"{_FILE}: bias = {value!r} is not supported: trained biases are part of the "
                "output; expected 'none'",
                file=_FILE,
                field="bias",
            )
    elif key == "init_lora_weights":
        if str(value).lower() not in _NEUTRAL_INITS:
            raise Unsupported(
                f"{_FILE}: init_lora_weights = {value!r} is not supported: it moved part of the "
                "base weights into the adapter; convert it to a plain LoRA with PEFT's "
                "save_pretrained(path_initial_model_for_weight_conversion=...)",
                file=_FILE,
                field="init_lora_weights",
            )
    else:
        why = _REFUSED.get(key, "the option is unknown and may change the output")
        raise Unsupported(
            f"{_FILE}: {key} = {json.dumps(value)[:80]} is not supported: {why}",
            file=_FILE,
            field=key,
        )


def _wrong(field: str, expected: str, value: object) -> InvalidAdapter:
    return InvalidAdapter(
        f"{_FILE}: {field}: expected {expected}, got {value!r}", file=_FILE, field=field
    )


def _rank(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(field, "a positive integer", value)
    return value


def _number(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(field, "a number", value)
    return float(value)


def _flag(field: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise _wrong(field, "true or false", value)
    return bool(value)


def _patterns(field: str, data: Mapping[str, Any]) -> dict[str, Any]:
    value = data.get(field) or {}
    if not isinstance(value, dict):
        raise _wrong(field, "an object", value)
    for key in value:
        try:
            re.compile(rf"(.*\.)?({key})$")
        except re.error as error:
            raise _wrong(field, f"regular expressions as keys ({error})", key) from None
    return value
