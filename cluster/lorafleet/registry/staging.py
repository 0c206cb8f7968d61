"""A push's files as they come in: each is checked while it is received, and may be taken up again.

It owns one directory, and which files an adapter may have. It knows neither blobs nor names of
adapters: the blob store makes the directory and takes over what is whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from lorafleet.core.errors import Conflict, Exhausted, InvalidAdapter
from lorafleet.core.manifest import FileEntry
from lorafleet.core.names import DEFAULT_TENANT

FILE_NAME = re.compile(
    r"adapter_config\.json|adapter_model\.safetensors(\.index\.json)?"
    r"|adapter_model-\d{5}-of-\d{5}\.safetensors"
)
_FILE_NAME_RULE = (
    "adapter_config.json, adapter_model.safetensors, or numbered shards with their index"
)
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

_MAX_JSON_BYTES = 8 << 20
"""JSON is read into memory as a whole; real configs have a few KiB, real indexes under 1 MiB."""

_BLOCK_BYTES = 1 << 20

DIGEST = re.compile(r"[0-9a-f]{64}")


def check_file_entry(entry: FileEntry, *, hashed: bool = True) -> None:
    """Refuse a file that no adapter may have; unless `hashed`, the digest may be left out.

    Raises
    ------
    InvalidAdapter
        The name is none of an adapter's, or size or digest are malformed.
    """
    if not FILE_NAME.fullmatch(entry.name):
        pickled = entry.name.endswith(_PICKLE_SUFFIXES)
        raise InvalidAdapter(
            f"file {entry.name!r} is not accepted: expected {_FILE_NAME_RULE}"
            + ("; a pickle runs code when opened, save as safetensors" if pickled else ""),
            file=entry.name,
            field="name",
        )
    if not DIGEST.fullmatch(entry.sha256) and (hashed or entry.sha256):
        raise InvalidAdapter(
            f"{entry.name}: expected 64 lower-case hex digits as sha256, got {entry.sha256!r}",
            file=entry.name,
            field="sha256",
        )
    if entry.size_bytes <= 0:
        raise InvalidAdapter(f"{entry.name} is empty", file=entry.name, field="size_bytes")
    if entry.name.endswith(".json") and entry.size_bytes > _MAX_JSON_BYTES:
        raise InvalidAdapter(
            f"{entry.name}: expected at most {_MAX_JSON_BYTES} bytes, got {entry.size_bytes}",
            file=entry.name,
            field="size_bytes",
        )


class StagedFile:
    """A file being received: its size and digest are checked as it comes in.

    Use it as a context manager, which closes it; it counts as received once `finish` has returned.
    """

    def __init__(
        self, path: Path, entry: FileEntry, finished: dict[str, FileEntry], held_bytes: int = 0
    ) -> None:
        self._path = path
        self._entry = entry
        self._finished = finished
        self._held_bytes = held_bytes
        self._digest = hashlib.sha256()
        self._received_bytes = 0
        self._file: BinaryIO | None = None

    @property
    def missing_bytes(self) -> int:
        """How much is still to come."""
        return self._entry.size_bytes - self._received_bytes

    def write(self, chunk: bytes) -> None:
        """Append a chunk.

        Raises
        ------
        InvalidAdapter
            The file would be longer than announced.
        Exhausted
            The disk is full.
        """
        if len(chunk) > self.missing_bytes:
            raise InvalidAdapter(
                f"{self._entry.name}: expected {self._entry.size_bytes} bytes, got at least "
                f"{self._received_bytes + len(chunk)}",
                file=self._entry.name,
                field="size_bytes",
            )
        with full_disk_is_exhausted():
            self._open_file().write(chunk)
        self._digest.update(chunk)
        self._received_bytes += len(chunk)

    def finish(self, sha256: str = "") -> None:
        """Check that the file is whole; `sha256` is its digest where its entry has none.

        Errors are as in `write`.
        """
        if not self._entry.sha256:
            self._entry = replace(self._entry, sha256=sha256)
            check_file_entry(self._entry)
        self._check_whole()
        with full_disk_is_exhausted():
            self._open_file().flush()
        self._finished[self._entry.name] = self._entry

    def __enter__(self) -> StagedFile:
        if not self._held_bytes:
            self._file = self._path.open("xb")
            return self
        # What was held is hashed again: it may have been damaged since.
        self._file = self._path.open("r+b")
        self._file.truncate(self._held_bytes)
        while block := self._file.read(_BLOCK_BYTES):
            self._digest.update(block)
            self._received_bytes += len(block)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._open_file().close()

    def _open_file(self) -> BinaryIO:
        assert self._file is not None, "used outside of its context"
        return self._file

    def _check_whole(self) -> None:
        if self.missing_bytes:
            raise InvalidAdapter(
                f"{self._entry.name}: expected {self._entry.size_bytes} bytes, got "
                f"{self._received_bytes}",
                file=self._entry.name,
                field="size_bytes",
            )
        digest = self._digest.hexdigest()
        if digest != self._entry.sha256:
            raise InvalidAdapter(
                f"{self._entry.name}: expected sha256 {self._entry.sha256}, got {digest}",
                file=self._entry.name,
                field="sha256",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """A directory for the files of one push; gone when its context ends.

    Files are durable after `sync`.
    """

    directory: Path
    tenant: str = DEFAULT_TENANT
    _finished: dict[str, FileEntry] = field(default_factory=dict)
    _begun: dict[str, FileEntry] = field(default_factory=dict)

    def file(
        self, entry: FileEntry, *, held: Path | None = None, held_bytes: int = 0
    ) -> StagedFile:
        """Open the next file for writing, after what is `held` of it already.

        Raises
        ------
        InvalidAdapter
            No adapter may have such a file, or it was there already.
        Conflict
            What was held is there no more.
        """
        check_file_entry(entry, hashed=False)
        if entry.name in self._begun:
            raise InvalidAdapter(f"{entry.name} comes twice", file=entry.name, field="name")
        path = self.directory / entry.name
        if held is not None:
            _take(held, path, held_bytes)
        self._begun[entry.name] = entry
        return StagedFile(path, entry, self._finished, held_bytes if held is not None else 0)

    def adopt(self, entry: FileEntry) -> None:
        """Take a file that was written here by other means, checked by whoever did."""
        check_file_entry(entry)
        self._finished[entry.name] = entry

    def sync(self) -> None:
        """Make what was received durable; Exhausted when the disk is full."""
        for entry in self.entries:
            with full_disk_is_exhausted(), (self.directory / entry.name).open("rb+") as file:
                os.fsync(file.fileno())

    def unfinished(self) -> Iterator[tuple[Path, FileEntry]]:
        """What came of the files of a push that ends early, by which the next may go on."""
        for name, entry in self._begun.items():
            path = self.directory / name
            if entry.sha256 and path.is_file() and 0 < path.stat().st_size <= entry.size_bytes:
                yield path, entry

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """The files received whole, in order."""
        return tuple(self._finished.values())


def _take(held: Path, path: Path, held_bytes: int) -> None:
    """Make what is held the file at `path`: a partial one is moved, a blob is copied."""
    try:
        if held.parent.name == "partial":
            held.rename(path)
        else:
            with full_disk_is_exhausted():
                shutil.copyfile(held, path)
        whole = path.stat().st_size >= held_bytes
    except FileNotFoundError:
        whole = False
    if not whole:
        raise Conflict(
            f"{path.name}: the {held_bytes} bytes that were held are there no more; plan the push "
            "again",
            file=path.name,
            field="held_bytes",
        )


@contextlib.contextmanager
def full_disk_is_exhausted() -> Iterator[None]:
    """While active, a full disk or a quota of the file system is raised as Exhausted."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Exhausted("the blob store's disk is full") from error
        raise
