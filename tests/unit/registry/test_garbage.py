"""Garbage collection: what no version refers to goes, everything else stays."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable

import pytest

from lorafleet.core.errors import NotFound, Unavailable
from lorafleet.core.manifest import FileEntry, VersionManifest
from lorafleet.registry import BlobStore, LinkOptions, RegistryStore, collect_garbage


def _put(blobs: BlobStore, data: bytes) -> FileEntry:
    """Store an old blob."""
    entry = FileEntry(
        name="adapter_model.safetensors",
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    with blobs.open_staging() as staging:
        with staging.file(entry) as file:
            file.write(data)
            file.finish()
        blobs.commit(staging)
    old_s = time.time() - 1000
    os.utime(blobs.path(entry.sha256), (old_s, old_s))
    return entry


async def test_only_files_of_registered_versions_stay(
    store: RegistryStore, blobs: BlobStore, make_manifest: Callable[..., VersionManifest]
) -> None:
    registered, older, deleted, orphan, restorable = (
        _put(blobs, data)
        for data in (b"registered", b"older", b"deleted", b"orphan", b"restorable")
    )
    await store.publish_version(make_manifest("a", 1, files=(older,)))
    await store.publish_version(make_manifest("a", 2, files=(registered,)))
    await store.publish_version(make_manifest("b", 3, files=(deleted,)))
    await store.publish_version(make_manifest("c", 4, files=(restorable,)))
    await store.delete_adapter("b", grace_s=0)
    await store.delete_adapter("c", grace_s=100)
    await asyncio.sleep(0.01)
    collected = await collect_garbage(store, blobs, grace_s=100)
    assert collected.freed_bytes == len(b"deleted") + len(b"orphan")
    assert collected.tombstones == 1
    assert blobs.has(restorable.sha256)
    await store.restore_adapter("c")
    with pytest.raises(NotFound):
        await store.restore_adapter("b")
    assert [blobs.has(entry.sha256) for entry in (registered, older, deleted, orphan)] == [
        True,
        True,
        False,
        False,
    ]


async def test_nothing_is_removed_while_redis_is_away(blobs: BlobStore) -> None:
    entry = _put(blobs, b"registered")
    away = RegistryStore("redis://127.0.0.1:1/0", options=LinkOptions(deadline_s=0.1))
    with pytest.raises(Unavailable):
        await collect_garbage(away, blobs, grace_s=0)
    assert blobs.has(entry.sha256)
    await away.close()
