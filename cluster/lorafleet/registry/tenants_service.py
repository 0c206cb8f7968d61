"""The servicer of tenants and API keys."""

from __future__ import annotations

import re
import time
from typing import Any

from lorafleet.core.errors import Forbidden, InvalidInput, NotFound
from lorafleet.core.log import get_logger
from lorafleet.core.names import DEFAULT_TENANT, check_part
from lorafleet.core.tenant import ApiKey, Scope, new_secret, secret_sha256
from lorafleet.registry.auth import check_owner
from lorafleet.registry.store import RegistryStore
from lorafleet.v1 import tenants_pb2, tenants_pb2_grpc
from lorafleet.wire.auth import caller
from lorafleet.wire.messages import (
    key_to_proto,
    quota_from_proto,
    scope_from_proto,
    tenant_to_proto,
    time_from_proto,
)

_DEFAULT_PAGE = 100
_MAX_PAGE = 1000
_MAX_NOTE = 256
_KEY_ID = re.compile(r"[0-9a-f]{1,64}")

_log = get_logger(__name__)


class TenantsService(tenants_pb2_grpc.TenantsServicer):
    """Serves `lorafleet.v1.Tenants`; scopes by method are checked before."""

    def __init__(self, store: RegistryStore) -> None:
        self._tenancy = store.tenancy

    async def CreateTenant(
        self, request: tenants_pb2.CreateTenantRequest, context: Any
    ) -> tenants_pb2.CreateTenantResponse:
        """Make a tenant."""
        name = check_part(request.name, "name")
        tenant = await self._tenancy.create(name, quota_from_proto(request.quota))
        _log.info("tenant created", tenant=name)
        return tenants_pb2.CreateTenantResponse(tenant=tenant_to_proto(tenant))

    async def GetTenant(
        self, request: tenants_pb2.GetTenantRequest, context: Any
    ) -> tenants_pb2.GetTenantResponse:
        """Return a tenant."""
        tenant = await self._tenancy.get(_own(request.name))
        return tenants_pb2.GetTenantResponse(tenant=tenant_to_proto(tenant))

    async def ListTenants(
        self, request: tenants_pb2.ListTenantsRequest, context: Any
    ) -> tenants_pb2.ListTenantsResponse:
        """Return a page of tenants."""
        if request.page_size > _MAX_PAGE:
            raise InvalidInput(
                f"page_size: expected at most {_MAX_PAGE}, got {request.page_size}",
                field="page_size",
            )
        limit = request.page_size or _DEFAULT_PAGE
        after = check_part(request.page_token, "page_token") if request.page_token else None
        tenants = await self._tenancy.page(after=after, limit=limit)
        more = len(tenants) == limit and await self._tenancy.page(after=tenants[-1].name, limit=1)
        return tenants_pb2.ListTenantsResponse(
            tenants=[tenant_to_proto(tenant) for tenant in tenants],
            next_page_token=tenants[-1].name if more else "",
        )

    async def SetQuota(
        self, request: tenants_pb2.SetQuotaRequest, context: Any
    ) -> tenants_pb2.SetQuotaResponse:
        """Replace a quota."""
        name = check_part(request.name, "name")
        tenant = await self._tenancy.set_quota(name, quota_from_proto(request.quota))
        _log.info("quota set", tenant=name)
        return tenants_pb2.SetQuotaResponse(tenant=tenant_to_proto(tenant))

    async def DeleteTenant(
        self, request: tenants_pb2.DeleteTenantRequest, context: Any
    ) -> tenants_pb2.DeleteTenantResponse:
        """Remove a tenant."""
        name = check_part(request.name, "name")
        await self._tenancy.delete(name)
        _log.info("tenant deleted", tenant=name)
        return tenants_pb2.DeleteTenantResponse()

    async def CreateKey(
        self, request: tenants_pb2.CreateKeyRequest, context: Any
    ) -> tenants_pb2.CreateKeyResponse:
        """Make a key; its secret is in the response alone."""
        tenant = _own(request.tenant)
        scope = scope_from_proto(request.scope)
        if not caller().allows(scope):
            raise Forbidden(
                f"a key with scope {caller().scope.value} cannot make one with scope {scope.value}",
                scope=scope.value,
            )
        if scope is Scope.OPERATOR and tenant != DEFAULT_TENANT:
            raise InvalidInput(
                f"tenant: operator keys are of tenant {DEFAULT_TENANT!r}", field="tenant"
            )
        if len(request.note) > _MAX_NOTE:
            raise InvalidInput(f"note: expected at most {_MAX_NOTE} characters", field="note")
        now_s = time.time()
        expires = time_from_proto(request.expires_at) if request.HasField("expires_at") else None
        if expires is not None and expires <= now_s:
            raise InvalidInput("expires_at: expected a time to come", field="expires_at")
        key_id, secret = new_secret()
        key = ApiKey(
            id=key_id,
            tenant=tenant,
            scope=scope,
            secret_sha256=secret_sha256(secret),
            note=request.note,
            created_at_s=now_s,
            expires_at_s=expires,
        )
        await self._tenancy.create_key(key)
        _log.info("key created", tenant=tenant, key=key_id, scope=scope.value)
        return tenants_pb2.CreateKeyResponse(key=key_to_proto(key), secret=secret)

    async def ListKeys(
        self, request: tenants_pb2.ListKeysRequest, context: Any
    ) -> tenants_pb2.ListKeysResponse:
        """Return a tenant's keys."""
        keys = await self._tenancy.keys_of(_own(request.tenant))
        return tenants_pb2.ListKeysResponse(keys=[key_to_proto(key) for key in keys])

    async def RevokeKey(
        self, request: tenants_pb2.RevokeKeyRequest, context: Any
    ) -> tenants_pb2.RevokeKeyResponse:
        """End a key."""
        tenant = _own(request.tenant)
        if not _KEY_ID.fullmatch(request.id):
            raise InvalidInput(f"id: {request.id[:64]!r} is no key's id", field="id")
        await self._tenancy.revoke_key(tenant, request.id)
        _log.info("key revoked", tenant=tenant, key=request.id)
        return tenants_pb2.RevokeKeyResponse()


def _own(name: str) -> str:
    """A tenant that is the caller's; others do not exist for it."""
    tenant = check_part(name or caller().tenant, "tenant")
    if not caller().sees(tenant):
        raise NotFound(f"there is no tenant {tenant!r}", tenant=tenant)
    check_owner(tenant)
    return tenant
