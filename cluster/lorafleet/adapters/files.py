"""The files of an adapter directory: which there are, and that they are safe to open.

Only JSON and safetensors are read: a pickle runs code as it is opened, and is never opened here. It
knows what an adapter's files are called and nothing of what is in them, beyond the index that says
which shard holds what.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafleet.adapters.faults import invalid, shown, shown_name, unsupported
from lorafleet.core.errors import InvalidAdapter, InvalidInput
from lorafleet.core.manifest import FileEntry

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = "adapter_model.safetensors.index.json"

MAX_JSON_BYTES = 8 << 20
"""JSON is read whole; real configs have a few KiB, real indexes under 1 MiB."""

_PICKLES = ("adapter_model.bin", "pytorch_model.bin", "adapter_model.pt", "adapter_model.pth")
_SHARD = re.compile(r"adapter_model-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """The files that make up one adapter.

    `index` is which shard holds each tensor, or None for weights in one file.
    """

    config: Path
    weights: tuple[Path, ...]
    index: Mapping[str, str] | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """All of them."""
        index = () if self.index is None else (self.config.with_name(INDEX_FILE),)
        return (self.config, *self.weights, *index)


def find_files(directory: Path) -> AdapterFiles:
    """Find an adapter's files: the config and the weights in one file or in all shards of an index.

    Raises
    ------
    InvalidAdapter
        A file is missing, is no regular file, or is a link that leaves the directory.
    Unsupported
        The weights are a pickle.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise InvalidAdapter(f"{directory} is not a directory", file=directory)
    config = _required(directory, CONFIG_FILE)
    weights = _file(directory, WEIGHTS_FILE)
    if weights is not None:
        return AdapterFiles(config=config, weights=(weights,))
    index_file = _file(directory, INDEX_FILE)
    if index_file is not None:
        index = _read_index(index_file)
        shards = tuple(_required(directory, name) for name in sorted(set(index.values())))
        return AdapterFiles(config=config, weights=shards, index=index)
    raise _no_weights(directory)


def scan_directory(directory: Path, *, hashed: bool = True) -> tuple[FileEntry, ...]:
    """The files that make up an adapter, with sizes and, if `hashed`, digests.

    Raises
    ------
    InvalidAdapter
        A file is missing, cannot be read, or is a link that leaves the directory; it is named.
    Unsupported
        The weights are a pickle.
    """
    entry = _hashed_entry if hashed else _entry
    return tuple(entry(path) for path in find_files(directory).paths)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises
    ------
    InvalidAdapter
        It cannot be read, is too large, is no JSON (with line and column), or is no object.
    """
    name = path.name
    with _readable(path):
        size_bytes = path.stat().st_size
        if size_bytes > MAX_JSON_BYTES:
            raise invalid(name, f"expected at most {MAX_JSON_BYTES} bytes, got {size_bytes}")
        content = path.read_bytes()
    try:
        data = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise invalid(name, f"not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise invalid(name, f"expected a JSON object, got {shown(data)}")
    return data


def _required(directory: Path, name: str) -> Path:
    path = _file(directory, name)
    if path is None:
        raise InvalidAdapter(f"{name} is missing from {directory}", file=name)
    return path


def _file(directory: Path, name: str) -> Path | None:
    """A regular file that belongs to the directory, or None when there is nothing of that name."""
    path = directory / name
    if not path.exists() and not path.is_symlink():
        return None
    if path.is_symlink():
        _check_link(directory, path)
    if not path.is_file():
        raise invalid(name, f"is no file in {directory}")
    return path


def _check_link(directory: Path, path: Path) -> None:
    # An unpacked archive can hold a link to any file of the machine, which a push would then send.
    # The exception is how the hub's cache stores every model: snapshots/<rev>/file -> blobs/<hash>.
    root = directory.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        raise invalid(path.name, f"is a link to nothing in {directory}") from None
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise invalid(
            path.name, f"is a link out of {directory}; copy the file itself (`cp -L`) into it"
        )


def _read_index(path: Path) -> dict[str, str]:
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise invalid(path.name, "expected a weight_map that names shards", field="weight_map")
    counts, numbers = set(), set()
    for tensor, name in index.items():
        match = _SHARD.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise invalid(
                path.name,
                f"weight_map: {shown_name(tensor)} is in {shown(name)}, which is no shard's name; "
                "expected adapter_model-00001-of-0000N.safetensors",
                field="weight_map",
                tensor=tensor,
            )
        numbers.add(int(match[1]))
        counts.add(int(match[2]))
    if len(counts) > 1 or numbers != set(range(1, max(counts) + 1)):
        raise invalid(
            path.name,
            f"weight_map names {len(numbers)} of {max(counts)} shards; the index or the adapter "
            "is not whole",
            field="weight_map",
        )
    return index


def _no_weights(directory: Path) -> InvalidInput:
    for name in _PICKLES:
        if (directory / name).exists():
            return unsupported(
                name,
                "pickle files are not read, since they run code when opened; save the adapter "
                "with safe_serialization=True",
            )
    shards = sorted(path.name for path in directory.iterdir() if _SHARD.fullmatch(path.name))
    if shards:
        return InvalidAdapter(
            f"{INDEX_FILE} is missing from {directory}, which has {shards[0]}", file=INDEX_FILE
        )
    return InvalidAdapter(f"{WEIGHTS_FILE} is missing from {directory}", file=WEIGHTS_FILE)


def _entry(path: Path) -> FileEntry:
    with _readable(path):
        return FileEntry(name=path.name, size_bytes=path.stat().st_size, sha256="")


def _hashed_entry(path: Path) -> FileEntry:
    with _readable(path), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(name=path.name, size_bytes=file.tell(), sha256=digest)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise invalid(path.name, f"cannot be read: {error.strerror}") from None
