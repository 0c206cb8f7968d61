"""Messages of the registry as our values, both ways.

It owns the mapping of manifests and adapters to protobuf and back, field by field; it decides
nothing. Servicers and clients use it so that the rest sees frozen dataclasses.
"""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from lorafleet.core.errors import InvalidInput
from lorafleet.core.manifest import FileEntry, VersionManifest
from lorafleet.core.record import AdapterRecord, HistoryEntry, Share, Target
from lorafleet.core.tenant import ApiKey, Quota, Scope, Tenant
from lorafleet.v1 import registry_pb2, tenants_pb2


def file_to_proto(entry: FileEntry) -> registry_pb2.FileEntry:
    """Encode one file entry."""
    return registry_pb2.FileEntry(name=entry.name, size_bytes=entry.size_bytes, sha256=entry.sha256)


def file_from_proto(message: registry_pb2.FileEntry) -> FileEntry:
    """Decode one file entry, unchecked."""
    return FileEntry(name=message.name, size_bytes=message.size_bytes, sha256=message.sha256)


def version_to_proto(manifest: VersionManifest) -> registry_pb2.Version:
    """Encode a version's manifest."""
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
        created_at=time_to_proto(manifest.created_at_s),
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
        created_at_s=time_from_proto(message.created_at),
    )


def target_to_proto(target: Target) -> registry_pb2.Target:
    """Encode what an alias means."""
    return registry_pb2.Target(
        shares=[
            registry_pb2.Share(version=share.version, weight=share.weight)
            for share in target.shares
        ]
    )


def target_from_proto(message: registry_pb2.Target) -> Target:
    """Decode what an alias means, unchecked."""
    return Target(
        tuple(Share(version=share.version, weight=share.weight) for share in message.shares)
    )


def adapter_to_proto(record: AdapterRecord) -> registry_pb2.Adapter:
    """Encode an adapter."""
    return registry_pb2.Adapter(
        name=record.name,
        aliases={alias: target_to_proto(target) for alias, target in record.aliases.items()},
        versions=[version_to_proto(manifest) for manifest in record.versions],
        labels=dict(record.labels),
        pins=dict(record.pins),
        revision=record.revision,
    )


def adapter_from_proto(message: registry_pb2.Adapter) -> AdapterRecord:
    """Decode an adapter."""
    return AdapterRecord(
        name=message.name,
        aliases={alias: target_from_proto(target) for alias, target in message.aliases.items()},
        versions=tuple(version_from_proto(version) for version in message.versions),
        labels=dict(message.labels),
        pins=dict(message.pins),
        revision=message.revision,
    )


def history_to_proto(entry: HistoryEntry) -> registry_pb2.HistoryEntry:
    """Encode one change."""
    return registry_pb2.HistoryEntry(
        revision=entry.revision,
        action=entry.action,
        alias=entry.alias,
        before=target_to_proto(entry.before) if entry.before else None,
        after=target_to_proto(entry.after) if entry.after else None,
        at=time_to_proto(entry.at_s),
        actor=entry.actor,
    )


def history_from_proto(message: registry_pb2.HistoryEntry) -> HistoryEntry:
    """Decode one change."""
    return HistoryEntry(
        revision=message.revision,
        action=message.action,
        alias=message.alias,
        before=target_from_proto(message.before) if message.HasField("before") else None,
        after=target_from_proto(message.after) if message.HasField("after") else None,
        at_s=time_from_proto(message.at),
        actor=message.actor,
    )


def quota_to_proto(quota: Quota) -> tenants_pb2.Quota:
    """Encode a quota."""
    return tenants_pb2.Quota(
        adapters=quota.adapters,
        bytes=quota.bytes,
        requests_per_minute=quota.requests_per_minute,
        tokens_per_minute=quota.tokens_per_minute,
    )


def quota_from_proto(message: tenants_pb2.Quota) -> Quota:
    """Decode a quota."""
    return Quota(
        adapters=message.adapters,
        bytes=message.bytes,
        requests_per_minute=message.requests_per_minute,
        tokens_per_minute=message.tokens_per_minute,
    )


def tenant_to_proto(tenant: Tenant) -> tenants_pb2.Tenant:
    """Encode a tenant."""
    return tenants_pb2.Tenant(
        name=tenant.name,
        quota=quota_to_proto(tenant.quota),
        created_at=time_to_proto(tenant.created_at_s),
        used_adapters=tenant.used_adapters,
        used_bytes=tenant.used_bytes,
    )


def tenant_from_proto(message: tenants_pb2.Tenant) -> Tenant:
    """Decode a tenant."""
    return Tenant(
        name=message.name,
        quota=quota_from_proto(message.quota),
        created_at_s=time_from_proto(message.created_at),
        used_adapters=message.used_adapters,
        used_bytes=message.used_bytes,
    )


def key_to_proto(key: ApiKey) -> tenants_pb2.ApiKey:
    """Encode a key: the hash of its secret stays behind."""
    return tenants_pb2.ApiKey(
        id=key.id,
        tenant=key.tenant,
        scope=_SCOPES[key.scope],
        note=key.note,
        created_at=time_to_proto(key.created_at_s),
        expires_at=None if key.expires_at_s is None else time_to_proto(key.expires_at_s),
    )


def key_from_proto(message: tenants_pb2.ApiKey) -> ApiKey:
    """Decode a key, without its secret's hash."""
    return ApiKey(
        id=message.id,
        tenant=message.tenant,
        scope=scope_from_proto(message.scope),
        secret_sha256="",
        note=message.note,
        created_at_s=time_from_proto(message.created_at),
        expires_at_s=time_from_proto(message.expires_at)
        if message.HasField("expires_at")
        else None,
    )


def scope_to_proto(scope: Scope) -> tenants_pb2.Scope:
    """Encode a scope."""
    return _SCOPES[scope]


def scope_from_proto(value: int) -> Scope:
    """Decode a scope.

    Raises
    ------
    InvalidInput
        It is unspecified or unknown.
    """
    for scope, known in _SCOPES.items():
        if known == value:
            return scope
    raise InvalidInput(f"scope: expected data, admin or operator, got {value}", field="scope")


def time_to_proto(seconds: float) -> Timestamp:
    """Encode Unix seconds."""
    stamp = Timestamp()
    stamp.FromNanoseconds(round(seconds * 1e9))
    return stamp


def time_from_proto(stamp: Timestamp) -> float:
    """Decode Unix seconds."""
    return stamp.ToNanoseconds() / 1e9


_SCOPES = {
    Scope.DATA: tenants_pb2.SCOPE_DATA,
    Scope.ADMIN: tenants_pb2.SCOPE_ADMIN,
    Scope.OPERATOR: tenants_pb2.SCOPE_OPERATOR,
}
