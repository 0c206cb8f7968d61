"""Writing a checkpoint with changed weights: a standard HuggingFace directory, whole or not at all.

It knows no adapters: whoever merges gives the change of each linear layer. The result is read by
any tool, and compiled like any other base.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from lorafleet.compiler.package import PAGE_ROWS
from lorafleet.compiler.source import Checkpoint
from lorafleet.core.errors import AlreadyExists, InvalidInput
from lorafleet.core.model import BaseModel

Change = Callable[[str, np.ndarray], np.ndarray]
"""Receives a tensor's name and values (float32) and returns the new values."""

SHARD_BYTES = 1 << 30

_DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def describe(checkpoint: Checkpoint) -> BaseModel:
    """A checkpoint's layers as a base model's, without compiling it; it has no library.

    Raises
    ------
    Unsupported
        The model's family is not known.
    """
    from lorafleet.compiler.build import export
    from lorafleet.compiler.zoo import family as find_family

    family = find_family(checkpoint.config)
    return BaseModel(
        name=checkpoint.name,
        digest="sha256:" + "0" * 64,
        library="",
        target="",
        vocab_size=family.vocab_size,
        context_window=family.context_window,
        max_batch_tokens=0,
        page_rows=PAGE_ROWS,
        kv=family.kv_layout(),
        sites=export(family, checkpoint, lora=True, page_rows=PAGE_ROWS).sites,
    )


def write_checkpoint(
    checkpoint: Checkpoint,
    out_dir: Path,
    change: Change,
    *,
    dtype: str = "float32",
    progress: Callable[[float], None] = lambda fraction: None,
) -> None:
    """Write `checkpoint` with changed weights to `out_dir`.

    Parameters
    ----------
    checkpoint : Checkpoint
        What is changed; a GGUF file is dequantised.
    out_dir : Path
        Appears when it is complete.
    change : callable
        Gives the new values of each tensor.
    dtype : str
        Of the tensors: `float32`, `float16` or `bfloat16`.
    progress : callable
        Receives the fraction done.

    Raises
    ------
    AlreadyExists
        `out_dir` exists.
    InvalidInput
        The dtype is none of those.
    """
    if dtype not in _DTYPES:
        expected = ", ".join(_DTYPES)
        raise InvalidInput(f"dtype: expected one of {expected}, got {dtype!r}", field="dtype")
    out_dir = Path(out_dir).absolute()
    if out_dir.exists():
        raise AlreadyExists(f"{out_dir} exists; choose another directory", file=out_dir)
    work = out_dir.parent / f".{out_dir.name}.{uuid.uuid4().hex[:8]}.partial"
    work.mkdir(parents=True)
    try:
        for name, content in checkpoint.tokenizer_files().items():
            (work / name).write_bytes(content)
        _write_weights(checkpoint, work, change, _DTYPES[dtype], progress)
        config = {**checkpoint.config, "dtype": dtype, "torch_dtype": dtype}
        config.pop("quantization_config", None)
        (work / "config.json").write_text(json.dumps(config, indent=2))
        os.replace(work, out_dir)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _write_weights(
    checkpoint: Checkpoint,
    work: Path,
    change: Change,
    dtype: np.dtype[Any],
    progress: Callable[[float], None],
) -> None:
    shards = list(_shards(checkpoint, dtype.itemsize))
    where: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        tensors = {}
        for name in names:
            values = change(name, checkpoint.read(name))
            tensors[name] = np.ascontiguousarray(values.astype(dtype))
            progress((len(where) + len(tensors)) / len(checkpoint.names()))
        single = len(shards) == 1
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = "model.safetensors" if single else file
        save_file(tensors, work / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": where}
        (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _shards(checkpoint: Checkpoint, item_bytes: int) -> Iterator[list[str]]:
    """Names in groups that fit into a shard, or a larger tensor by itself."""
    names: list[str] = []
    size = 0
    for name in checkpoint.names():
        tensor = int(np.prod(checkpoint.shape(name))) * item_bytes
        if names and size + tensor > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor
    if names:
        yield names
