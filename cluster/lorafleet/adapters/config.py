"""`adapter_config.json`: every option is honoured, known to be harmless, or refused by name.

The tensors in the file are the truth about which modules are adapted, so options that only choose
modules for training are accepted and not interpreted. It knows no tensors and no base model.

References: PEFT 0.21, `LoraConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafleet.adapters.faults import invalid, shown, shown_name, unsupported
from lorafleet.adapters.files import CONFIG_FILE, read_json
from lorafleet.adapters.patterns import Patterns, V, compile_patterns
from lorafleet.adapters.regex import RegexError, Steps
from lorafleet.core.errors import InvalidAdapter

HONOURED = frozenset(
    (
        "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern use_dora lora_bias bias "
        "init_lora_weights base_model_name_or_path"
    ).split()
)
"""Options whose values are read: each is followed, or refused for what it holds."""

HARMLESS = frozenset(
    (
        "task_type auto_mapping peft_version revision inference_mode target_modules "
        "exclude_modules layers_to_transform layers_pattern lora_dropout megatron_core "
        "loftq_config eva_config lora_ga_config corda_config qalora_group_size runtime_config"
    ).split()
)
"""Options that choose modules for training, steer training, or describe the file."""

REFUSED: Mapping[str, str] = {
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
"""Options that would change the output, and what each would change."""

# Initialisations that take nothing out of the base. MiCA only freezes B.
_NEUTRAL_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "true", "false"})
# They move part of the base weights into the factors; by prefix, as in "pissa_niter_4".
_MOVING_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")

_MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The options that decide the numbers."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Patterns[int]
    alpha_pattern: Patterns[float]
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    base_model_name: str | None = None

    def rank_of(self, module: str, steps: Steps) -> int:
        """The rank that PEFT gives to a module path.

        Raises
        ------
        Unsupported
            The patterns take more than `steps` to match.
        """
        return _found("rank_pattern", self.rank_pattern, module, steps) or self.r

    def alpha_of(self, module: str, steps: Steps) -> float:
        """The alpha that PEFT gives to a module path; raises as `rank_of`."""
        alpha = _found("alpha_pattern", self.alpha_pattern, module, steps)
        return self.lora_alpha if alpha is None else alpha

    def scale(self, rank: int, alpha: float) -> float:
        """S in y = W x + s·B(A x): α/r, or α/√r with rsLoRA (Kalajdzievski, 2023)."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_config(path: Path) -> LoraConfig:
    """Read and check `adapter_config.json`.

    Raises
    ------
    InvalidAdapter
        Not JSON, a required key is missing, or a value has the wrong form; `facts` name the field.
    Unsupported
        An option that would change the output and is not honoured.
    """
    return parse_config(read_json(path))


def parse_config(data: Mapping[str, Any]) -> LoraConfig:
    """Check the parsed JSON object; see `read_config`."""
    _refuse_other_families(data)
    for key, value in data.items():
        _check_option(key, value)
    name = data.get("base_model_name_or_path")
    if name is not None and not isinstance(name, str):
        raise _wrong("base_model_name_or_path", "a string or null", name)
    use_dora, lora_bias = (_flag(key, data.get(key)) for key in ("use_dora", "lora_bias"))
    if use_dora and lora_bias:
        raise unsupported(
            CONFIG_FILE,
            "use_dora and lora_bias are both true, which PEFT does not define",
            field="lora_bias",
        )
    return LoraConfig(
        r=_rank("r", data.get("r")),
        lora_alpha=_number("lora_alpha", data.get("lora_alpha")),
        use_rslora=_flag("use_rslora", data.get("use_rslora")),
        rank_pattern=_patterns("rank_pattern", data, _rank),
        alpha_pattern=_patterns("alpha_pattern", data, _number),
        use_dora=use_dora,
        lora_bias=lora_bias,
        bias=_bias(data.get("bias")),
        base_model_name=name,
    )


def _refuse_other_families(data: Mapping[str, Any]) -> None:
    family = data.get("peft_type")
    if family is None:
        raise invalid(CONFIG_FILE, "peft_type is missing", field="peft_type")
    if family != "LORA":
        raise unsupported(
            CONFIG_FILE,
            f"peft_type {shown(family)} is not supported; expected 'LORA'",
            field="peft_type",
        )


def _check_option(key: str, value: object) -> None:
    if key == "init_lora_weights":
        _check_init(value)
    elif key not in HONOURED and key not in HARMLESS and value:
        why = REFUSED.get(key, "the option is unknown and may change the output")
        raise unsupported(
            CONFIG_FILE,
            f"{shown_name(key)[1:-1]} = {shown(value)} is not supported: {why}",
            field=key,
        )


def _bias(value: object) -> str:
    if not value:
        return "none"
    if value not in ("none", "all", "lora_only"):
        raise _wrong("bias", "'none', 'all' or 'lora_only'", value)
    return str(value)


def _check_init(value: object) -> None:
    text = str(value).lower() if isinstance(value, str | bool) else ""
    if not value or text in _NEUTRAL_INITS:
        return
    if text.startswith(_MOVING_INITS):
        why = (
            "it moved part of the base weights into the adapter; convert it to a plain LoRA with "
            "PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    else:
        why = (
            "it may have changed the base weights; expected true, false, 'gaussian', 'eva', "
            "'orthogonal' or 'mica'"
        )
    raise unsupported(
        CONFIG_FILE,
        f"init_lora_weights = {shown(value)} is not supported: {why}",
        field="init_lora_weights",
    )


def _wrong(field: str, expected: str, value: object) -> InvalidAdapter:
    got = "nothing" if value is None else shown(value)
    return invalid(CONFIG_FILE, f"{field}: expected {expected}, got {got}", field=field)


def _rank(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_INTEGER:
        raise _wrong(field, "a positive integer", value)
    return value


def _number(field: str, value: object) -> float:
    # An integer may be too large for a float, which float() answers with OverflowError.
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INTEGER:
        return float(value)
    if not isinstance(value, float) or not math.isfinite(value):
        raise _wrong(field, "a number", value)
    return value


def _flag(field: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise _wrong(field, "true or false", value)
    return bool(value)


def _patterns(
    field: str, data: Mapping[str, Any], check: Callable[[str, object], V]
) -> Patterns[V]:
    value = data.get(field) or {}
    if not isinstance(value, dict):
        raise _wrong(field, "an object", value)
    checked = {key: check(f"{field}[{shown(key)}]", item) for key, item in value.items()}
    try:
        return compile_patterns(checked)
    except RegexError as error:
        raise unsupported(
            CONFIG_FILE,
            f"{field}: the regular expression {shown_name(error.key)} cannot be read: {error}",
            field=f"{field}[{shown(error.key)}]",
        ) from None


def _found(field: str, patterns: Patterns[V], module: str, steps: Steps) -> V | None:
    try:
        return patterns.find(module, steps)
    except RegexError as error:
        raise unsupported(CONFIG_FILE, f"{field} {error}", field=field) from None
