"""The manifest of an adapter version: what the registry keeps and everyone may read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of an adapter directory, by content; `sha256` is empty while it is not known."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionManifest:
    """One immutable version; fields as in `registry.proto`, `created_at_s` in Unix seconds."""

    id: str
    adapter: str
    base_digest: str
    max_rank: int
    num_modules: int
    target_modules: tuple[str, ...]
    weights_bytes: int
    dtype: str
    files: tuple[FileEntry, ...]
    created_at_s: float

    def to_json(self) -> str:
        """One line of JSON with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> VersionManifest:
        """The inverse of `to_json`."""
        data = json.loads(text)
        data["files"] = tuple(FileEntry(**entry) for entry in data["files"])
        data["target_modules"] = tuple(data["target_modules"])
        return cls(**data)
