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

# In memory, PEFT puts the adapter's name between the factor's and `weight`; some tools save that.
_OWN_NAME = r"(?:\.(?P<name>(?!weight$)[^.]+))?"

# The first that matches decides.
_KINDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("A", re.compile(rf"(?P<module>.+)\.lora_A{_OWN_NAME}\.weight")),
    ("B", re.compile(rf"(?P<module>.+)\.lora_B{_OWN_NAME}\.weight")),
    ("A", re.compile(r"(?P<module>.+)\.(?P<transposed>lora_a)")),
    ("B", re.compile(r"(?P<module>.+)\.(?P<transposed>lora_b)")),
    (
        "magnitude",
        re.compile(rf"(?P<module>.+)\.lora_magnitude_vector{_OWN_NAME}(?:\.weight)?"),
    ),
    ("lora_bias", re.compile(rf"(?P<module>.+)\.lora_B{_OWN_NAME}\.bias")),
    ("bias", re.compile(r"(?P<module>.+?)(?:\.base_layer)?\.bias")),
)

# Tensors of known kinds that are nothing of the above, and what to call them.
_STRANGERS = (
    (re.compile(r".*\.lora_embedding_[AB](\..*)?"), "LoRA on an embedding"),
    (re.compile(r".*\.lora_E(\..*)?|.*\.lora_[AB]"), "an AdaLoRA factor"),
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
    """One tensor of an adapted layer; `module` is its path with PEFT's prefix removed.

    `transposed` factors lie in the file as MLX saves them, A as (in, r) and B as (r, out); shape,
    values and bytes here are PEFT's all the same.
    """

    tensor: str
    module: str
    kind: Kind
    file: SafetensorsFile
    transposed: bool = False

    @property
    def dtype(self) -> str:
        """As in the file: `F32`, `BF16`, ..."""
        return self.file.info(self.tensor)[0]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.file.info(self.tensor)[1]
        return shape[::-1] if self.transposed else shape

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return int(self.file.raw(self.tensor).nbytes)

    def raw(self) -> np.ndarray:
        """The bytes of its values in the order of `shape`, uint8."""
        raw = self.file.raw(self.tensor)
        if not self.transposed:
            return raw
        stored = self.shape[::-1]
        items = raw.reshape(*stored, -1)
        return np.ascontiguousarray(np.moveaxis(items, 0, 1)).reshape(-1)

    def values(self) -> np.ndarray:
        """The tensor, widened to float32."""
        values = self.file.read_f32(self.tensor)
        return np.ascontiguousarray(values.T) if self.transposed else values

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
    own_names: dict[str, str] = {}
    for path in files.weights:
        file = SafetensorsFile(path)
        names = file.names()
        if files.index is not None:
            _check_index(path.name, names, files.index)
        factors += [_factor(name, file, own_names) for name in names]
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


def _factor(name: str, file: SafetensorsFile, own_names: dict[str, str]) -> Factor:
    shard = file.path.name
    if len(name) > _MAX_NAME:
        text = f"tensor {shown_name(name)} has a name of over {_MAX_NAME} characters"
        raise invalid(shard, text, tensor=name)
    for kind, pattern in _KINDS:
        if match := pattern.fullmatch(name):
            groups = match.groupdict()
            _check_own_name(name, groups.get("name") or "default", shard, own_names)
            return Factor(
                tensor=name,
                module=match["module"].removeprefix("base_model.model."),
                kind=kind,
                file=file,
                transposed=groups.get("transposed") is not None and len(file.info(name)[1]) == 2,
            )
    stranger = next((what for pattern, what in _STRANGERS if pattern.fullmatch(name)), None)
    verdict = f"is {stranger}, which is not supported" if stranger else "is no LoRA factor"
    text = f"tensor {shown_name(name)} of shape {list(file.info(name)[1])} {verdict}"
    raise unsupported(shard, text, tensor=name)


def _check_own_name(tensor: str, own: str, shard: str, seen: dict[str, str]) -> None:
    """See that all tensors are of one adapter; `seen` has a tensor of each adapter's name."""
    seen.setdefault(own, tensor)
    if len(seen) > 1:
        other = next(tensor for name, tensor in seen.items() if name != own)
        raise invalid(
            shard,
            f"tensor {shown_name(tensor)} is of another adapter than {shown_name(other)}; save "
            "each with save_pretrained",
            tensor=tensor,
        )
