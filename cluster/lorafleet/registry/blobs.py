"""Adapter files by content: what was pushed, stored once under its sha256, never changed.

It owns a directory tree on one file system and makes files appear in it whole and durable or not at
all. It knows no adapter names and no Redis. The service fills it, replicas load versions from it.

    sha256/ab/cd/abcd...   one file each, read-only
    staging/<random>/      a push on its way; removed at its end, or as garbage after a crash
    versions/<hex>-<hex>/  a version's files under their own names: hard links, made when asked for
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import BinaryIO

from lorafleet.core.errors import Exhausted, InvalidAdapter, InvalidInput, Unavailable
from lorafleet.core.manifest import FileEntry, VersionManifest

_FILE_NAME = re.compile(
    r"adapter_config\.json|adapter_model\.safetensors(\.index\.json)?"
    r"|adapter_model-\d{5}-of-\d{5}\.safetensors"
)
_FILE_NAME_RULE = (
    "adapter_config.json, adapter_model.safetensors, or numbered shards with their index"
)
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

_MAX_JSON_BYTES = 8 << 20
"""JSON is read into memory as a whole; real configs have a few KiB, real indexes under 1 MiB."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"sha256:([0-9a-f]{64})")


def check_file_entry(entry: FileEntry) -> None:
    """Refuse a file that no adapter may have.

    Raises
    ------
    InvalidAdapter
        The name is none of an adapter's, or size or digest are malformed.
    """
    if not _FILE_NAME.fullmatch(entry.name):
        pickled = entry.name.endswith(_PICKLE_SUFFIXES)
        raise InvalidAdapter(
            f"file {entry.name!r} is not accepted: expected {_FILE_NAME_RULE}"
            + ("; a pickle runs code when opened, save as safetensors" if pickled else ""),
            file=entry.name,
            field="name",
        )
    if not _DIGEST.fullmatch(entry.sha256):
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

    def __init__(self, path: Path, entry: FileEntry, finished: dict[str, FileEntry]) -> None:
        self._path = path
        self._entry = entry
        self._finished = finished
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
        with _full_disk_is_exhausted():
            self._open_file().write(chunk)
        self._digest.update(chunk)
        self._received_bytes += len(chunk)

    def finish(self) -> None:
        """Check that the file is whole and make it durable; errors as in `write`."""
        self._check_whole()
        with _full_disk_is_exhausted():
            self._open_file().flush()
            os.fsync(self._open_file().fileno())
        self._finished[self._entry.name] = self._entry

    def __enter__(self) -> StagedFile:
        self._file = self._path.open("xb")
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
    """A directory for the files of one push; gone when its context ends."""

    directory: Path
    _finished: dict[str, FileEntry] = field(default_factory=dict)

    def file(self, entry: FileEntry) -> StagedFile:
        """Open the next file for writing.

        Raises
        ------
        InvalidAdapter
            No adapter may have such a file, or it was there already.
        """
        check_file_entry(entry)
        if entry.name in self._finished:
            raise InvalidAdapter(f"{entry.name} comes twice", file=entry.name, field="name")
        return StagedFile(self.directory / entry.name, entry, self._finished)

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """The files received whole, in order."""
        return tuple(self._finished.values())


class BlobStore:
    """A content-addressed store under one directory; safe to use from several processes.

    Parameters
    ----------
    root : Path
        Made at the first write. One file system: files are moved and linked inside it.
    """

    def __init__(self, root: Path) -> None:
        self._root = Path(root)

    def path(self, sha256: str) -> Path:
        """Where a blob is, or would be."""
        if not _DIGEST.fullmatch(sha256):
            raise InvalidInput(f"{sha256!r} is no sha256", field="sha256")
        return self._root / "sha256" / sha256[:2] / sha256[2:4] / sha256

    def has(self, sha256: str) -> bool:
        """Whether the store holds a blob."""
        return self.path(sha256).is_file()

    @contextlib.contextmanager
    def open_staging(self) -> Iterator[Staging]:
        """Make a directory for a push; whatever is left in it at the end is removed."""
        directory = self._root / "staging" / secrets.token_hex(16)
        with _full_disk_is_exhausted():
            directory.mkdir(parents=True, mode=0o700)
        try:
            yield Staging(directory=directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def commit(self, staging: Staging) -> None:
        """Move the staged files, which are whole and checked, among the blobs, durably.

        A blob that is there already counts as new from now on, so that garbage collection leaves it
        until its version is published.
        """
        with self._lock(fcntl.LOCK_SH), _full_disk_is_exhausted():
            for entry in staging.entries:
                source = staging.directory / entry.name
                target = self.path(entry.sha256)
                if target.is_file() and target.stat().st_size == entry.size_bytes:
                    os.utime(target)
                else:
                    source.chmod(0o444)
                    _make_durable_dirs(target.parent)
                    source.replace(target)
                _fsync_dir(target.parent)

    def materialise(self, manifest: VersionManifest) -> Path:
        """Return a directory with a version's files under their own names, ready to be loaded.

        It is made of hard links, so it costs no space, and kept for the next time.

        Raises
        ------
        Unavailable
            This store lacks one of the files.
        InvalidAdapter
            The manifest names a file that no adapter may have.
        """
        match = _VERSION.fullmatch(manifest.id)
        if match is None:
            raise InvalidInput(f"{manifest.id!r} is no version id", field="version")
        for entry in manifest.files:
            check_file_entry(entry)
        # One version may have been pushed as different files, by other names or as shards.
        files = hashlib.sha256(repr(sorted(map(astuple, manifest.files))).encode()).hexdigest()
        directory = self._root / "versions" / f"{match[1]}-{files[:16]}"
        if self._is_complete(directory, manifest):
            return directory
        partial = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}")
        partial.mkdir(parents=True)
        try:
            for entry in manifest.files:
                self._link(entry, partial / entry.name, manifest)
            _fsync_dir(partial)
            self._publish_dir(partial, directory, manifest)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return directory

    def sweep(self, keep: Collection[str], keep_versions: Collection[str], grace_s: float) -> int:
        """Remove what is not to be kept and has not been touched for a while.

        Parameters
        ----------
        keep : collection of str
            Digests of blobs that registered versions refer to, read before the call.
        keep_versions : collection of str
            Ids of registered versions.
        grace_s : float
            Anything younger stays: a push may be about to publish it.

        Returns
        -------
        int
            Bytes of removed blobs.
        """
        old_before_s = time.time() - grace_s
        removed_bytes = 0
        for blob in self._root.glob("sha256/*/*/*"):
            if blob.name not in keep:
                removed_bytes += self._remove_if_old(blob, old_before_s)
        kept = {version.removeprefix("sha256:") for version in keep_versions}
        for directory in self._root.glob("versions/*"):
            if directory.name.partition("-")[0] not in kept and _newest_s(directory) < old_before_s:
                shutil.rmtree(directory, ignore_errors=True)
        for directory in self._root.glob("staging/*"):
            if _newest_s(directory) < old_before_s:
                shutil.rmtree(directory, ignore_errors=True)
        return removed_bytes

    def _remove_if_old(self, blob: Path, old_before_s: float) -> int:
        # The lock keeps a push from renewing the blob between the question and the removal.
        with self._lock(fcntl.LOCK_EX), contextlib.suppress(FileNotFoundError):
            status = blob.stat()
            if status.st_mtime < old_before_s:
                blob.unlink()
                return status.st_size
        return 0

    def _is_complete(self, directory: Path, manifest: VersionManifest) -> bool:
        try:
            sizes = {item.name: item.stat().st_size for item in directory.iterdir()}
        except OSError:
            return False
        return sizes == {entry.name: entry.size_bytes for entry in manifest.files}

    def _link(self, entry: FileEntry, target: Path, manifest: VersionManifest) -> None:
        blob = self.path(entry.sha256)
        try:
            os.link(blob, target)
        except FileNotFoundError as error:
            raise Unavailable(
                f"the blob store has no {entry.name} of version {manifest.id}",
                version=manifest.id,
                file=entry.name,
                sha256=entry.sha256,
            ) from error
        except OSError as error:
            # Some file systems have no hard links, or a limit of them.
            if error.errno not in (errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                raise
            with _full_disk_is_exhausted():
                shutil.copyfile(blob, target)

    def _publish_dir(self, partial: Path, directory: Path, manifest: VersionManifest) -> None:
        try:
            partial.rename(directory)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        if self._is_complete(directory, manifest):
            return  # another process was quicker
        spoilt = partial.with_name(f"{partial.name}.old")
        with contextlib.suppress(OSError):
            directory.rename(spoilt)
        try:
            partial.rename(directory)
        finally:
            shutil.rmtree(spoilt, ignore_errors=True)

    @contextlib.contextmanager
    def _lock(self, mode: int) -> Iterator[None]:
        self._root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._root / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, mode)
            yield
        finally:
            os.close(descriptor)


def _make_durable_dirs(directory: Path) -> None:
    if directory.is_dir():
        return
    _make_durable_dirs(directory.parent)
    directory.mkdir(exist_ok=True)
    _fsync_dir(directory.parent)


def _fsync_dir(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _newest_s(directory: Path) -> float:
    """When anything in a directory was last written; infinity when it is going away."""
    try:
        return max(item.stat().st_mtime for item in (directory, *directory.iterdir()))
    except OSError:
        return float("inf")


@contextlib.contextmanager
def _full_disk_is_exhausted() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Exhausted("the blob store's disk is full") from error
        raise
