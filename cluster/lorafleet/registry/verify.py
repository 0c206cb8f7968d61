"""Reading a registered version's files again: are they whole, and do they still fit."""

from __future__ import annotations

import asyncio
import hashlib

from lorafleet.core.errors import LorafleetError
from lorafleet.core.manifest import VersionManifest
from lorafleet.registry.blobs import BlobStore
from lorafleet.registry.pushing import Loader


async def check_version_files(
    manifest: VersionManifest, blobs: BlobStore, load: Loader
) -> list[str]:
    """What is wrong with a version's files, each problem naming one; empty when all is well."""
    return await asyncio.to_thread(_check, manifest, blobs, load)


def _check(manifest: VersionManifest, blobs: BlobStore, load: Loader) -> list[str]:
    problems = []
    for entry in manifest.files:
        path = blobs.path(entry.sha256)
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            problems.append(f"{entry.name}: cannot be read: {error.strerror}")
            continue
        if digest != entry.sha256:
            problems.append(f"{entry.name}: expected sha256 {entry.sha256}, got {digest}")
    if problems:
        return problems
    try:
        # Links of its own: those for serving may be made meanwhile.
        with blobs.open_staging() as staging:
            for entry in manifest.files:
                (staging.directory / entry.name).hardlink_to(blobs.path(entry.sha256))
            found = load(staging.directory).manifest(manifest.adapter, 0.0)
    except LorafleetError as error:
        return [error.message]
    if found.id != manifest.id:
        return [f"the files make {found.id}: they were registered for another base model"]
    return []
