"""Removing what nothing refers to any more: tombstones whose grace ended, and unreferenced files.

It owns the order of the questions (what is referred to, then what is old) and when they are asked.
Crashed pushes, deleted adapters and replaced versions leave such files; they do no harm but take
space. Run it with the registry that the blob store belongs to: to another one all is garbage.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from lorafleet.core.errors import LorafleetError, Unavailable
from lorafleet.core.log import get_logger
from lorafleet.registry.blobs import BlobStore
from lorafleet.registry.store import RegistryStore

DEFAULT_GRACE_S = 3600.0
"""Longer than any push takes from its last byte to its publication."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection did: deleted adapters forgotten, and bytes of files freed."""

    tombstones: int
    freed_bytes: int


async def collect_garbage(
    store: RegistryStore, blobs: BlobStore, *, grace_s: float = DEFAULT_GRACE_S
) -> Collected:
    """Forget tombstones whose grace has ended, then remove unreferenced files older than a grace.

    Files of adapters that can be restored are referred to.

    Raises
    ------
    Unavailable
        Redis is away, or has lost what it refers to and is not rebuilt yet; no file was removed.
    """
    before = await store.cursor()
    if store.rebuilder is not None:
        await store.rebuilder.check()
    forgotten = [await store.purge(name) for name in await store.expired(time.time())]
    digests: set[str] = set()
    versions: set[str] = set()
    # A delete moves an adapter from the first to the second: in this order it is not missed. A
    # restore moves one back: hence the first once more.
    for deleted in (False, True, False):
        async for record in store.adapters(deleted=deleted):
            for manifest in record.versions:
                versions.add(manifest.id)
                digests.update(entry.sha256 for entry in manifest.files)
    if (await store.cursor()).incarnation != before.incarnation:
        raise Unavailable("the registry's Redis lost data while garbage was looked for")
    freed = await asyncio.to_thread(blobs.sweep, digests, versions, grace_s)
    return Collected(tombstones=sum(forgotten), freed_bytes=freed)


async def collect_forever(
    store: RegistryStore, blobs: BlobStore, *, every_s: float, grace_s: float = DEFAULT_GRACE_S
) -> None:
    """Collect again and again until cancelled; what fails is logged and tried the next time."""
    while True:
        await asyncio.sleep(every_s)
        try:
            done = await collect_garbage(store, blobs, grace_s=grace_s)
        except (LorafleetError, OSError) as error:
            _log.warning("garbage was not collected", error=str(error))
            continue
        if done.tombstones or done.freed_bytes:
            _log.info("garbage collected", tombstones=done.tombstones, freed_bytes=done.freed_bytes)
