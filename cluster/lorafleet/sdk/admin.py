"""Operations of the admin plane, as values that either client runs.

    from lorafleet.sdk import Client, admin

    with Client() as client:
        client.run(admin.split_alias("pirate", "prod", {old: 90, new: 10}))
        client.run(admin.rollback("pirate", "prod"))

Each says what it returns and what can go wrong. All raise Unavailable when the registry cannot
be reached, Unauthenticated without a valid key, and those that change an adapter Conflict when it
has not the revision that `condition` names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lorafleet.core.record import AdapterRecord, HistoryEntry
from lorafleet.core.tenant import ApiKey, Quota, Scope, Tenant
from lorafleet.v1 import registry_pb2 as pb
from lorafleet.v1 import tenants_pb2
from lorafleet.wire.messages import (
    adapter_from_proto,
    history_from_proto,
    key_from_proto,
    quota_to_proto,
    scope_to_proto,
    tenant_from_proto,
    time_from_proto,
    time_to_proto,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Generic[T]):
    """One call: the method's name, its request, and what its reply means."""

    method: str
    request: Any
    decode: Callable[[Any], T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What a change depends on; see `Condition` in registry.proto."""

    if_revision: int = 0
    idempotency_key: str = ""

    def to_proto(self) -> pb.Condition:
        """Encode it."""
        return pb.Condition(if_revision=self.if_revision, idempotency_key=self.idempotency_key)


ANY = Condition()


def get_adapter(name: str) -> Operation[AdapterRecord]:
    """One adapter; NotFound names it."""
    return _adapter("GetAdapter", pb.GetAdapterRequest(name=name))


def history(name: str, limit: int = 100) -> Operation[list[HistoryEntry]]:
    """What was done to an adapter, newest first."""
    return Operation(
        method="GetHistory",
        request=pb.GetHistoryRequest(name=name, limit=limit),
        decode=lambda reply: [history_from_proto(entry) for entry in reply.entries],
    )


def set_alias(
    name: str, alias: str, version: str, condition: Condition = ANY
) -> Operation[AdapterRecord]:
    """Point an alias at a version of the same adapter."""
    request = pb.SetAliasRequest(
        name=name, alias=alias, version=version, condition=condition.to_proto()
    )
    return _adapter("SetAlias", request)


def split_alias(
    name: str, alias: str, weights: Mapping[str, int], condition: Condition = ANY
) -> Operation[AdapterRecord]:
    """Make an alias mean several versions, each with a weight."""
    shares = [pb.Share(version=version, weight=weight) for version, weight in weights.items()]
    request = pb.SplitAliasRequest(
        name=name, alias=alias, shares=shares, condition=condition.to_proto()
    )
    return _adapter("SplitAlias", request)


def remove_alias(name: str, alias: str, condition: Condition = ANY) -> Operation[AdapterRecord]:
    """Remove an alias."""
    request = pb.RemoveAliasRequest(name=name, alias=alias, condition=condition.to_proto())
    return _adapter("RemoveAlias", request)


def rollback(name: str, alias: str, condition: Condition = ANY) -> Operation[AdapterRecord]:
    """Point an alias at what it meant before its newest change; a second one goes further back."""
    request = pb.RollbackRequest(name=name, alias=alias, condition=condition.to_proto())
    return _adapter("Rollback", request)


def set_labels(
    name: str, labels: Mapping[str, str], condition: Condition = ANY
) -> Operation[AdapterRecord]:
    """Replace an adapter's labels."""
    request = pb.SetLabelsRequest(name=name, labels=labels, condition=condition.to_proto())
    return _adapter("SetLabels", request)


def pin(
    name: str, version: str, replicas: int, condition: Condition = ANY
) -> Operation[AdapterRecord]:
    """Keep a version, given by id or alias, resident on so many replicas; 0 ends it."""
    request = pb.PinRequest(
        name=name, version=version, replicas=replicas, condition=condition.to_proto()
    )
    return _adapter("Pin", request)


def prefetch(name: str, version: str, replicas: int = 1) -> Operation[None]:
    """Ask so many replicas to load a version, given by id or alias; a hint."""
    request = pb.PrefetchRequest(name=name, version=version, replicas=replicas)
    return Operation(method="Prefetch", request=request, decode=_nothing)


def verify(name: str, version: str = "") -> Operation[dict[str, list[str]]]:
    """What is wrong with each version's files; empty lists when all is well."""
    return Operation(
        method="Verify",
        request=pb.VerifyRequest(name=name, version=version),
        decode=lambda reply: {check.version: list(check.problems) for check in reply.checks},
    )


def delete_adapter(name: str, condition: Condition = ANY) -> Operation[float]:
    """Remove an adapter; returns until when it can be restored, in Unix seconds."""
    return Operation(
        method="DeleteAdapter",
        request=pb.DeleteAdapterRequest(name=name, condition=condition.to_proto()),
        decode=lambda reply: time_from_proto(reply.restorable_until),
    )


def restore_adapter(name: str, condition: Condition = ANY) -> Operation[AdapterRecord]:
    """Bring a deleted adapter back."""
    request = pb.RestoreAdapterRequest(name=name, condition=condition.to_proto())
    return _adapter("RestoreAdapter", request)


def create_tenant(name: str, quota: Quota | None = None) -> Operation[Tenant]:
    """Make a tenant; for operators."""
    quota = quota or Quota()
    request = tenants_pb2.CreateTenantRequest(name=name, quota=quota_to_proto(quota))
    return _tenant("CreateTenant", request)


def get_tenant(name: str) -> Operation[Tenant]:
    """One tenant with what it uses."""
    return _tenant("GetTenant", tenants_pb2.GetTenantRequest(name=name))


def set_quota(name: str, quota: Quota) -> Operation[Tenant]:
    """Replace a tenant's quota; for operators."""
    request = tenants_pb2.SetQuotaRequest(name=name, quota=quota_to_proto(quota))
    return _tenant("SetQuota", request)


def list_tenants(page_token: str = "") -> Operation[tuple[list[Tenant], str]]:
    """A page of tenants, and the token of the next; for operators."""
    return Operation(
        method="ListTenants",
        request=tenants_pb2.ListTenantsRequest(page_token=page_token),
        decode=lambda reply: (
            [tenant_from_proto(tenant) for tenant in reply.tenants],
            reply.next_page_token,
        ),
    )


def delete_tenant(name: str) -> Operation[None]:
    """Remove a tenant without adapters; for operators."""
    request = tenants_pb2.DeleteTenantRequest(name=name)
    return Operation(method="DeleteTenant", request=request, decode=_nothing)


def create_key(
    tenant: str, scope: Scope, *, note: str = "", days: float | None = None
) -> Operation[tuple[ApiKey, str]]:
    """Make an API key; returns it with its secret, which nobody can show again."""
    request = tenants_pb2.CreateKeyRequest(tenant=tenant, scope=scope_to_proto(scope), note=note)
    if days is not None:
        request.expires_at.CopyFrom(time_to_proto(time.time() + days * 86_400))
    return Operation(
        method="CreateKey",
        request=request,
        decode=lambda reply: (key_from_proto(reply.key), reply.secret),
    )


def list_keys(tenant: str) -> Operation[list[ApiKey]]:
    """A tenant's keys, without their secrets."""
    return Operation(
        method="ListKeys",
        request=tenants_pb2.ListKeysRequest(tenant=tenant),
        decode=lambda reply: [key_from_proto(key) for key in reply.keys],
    )


def revoke_key(tenant: str, key_id: str) -> Operation[None]:
    """End a key, everywhere within a second."""
    request = tenants_pb2.RevokeKeyRequest(tenant=tenant, id=key_id)
    return Operation(method="RevokeKey", request=request, decode=_nothing)


def _adapter(method: str, request: Any) -> Operation[AdapterRecord]:
    return Operation(
        method=method, request=request, decode=lambda reply: adapter_from_proto(reply.adapter)
    )


def _tenant(method: str, request: Any) -> Operation[Tenant]:
    return Operation(
        method=method, request=request, decode=lambda reply: tenant_from_proto(reply.tenant)
    )


def _nothing(_reply: Any) -> None:
    return None
