"""The tensors of an adapter's files by name: which module each is for, and which factor it is.

It owns the spellings that PEFT and its relatives give to LoRA factors, and the names of what is no
LoRA factor. It knows no base model: whether a module exists is for `place` to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lorafleet.adapters.faults import invalid, shown_name, unsupported
from lorafleet.adapters.files import INDEX_FILE, WEIGHTS_FILE, AdapterFiles
from lorafleet.core.errors import InvalidAdapter, Unsupported
from lorafleet.native import SafetensorsFile

_MAX_NAME = 1024

Kind = Literal["A", "B", "magnitude", "lora_bias", "bias"]
"""lora_A, lora_B, DoRA's magnitudes, the bias of lora_B, a trained bias of the layer itself."""

# The first that matches decides.
_KINDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("A", re.compile(r"(?P<module>.+)\.lora_A(?:\.default)?\.weight")),
    ("B", re.compile(r"(?P<module>.+)\.lora_B(?:\.default)?\.weight")),
    (
        "magnitude",
        re.compile(r"(?P<module>.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?"),
    ),
    ("lora_bias", re.compile(r"(?P<module>.+)\.lora_B(?:\.default)?\.bias")),
    ("bias", re.compile(r"(?P<module>.+?)(?:\.base_layer)?\.bias")),
)

# Tensors of known kinds that are nothing of the above, and what to call them.
_STRANGERS = (
    (re.compile(r".*\.lora_embedding_[AB](\..*)?"), "LoRA on an embedding"),
    (re.compile(r".*\.lora_E(\..*)?|.*\.lora_[AB]"), "an AdaLoRA factor"),
    (re.compile(r".*\.lora_[ab]"), "a factor in MLX's layout; convert the adapter to PEFT's"),
    (
        re.compile(r".*\.lora_[AB]\.[^.]+\.weight"),
        "a factor under an adapter name of its own; save the adapter with save_pretrained",
    ),
    (re.compile(r".*\.hada_.*"), "a LoHa factor"),
    (re.compile(r".*\.lokr_.*"), "a LoKr factor"),
    (re.compile(r".*vera_lambda_.*|.*vera_[AB].*"), "a VeRA factor"),
    (re.compile(r".*\.ia3_l.*"), "an IA3 vector"),
    (re.compile(r".*token_adapter.*"), "changed embedding rows (trainable_token_indices)"),
    (
        re.compile(r".*\.base_layer\.weight"),
        "a whole weight of the base (modules_to_save, or LoRA on an embedding)",
    ),
    (re.compile(r".*\.weight"), "a whole weight (modules_to_save)"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One tensor of an adapted layer; `module` is its path with PEFT's prefix removed."""

    tensor: str
    module: str
    kind: Kind
    file: SafetensorsFile

    @property
    def dtype(self) -> str:
        """As in the file: `F32`, `BF16`, ..."""
        return self.file.info(self.tensor)[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.info(self.tensor)[1]

    def values(self) -> np.ndarray:
        """The tensor, widened to float32."""
        return self.file.read_f32(self.tensor)

    def invalid(self, what: str) -> InvalidAdapter:
        """This tensor is broken or does not fit."""
        text = f"tensor {shown_name(self.tensor)} {what}"
        return invalid(self.file.path.name, text, tensor=self.tensor)

    def unsupported(self, what: str) -> Unsupported:
        """This tensor is not served."""
        text = f"tensor {shown_name(self.tensor)} {what}"
        return unsupported(self.file.path.name, text, tensor=self.tensor)


def read_factors(files: AdapterFiles) -> list[Factor]:
    """Open the weights and name every tensor in them.

    Raises
    ------
    InvalidAdapter
        A file is broken, or holds other tensors than the index says; the tensor or rule is named.
    Unsupported
        A tensor is nothing that an adapter of linear layers has; it is named.
    """
    factors = []
    for path in files.weights:
        file = SafetensorsFile(path)
        names = file.names()
        if files.index is not None:
            _check_index(path.name, names, files.index)
        factors += [_factor(name, file) for name in names]
    if not factors:
        raise invalid(WEIGHTS_FILE, "holds no tensors")
    return factors


def _check_index(shard: str, names: list[str], index: Mapping[str, str]) -> None:
    # A shard that was cut or saved anew would otherwise be served as part of the adapter.
    indexed = {name for name, place in index.items() if place == shard}
    missing, extra = sorted(indexed - set(names)), sorted(set(names) - indexed)
    if missing:
        raise invalid(
            shard,
            f"tensor {shown_name(missing[0])} is missing; {INDEX_FILE} says that it is here",
            tensor=missing[0],
        )
    if extra:
        raise invalid(
            shard,
            f"tensor {shown_name(extra[0])} is not expected; {INDEX_FILE} does not say that it "
            "is here",
            tensor=extra[0],
        )


def _factor(name: str, file: SafetensorsFile) -> Factor:
    shard = file.path.name
    if len(name) > _MAX_NAME:
        text = f"tensor {shown_name(name)} has a name of over {_MAX_NAME} characters"
        raise invalid(shard, text, tensor=name)
    for kind, pattern in _KINDS:
        if match := pattern.fullmatch(name):
            module = match["module"].removeprefix("base_model.model.")
            return Factor(tensor=name, module=module, kind=kind, file=file)
    stranger = next((what for pattern, what in _STRANGERS if pattern.fullmatch(name)), None)
    verdict = f"is {stranger}, which is not supported" if stranger else "is no LoRA factor"
    text = f"tensor {shown_name(name)} of shape {list(file.info(name)[1])} {verdict}"
    raise unsupported(shard, text, tensor=name)
