"""A HuggingFace directory: config.json, safetensors (one file or shards), tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from lorafleet.core.errors import InvalidInput, NotFound
from lorafleet.native import SafetensorsFile

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class HuggingFaceCheckpoint:
    """See `source.Checkpoint`. Weights are widened to float32.

    Raises
    ------
    InvalidInput
        config.json cannot be read, or there are no safetensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        try:
            self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        except ValueError as error:
            raise InvalidInput(
                f"config.json: not valid JSON: {error}", file="config.json"
            ) from None
        # transformers 5 nests it; readers everywhere know the flat name.
        rope = self.config.get("rope_parameters") or {}
        if "rope_theta" in rope:
            self.config.setdefault("rope_theta", rope["rope_theta"])
        self._files = [SafetensorsFile(file) for file in self._weight_files()]
        self._where = {name: file for file in self._files for name in file.names()}

    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).info(name)[1]

    def read(self, name: str) -> np.ndarray:
        return self._file(name).read_f32(name)

    def tokenizer_files(self) -> dict[str, bytes]:
        found = {
            name: (self.path / name).read_bytes()
            for name in _TOKENIZER_FILES
            if (self.path / name).is_file()
        }
        if "tokenizer.json" not in found:
            raise InvalidInput(f"{self.path}: tokenizer.json is missing", file="tokenizer.json")
        return found

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._where:
            raise NotFound(f"{self.path}: no tensor {name!r}", tensor=name)
        return self._where[name]

    def _weight_files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [self.path / shard for shard in shards]
        else:
            files = [self.path / "model.safetensors"]
        for file in files:
            if file.parent != self.path or not file.is_file():
                raise InvalidInput(f"{self.path}: {file.name} is missing", file=file.name)
        return files
