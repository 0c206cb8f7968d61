"""Adapters from one form of file into another, by what the paths are."""

from __future__ import annotations

import tempfile
from pathlib import Path

from safetensors.numpy import save_file

from lorafleet.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from lorafleet.adapters.gguf_lora import Heads, read_gguf, write_gguf
from lorafleet.adapters.modules import PlainAdapter, read_plain
from lorafleet.adapters.pickled import read_pickle

_PICKLE = "adapter_model.bin"


def read_any(source: Path, heads: Heads, *, allow_pickle: bool = False) -> PlainAdapter:
    """Read a PEFT directory or a GGUF file.

    Parameters
    ----------
    source : Path
        Ends in `.gguf`, or is a directory.
    heads : Heads
        Of the base model; for GGUF.
    allow_pickle : bool
        Read `adapter_model.bin` where there are no safetensors.

    Raises
    ------
    InvalidAdapter, Unsupported
        It is broken, or not made of rank rows alone; without `allow_pickle`, it is a pickle.
    """
    if source.suffix == ".gguf":
        return read_gguf(source, heads)
    if allow_pickle and not (source / WEIGHTS_FILE).exists() and (source / _PICKLE).is_file():
        return _read_pickled(source)
    return read_plain(source)


def write_any(adapter: PlainAdapter, target: Path, heads: Heads) -> None:
    """Write a GGUF file if the path ends in `.gguf`, else a PEFT directory.

    Raises
    ------
    AlreadyExists
        There is something at `target`.
    Unsupported
        GGUF has no name for one of the modules.
    """
    if target.suffix == ".gguf":
        write_gguf(adapter, target, heads)
    else:
        adapter.save(target)


def _read_pickled(source: Path) -> PlainAdapter:
    """By way of safetensors, so that there is one reader of names and shapes."""
    tensors = read_pickle(source / _PICKLE)
    with tempfile.TemporaryDirectory(prefix="adapter-") as folder:
        copy = Path(folder)
        (copy / CONFIG_FILE).write_bytes((source / CONFIG_FILE).read_bytes())
        save_file(tensors, copy / WEIGHTS_FILE)
        return read_plain(copy)
