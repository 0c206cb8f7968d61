"""GGUF LoRA files, as llama.cpp reads and writes them for Llama-type models, both ways.

    general.type = adapter, adapter.type = lora, adapter.lora.alpha
    blk.<i>.<layer>.weight.lora_a  (r, in)        blk.<i>.<layer>.weight.lora_b  (out, r)

The scale is alpha / r for all modules; others are folded into B. llama.cpp pairs the rows of q and
k for its rotation, so the rows of their B are put in another order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lorafleet.adapters.faults import shown, shown_name
from lorafleet.adapters.modules import ModuleFactors, PlainAdapter
from lorafleet.core.errors import AlreadyExists, InvalidAdapter, InvalidInput, Unsupported

_LAYERS: Mapping[str, str] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {gguf: peft for peft, gguf in _LAYERS.items()}
_MODULE = re.compile(r"model\.layers\.(\d+)\.(.+)")
_TENSOR = re.compile(r"blk\.(\d+)\.([a-z_]+)\.weight\.lora_([ab])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Query and key heads of the base model: they fix the order of rows."""

    query: int
    key: int

    def of(self, layer: str) -> int | None:
        """Heads of a layer whose rows are paired, else None."""
        return {"self_attn.q_proj": self.query, "self_attn.k_proj": self.key}.get(layer)


def read_gguf(path: Path, heads: Heads) -> PlainAdapter:
    """Read a GGUF LoRA file.

    Raises
    ------
    InvalidAdapter
        It is broken: a field or tensor is missing or has the wrong shape.
    Unsupported
        It is no LoRA adapter of a Llama-type model.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # the reader fails in many ways on what is no GGUF
        raise InvalidAdapter(f"{path.name}: not a valid GGUF file: {error}", file=path) from None
    _check_kind(path.name, reader)
    field = reader.fields.get("adapter.lora.alpha")
    if field is None:
        raise InvalidAdapter(
            f"{path.name}: adapter.lora.alpha is missing",
            file=path.name,
            field="adapter.lora.alpha",
        )
    alpha = float(field.contents())
    found: dict[str, dict[str, np.ndarray]] = {}
    for tensor in reader.tensors:
        module, factor = _module_of(path.name, tensor.name)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found.setdefault(module, {})[factor] = np.ascontiguousarray(values, np.float32)
    modules = {
        name: _read_module(path.name, name, pair, alpha, heads)
        for name, pair in sorted(found.items())
    }
    if not modules:
        raise InvalidAdapter(f"{path.name} holds no tensors", file=path.name)
    return PlainAdapter(modules=modules, dtype=np.dtype(np.float32))


def write_gguf(adapter: PlainAdapter, path: Path, heads: Heads) -> None:
    """Write a GGUF LoRA file.

    Raises
    ------
    AlreadyExists
        `path` exists.
    Unsupported
        A module has no name in GGUF; it is named.
    """
    import gguf

    if path.exists():
        raise AlreadyExists(f"{path} exists; name another file", file=path)
    alphas = [module.scale * module.rank for module in adapter.modules.values()]
    alpha = max(set(alphas), key=alphas.count) or 1.0
    partial = path.with_name(f".{path.name}.partial")
    writer = gguf.GGUFWriter(partial, "llama")
    try:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", alpha)
        for name, module in adapter.modules.items():
            prefix, layer = _gguf_name(name)
            b = module.b * np.float32(module.scale * module.rank / alpha)
            count = heads.of(layer)
            if count is not None:
                b = _pair_rows(name, b, count)
            dtype = np.float16 if adapter.dtype == np.float16 else np.float32
            writer.add_tensor(f"{prefix}.lora_a", np.ascontiguousarray(module.a, dtype))
            writer.add_tensor(f"{prefix}.lora_b", np.ascontiguousarray(b, dtype))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _check_kind(file: str, reader: Any) -> None:
    expected = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "general.architecture": "llama",
    }
    for name, value in expected.items():
        field = reader.fields.get(name)
        found = field.contents() if field is not None else None
        if found != value:
            raise Unsupported(
                f"{file}: {name} is {shown(found)}; expected {value!r}", file=file, field=name
            )


def _module_of(file: str, tensor: str) -> tuple[str, str]:
    match = _TENSOR.fullmatch(tensor)
    if match is None or match[2] not in _NAMES:
        raise Unsupported(
            f"{file}: tensor {shown_name(tensor)} is no LoRA factor of a Llama's linear layer",
            file=file,
            tensor=tensor,
        )
    return f"model.layers.{match[1]}.{_NAMES[match[2]]}", match[3]


def _read_module(
    file: str, name: str, pair: dict[str, np.ndarray], alpha: float, heads: Heads
) -> ModuleFactors:
    if len(pair) < 2:
        raise InvalidAdapter(f"{file}: {name} has lora_{next(iter(pair))} alone", file=file)
    a, b = pair["a"], pair["b"]
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise InvalidAdapter(
            f"{file}: {name} has factors of shapes {list(a.shape)} and {list(b.shape)}, expected "
            "(r, in) and (out, r)",
            file=file,
        )
    count = heads.of(_MODULE.fullmatch(name)[2])  # type: ignore[index]
    if count is not None:
        b = _unpair_rows(name, b, count)
    return ModuleFactors(a=a, b=b, scale=alpha / len(a))


def _gguf_name(module: str) -> tuple[str, str]:
    """The tensor's name without its factor, and the layer's kind."""
    match = _MODULE.fullmatch(module)
    if match is None or match[2] not in _LAYERS:
        raise Unsupported(f"{module} has no name in GGUF's LoRA for Llama models", field=module)
    return f"blk.{match[1]}.{_LAYERS[match[2]]}.weight", match[2]


def _pair_rows(module: str, b: np.ndarray, heads: int) -> np.ndarray:
    """Row i beside row i + D/2 of each head, D its size."""
    return _reorder(module, b, (heads, 2, -1))


def _unpair_rows(module: str, b: np.ndarray, heads: int) -> np.ndarray:
    return _reorder(module, b, (heads, -1, 2))


def _reorder(module: str, b: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    rows, rank = b.shape
    if rows % (2 * shape[0]):
        raise InvalidInput(
            f"{module}: {rows} rows are no {shape[0]} heads of even size; convert with the base "
            "model that the adapter is for",
            field=module,
        )
    return np.ascontiguousarray(b.reshape(*shape, rank).swapaxes(1, 2).reshape(rows, rank))
