"""The files of an adapter directory and the names of the tensors in them.

Only safetensors are read: a pickle runs code as it is opened, and is never opened here.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from lorafleet.core.errors import InvalidAdapter, Unsupported
from lorafleet.core.manifest import FileEntry
from lorafleet.native import SafetensorsFile

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_INDEX_FILE = "adapter_model.safetensors.index.json"
_PICKLES = ("adapter_model.bin", "pytorch_model.bin", "adapter_model.pt", "adapter_model.pth")
_SHARD = re.compile(r"adapter_model-\d{5}-of-\d{5}\.safetensors")

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")

# Tensors of known kinds that are no plain LoRA factors, and what to call them.
_STRANGERS = (
    (re.compile(r".*\.lora_magnitude_vector(\..*)?"), "a DoRA magnitude (use_dora)"),
    (re.compile(r".*\.lora_embedding_[AB](\..*)?"), "LoRA on an embedding"),
    (re.compile(r".*\.lora_E(\..*)?|.*\.lora_[AB]"), "an AdaLoRA factor"),
    (re.compile(r".*\.lora_[ab]"), "a factor in MLX's layout; convert the adapter to PEFT's"),
    (re.compile(r".*\.lora_B(\..*)?\.bias"), "a bias on lora_B (lora_bias)"),
    (re.compile(r".*\.hada_.*"), "a LoHa factor"),
    (re.compile(r".*\.lokr_.*"), "a LoKr factor"),
    (re.compile(r".*vera_lambda_.*|.*vera_[AB].*"), "a VeRA factor"),
    (re.compile(r".*\.ia3_l.*"), "an IA3 vector"),
    (re.compile(r".*token_adapter.*"), "changed embedding rows (trainable_token_indices)"),
    (re.compile(r".*\.bias"), "a trained bias (bias)"),
    (re.compile(r".*\.weight"), "a whole weight matrix (modules_to_save)"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One lora_A or lora_B tensor; `module` is its path with PEFT's prefix removed."""

    tensor: str
    module: str
    kind: str  # "A" or "B"
    file: SafetensorsFile


def scan_directory(directory: Path) -> tuple[FileEntry, ...]:
    """The files that make up an adapter, with sizes and digests: what a push sends.

    Raises
    ------
    InvalidAdapter
        The directory, the config or the weights are missing; `facts` name the file.
    Unsupported
        The weights are a pickle.
    """
    files = [directory / CONFIG_FILE, *weight_files(directory)]
    if (directory / _INDEX_FILE).is_file():
        files.append(directory / _INDEX_FILE)
    return tuple(
        FileEntry(name=file.name, size_bytes=file.stat().st_size, sha256=_sha256(file))
        for file in files
    )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of an adapter directory: one, or all shards of its index."""
    if not directory.is_dir():
        raise InvalidAdapter(f"{directory} is not a directory", file=directory)
    if not (directory / CONFIG_FILE).is_file():
        raise InvalidAdapter(f"{CONFIG_FILE} is missing from {directory}", file=CONFIG_FILE)
    if (directory / WEIGHTS_FILE).is_file():
        return [directory / WEIGHTS_FILE]
    if (directory / _INDEX_FILE).is_file():
        return _shards(directory)
    for name in _PICKLES:
        if (directory / name).exists():
            raise Unsupported(
                f"{name}: pickle files are not read, since they run code when opened; save the "
                "adapter with safe_serialization=True",
                file=name,
            )
    raise InvalidAdapter(f"{WEIGHTS_FILE} is missing from {directory}", file=WEIGHTS_FILE)


def _shards(directory: Path) -> list[Path]:
    try:
        names = sorted(
            set(json.loads((directory / _INDEX_FILE).read_text())["weight_map"].values())
        )
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise InvalidAdapter(
            f"{_INDEX_FILE}: expected a JSON object with weight_map", file=_INDEX_FILE
        ) from None
    for name in names:
        if not isinstance(name, str) or not _SHARD.fullmatch(name):
            raise InvalidAdapter(f"{_INDEX_FILE}: {name!r} is no shard's name", file=_INDEX_FILE)
        if not (directory / name).is_file():
            raise InvalidAdapter(f"{name} is missing from {directory}", file=name)
    if not names:
        raise InvalidAdapter(f"{_INDEX_FILE}: names no shard", file=_INDEX_FILE)
    return [directory / name for name in names]


def read_factors(directory: Path) -> list[Factor]:
    """Open the weights and name every tensor in them.

    Raises
    ------
    InvalidAdapter
        A file is broken; the tensor or the rule is named.
    Unsupported
        A tensor is no plain LoRA factor; it is named.
    """
    factors = []
    for path in weight_files(directory):
        file = SafetensorsFile(path)
        factors += [_factor(name, file) for name in file.names()]
    if not factors:
        raise InvalidAdapter(f"{WEIGHTS_FILE}: holds no tensors", file=WEIGHTS_FILE)
    return factors


def _factor(name: str, file: SafetensorsFile) -> Factor:
    match = _FACTOR.fullmatch(name)
    if match is None:
        kind = next((what for pattern, what in _STRANGERS if pattern.fullmatch(name)), None)
        raise Unsupported(
            f"{file.path.name}: tensor {name!r} "
            + (f"is {kind}, which is not supported" if kind else "is no LoRA factor"),
            file=file.path.name,
            tensor=name,
        )
    module = match["module"].removeprefix("base_model.model.")
    return Factor(tensor=name, module=module, kind=match["factor"], file=file)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
