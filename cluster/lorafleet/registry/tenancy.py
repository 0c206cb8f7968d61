"""Tenants and their API keys in Redis. It decides nothing about what a key allows (`core.tenant`).

The tenant `default` is always there, with or without a quota.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, cast

from lorafleet.core.errors import AlreadyExists, Conflict, NotFound
from lorafleet.core.names import DEFAULT_TENANT
from lorafleet.core.tenant import ApiKey, Quota, Scope, Tenant
from lorafleet.registry import tenant_scripts as scripts
from lorafleet.registry.layout import API_KEYS, CHANGES, STATE, TENANT_NAMES, key
from lorafleet.registry.link import RedisLink
from lorafleet.registry.rebuild import Rebuilder
from lorafleet.registry.saving import lost


class Tenancy:
    """Tenants and keys; every method raises Unavailable while Redis is away."""

    def __init__(
        self, link: RedisLink, max_changes: int, rebuilder: Rebuilder | None = None
    ) -> None:
        self._link = link
        self._max_changes = max_changes
        self._rebuilder = rebuilder

    async def create(self, name: str, quota: Quota) -> Tenant:
        """Make a tenant; AlreadyExists when there is one of that name."""
        taken = name == DEFAULT_TENANT
        if not taken:
            outcome, retried = await self._run(scripts.CREATE, name, *_fields(quota))
            taken = outcome == "taken" and not retried
        if taken:
            raise AlreadyExists(f"tenant {name!r} exists already", tenant=name)
        return await self.get(name)

    async def get(self, name: str) -> Tenant:
        """One tenant with what it uses; NotFound when there is none."""
        tenant = (await self._get_many([name]))[0]
        if tenant is None:
            raise _no_tenant(name)
        return tenant

    async def page(self, *, after: str | None, limit: int) -> list[Tenant]:
        """Up to `limit` tenants in the order of their names, `default` before all."""
        low = "-" if after in (None, DEFAULT_TENANT) else f"({after}"
        reply = await self._link.call(
            lambda redis: cast(Any, redis.zrangebylex(TENANT_NAMES, low, "+", start=0, num=limit))
        )
        names = [name.decode() for name in reply.value]
        if after is None:
            names = [DEFAULT_TENANT, *names][:limit]
        return [tenant for tenant in await self._get_many(names) if tenant is not None]

    async def set_quota(self, name: str, quota: Quota) -> Tenant:
        """Replace a tenant's quota; what is above it already stays."""
        always = int(name == DEFAULT_TENANT)
        outcome, _ = await self._run(scripts.SET_QUOTA, name, always, *_fields(quota))
        if outcome == "no tenant":
            raise _no_tenant(name)
        return await self.get(name)

    async def delete(self, name: str) -> None:
        """Remove a tenant and its keys; Conflict while it has adapters."""
        if name == DEFAULT_TENANT:
            raise Conflict(f"tenant {name!r} is always there", tenant=name)
        outcome, retried = await self._run(scripts.DELETE, name)
        if outcome == "no tenant" and not retried:
            raise _no_tenant(name)
        if outcome.isdecimal():
            raise Conflict(
                f"tenant {name!r} has {outcome} adapters; delete them first", tenant=name
            )

    async def create_key(self, new: ApiKey) -> None:
        """Register a key; NotFound when there is no such tenant."""
        always = int(new.tenant == DEFAULT_TENANT)
        text = json.dumps({**asdict(new), "scope": new.scope.value})
        outcome, _ = await self._run(scripts.CREATE_KEY, new.tenant, always, new.id, text)
        if outcome == "no tenant":
            raise _no_tenant(new.tenant)

    async def revoke_key(self, tenant: str, key_id: str) -> None:
        """End a key; nothing happens when it has ended already."""
        await self._run(scripts.REVOKE_KEY, tenant, key_id)

    async def keys_of(self, tenant: str) -> list[ApiKey]:
        """A tenant's keys, the oldest first; NotFound when there is no such tenant."""
        await self.get(tenant)
        reply = await self._link.call(
            lambda redis: cast(Any, redis.smembers(key("tenant_keys", tenant)))
        )
        found = await self.keys_by_id(sorted(member.decode() for member in reply.value))
        return sorted(
            (each for each in found if each is not None),
            key=lambda each: (each.created_at_s, each.id),
        )

    async def keys_by_id(self, ids: Iterable[str]) -> list[ApiKey | None]:
        """Keys in the order of their ids given; None for those that are not there."""
        wanted = list(ids)
        if not wanted:
            return []
        reply = await self._link.call(lambda redis: cast(Any, redis.hmget(API_KEYS, wanted)))
        return [_key(text) if text else None for text in reply.value]

    async def all_keys(self) -> list[ApiKey]:
        """Every key."""
        reply = await self._link.call(lambda redis: cast(Any, redis.hvals(API_KEYS)))
        return [_key(text) for text in reply.value]

    async def quotas(self, names: Iterable[str] | None = None) -> dict[str, Quota]:
        """Quotas by tenant: of these tenants, or of all; absent where a tenant is."""
        if names is not None:
            found = [tenant for tenant in await self._get_many(list(names)) if tenant is not None]
            return {tenant.name: tenant.quota for tenant in found}
        quotas: dict[str, Quota] = {}
        after: str | None = None
        while page := await self.page(after=after, limit=200):
            quotas |= {tenant.name: tenant.quota for tenant in page}
            after = page[-1].name
        return quotas

    async def _get_many(self, names: list[str]) -> list[Tenant | None]:
        async def read(redis: Any) -> list[dict[bytes, bytes]]:
            pipeline = redis.pipeline(transaction=False)
            for name in names:
                pipeline.hgetall(key("tenant", name))
            return cast(list[dict[bytes, bytes]], await pipeline.execute())

        hashes = (await self._link.call(read)).value if names else []
        return [_tenant(name, data) for name, data in zip(names, hashes, strict=True)]

    async def _run(self, script: str, tenant: str, *arguments: str | int) -> tuple[str, bool]:
        keys = [
            *(STATE, CHANGES, key("tenant", tenant), TENANT_NAMES),
            *(API_KEYS, key("tenant_keys", tenant)),
        ]
        seen = self._rebuilder.expected if self._rebuilder is not None else ""
        head: list[str | int] = [tenant, seen or secrets.token_hex(8), self._max_changes]
        reply = await self._link.run(script, keys, [*head, *arguments])
        outcome = reply.value.decode()
        if outcome == "lost":
            raise lost()
        if self._rebuilder is not None:
            await self._rebuilder.tenant_changed(tenant)
        return outcome, reply.retried


def _fields(quota: Quota) -> list[str | int]:
    return [part for name, value in asdict(quota).items() for part in (f"quota_{name}", value)]


def _tenant(name: str, data: dict[bytes, bytes]) -> Tenant | None:
    if b"created_ms" not in data and name != DEFAULT_TENANT:
        return None

    def number(field: str) -> int:
        return int(data.get(field.encode(), 0))

    return Tenant(
        name=name,
        quota=Quota(
            adapters=number("quota_adapters"),
            bytes=number("quota_bytes"),
            requests_per_minute=number("quota_requests_per_minute"),
            tokens_per_minute=number("quota_tokens_per_minute"),
        ),
        created_at_s=number("created_ms") / 1000,
        used_adapters=number("used_adapters"),
        used_bytes=number("used_bytes"),
    )


def _key(text: bytes) -> ApiKey:
    data = json.loads(text)
    return ApiKey(**{**data, "scope": Scope(data["scope"])})


def _no_tenant(name: str) -> NotFound:
    return NotFound(f"there is no tenant {name!r}", tenant=name)
