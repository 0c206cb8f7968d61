"""Removing files that no registered version refers to.

It owns the order of the two questions (what is referred to, then what is old) and nothing else.
Crashed pushes, deleted adapters and replaced versions leave such files; they do no harm but take
space. Run it with the registry that the blob store belongs to: to another one all is garbage.
"""

from __future__ import annotations

import asyncio

from lorafleet.registry.blobs import BlobStore
from lorafleet.registry.store import RegistryStore

DEFAULT_GRACE_S = 3600.0
"""Longer than any push takes from its last byte to its publication."""


async def collect_garbage(
    store: RegistryStore, blobs: BlobStore, *, grace_s: float = DEFAULT_GRACE_S
) -> int:
    """Remove unreferenced files older than a grace and return how many bytes of blobs that freed.

    Raises
    ------
    Unavailable
        Redis is away; nothing was removed.
    """
    digests: set[str] = set()
    versions: set[str] = set()
    async for record in store.adapters():
        for manifest in record.versions:
            versions.add(manifest.id)
            digests.update(entry.sha256 for entry in manifest.files)
    return await asyncio.to_thread(blobs.sweep, digests, versions, grace_s)
