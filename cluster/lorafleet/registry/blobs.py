"""Adapter files by content: what was pushed, stored once under its sha256, never changed.

It owns a directory tree on one file system and makes files appear in it whole and durable or not at
all. It knows no adapter names and no Redis. The service fills it, replicas load versions from it.

    sha256/ab/cd/abcd...   one file each, read-only
    staging/<random>/      a push on its way; removed at its end, or as garbage after a crash
    versions/<hex>-<hex>/  a version's files under their own names: hard links, made when asked for
    partial/<tenant>-<hex> what came of a file before its push broke off; taken up by the next
    owners/<tenant>/<hex>  an empty file for each blob that a tenant has pushed: knowing a digest
                           gives nobody another tenant's file
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
from dataclasses import astuple
from pathlib import Path

from lorafleet.core.errors import InvalidInput, Unavailable
from lorafleet.core.manifest import FileEntry, VersionManifest
from lorafleet.core.names import DEFAULT_TENANT
from lorafleet.registry.staging import (
    DIGEST,
    Staging,
    check_file_entry,
    full_disk_is_exhausted,
)

_VERSION = re.compile(r"sha256:([0-9a-f]{64})")


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
        if not DIGEST.fullmatch(sha256):
            raise InvalidInput(f"{sha256!r} is no sha256", field="sha256")
        return self._root / "sha256" / sha256[:2] / sha256[2:4] / sha256

    def has(self, sha256: str) -> bool:
        """Whether the store holds a blob."""
        return self.path(sha256).is_file()

    @contextlib.contextmanager
    def open_staging(self, tenant: str = DEFAULT_TENANT) -> Iterator[Staging]:
        """Make a directory for a push; whatever is left in it at the end is removed."""
        directory = self._root / "staging" / secrets.token_hex(16)
        with full_disk_is_exhausted():
            directory.mkdir(parents=True, mode=0o700)
        try:
            yield Staging(directory=directory, tenant=tenant)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def held(self, tenant: str, entry: FileEntry) -> tuple[Path, int] | None:
        """Where a file of a tenant's push is held already, and how many leading bytes of it."""
        if (self._owners(tenant) / entry.sha256).exists() and self.has(entry.sha256):
            return self.path(entry.sha256), entry.size_bytes
        partial = self._partial(tenant, entry)
        with contextlib.suppress(OSError):
            size_bytes = partial.stat().st_size
            if 0 < size_bytes <= entry.size_bytes:
                return partial, size_bytes
        return None

    def keep_partial(self, staging: Staging) -> None:
        """Keep what has come of a push that broke off, so that the next one need not send it."""
        folder = self._root / "partial"
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True, mode=0o700)
            for path, entry in list(staging.unfinished()):
                path.chmod(0o600)
                path.replace(self._partial(staging.tenant, entry))

    def commit(self, staging: Staging) -> None:
        """Move the staged files, which are whole, checked and synced, among the blobs, durably.

        A blob that is there already counts as new from now on, so that garbage collection leaves it
        until its version is published.
        """
        with self._lock(fcntl.LOCK_SH), full_disk_is_exhausted():
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
            owners = self._owners(staging.tenant)
            owners.mkdir(parents=True, exist_ok=True)
            for entry in staging.entries:
                (owners / entry.sha256).touch()

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
        for partial in self._root.glob("partial/*"):
            with contextlib.suppress(FileNotFoundError):
                if partial.stat().st_mtime < old_before_s:
                    partial.unlink()
        for owner in self._root.glob("owners/*/*"):
            if not self.has(owner.name):
                owner.unlink(missing_ok=True)
        return removed_bytes

    def _remove_if_old(self, blob: Path, old_before_s: float) -> int:
        # The lock keeps a push from renewing the blob between the question and the removal.
        with self._lock(fcntl.LOCK_EX), contextlib.suppress(FileNotFoundError):
            status = blob.stat()
            if status.st_mtime < old_before_s:
                blob.unlink()
                return status.st_size
        return 0

    def _owners(self, tenant: str) -> Path:
        return self._root / "owners" / _short(tenant)

    def _partial(self, tenant: str, entry: FileEntry) -> Path:
        return self._root / "partial" / f"{_short(tenant)}-{entry.sha256}"

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
            with full_disk_is_exhausted():
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


def _short(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()[:16]


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
