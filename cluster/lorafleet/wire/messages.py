"""Messages of the registry as our values, both ways.

It owns the mapping of manifests and adapters to protobuf and back, field by field; it decides
nothing. Servicers and clients use it so that the rest sees frozen dataclasses.
"""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from lorafleet.core.manifest import FileEntry, VersionManifest
from lorafleet.core.record import AdapterRecord
from lorafleet.v1 import registry_pb2


def file_to_proto(entry: FileEntry) -> registry_pb2.FileEntry:
    """Encode one file entry."""
    return registry_pb2.FileEntry(name=entry.name, size_bytes=entry.size_bytes, sha256=entry.sha256)


def file_from_proto(message: registry_pb2.FileEntry) -> FileEntry:
    """Decode one file entry, unchecked."""
    return FileEntry(name=message.name, size_bytes=message.size_bytes, sha256=message.sha256)


def version_to_proto(manifest: VersionManifest) -> registry_pb2.Version:
    """Encode a version's manifest."""
    created_at = Timestamp()
    created_at.FromNanoseconds(round(manifest.created_at_s * 1e9))
    return registry_pb2.Version(
        id=manifest.id,
        adapter=manifest.adapter,
        base_digest=manifest.base_digest,
        max_rank=manifest.max_rank,
        num_modules=manifest.num_modules,
        target_modules=manifest.target_modules,
        weights_bytes=manifest.weights_bytes,
        dtype=manifest.dtype,
        files=[file_to_proto(entry) for entry in manifest.files],
        created_at=created_at,
    )


def version_from_proto(message: registry_pb2.Version) -> VersionManifest:
    """Decode a version's manifest."""
    return VersionManifest(
        id=message.id,
        adapter=message.adapter,
        base_digest=message.base_digest,
        max_rank=message.max_rank,
        num_modules=message.num_modules,
        target_modules=tuple(message.target_modules),
        weights_bytes=message.weights_bytes,
        dtype=message.dtype,
        files=tuple(file_from_proto(entry) for entry in message.files),
        created_at_s=message.created_at.ToNanoseconds() / 1e9,
    )


def adapter_to_proto(record: AdapterRecord) -> registry_pb2.Adapter:
    """Encode an adapter."""
    return registry_pb2.Adapter(
        name=record.name,
        aliases=dict(record.aliases),
        versions=[version_to_proto(manifest) for manifest in record.versions],
    )


def adapter_from_proto(message: registry_pb2.Adapter) -> AdapterRecord:
    """Decode an adapter."""
    return AdapterRecord(
        name=message.name,
        aliases=dict(message.aliases),
        versions=tuple(version_from_proto(version) for version in message.versions),
    )
