"""What is in Redis as the mirror keeps it, and back: whole adapters and tenants, as they are.

It owns reading and writing the hashes without looking into them. It decides nothing; see `rebuild`.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from lorafleet.core.errors import Unavailable
from lorafleet.core.names import DEFAULT_TENANT, tenant_of
from lorafleet.registry import save_scripts as scripts
from lorafleet.registry.layout import (
    API_KEYS,
    CHANGES,
    DELETED_NAMES,
    DELETED_UNTIL,
    NAMES,
    STATE,
    TENANT_NAMES,
    key,
)
from lorafleet.registry.link import RedisLink
from lorafleet.registry.mirror import Mirrored, SavedAdapter, SavedTenant

_PAGE = 500
_MAX_CHANGES = 10_000
_FEW = 500
"""Fields that go into a script at once: Lua unpacks no more than some thousands."""


class Saver:
    """Reads and writes over one link; every method raises Unavailable while Redis is away."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def state(self) -> tuple[Mirrored, bool]:
        """Which data Redis has, and whether it is being rebuilt."""

        async def read(redis: Any) -> list[bytes | None]:
            fields = ["incarnation", "generation", "rebuilding"]
            values: list[bytes | None] = await redis.hmget(STATE, fields)
            return values

        incarnation, generation, rebuilding = (await self._link.call(read)).value
        found = Mirrored(
            incarnation=incarnation.decode() if incarnation else None,
            generation=int(generation or 0),
        )
        return found, rebuilding is not None

    async def adapter(self, name: str) -> SavedAdapter | None:
        """An adapter, or its tombstone; None when there is neither."""

        async def read(redis: Any) -> list[Any]:
            pipeline = redis.pipeline(transaction=True)
            for kind in ("", "deleted_"):
                pipeline.hgetall(key("deleted" if kind else "adapter", name))
                pipeline.lrange(key(f"{kind}history", name), 0, -1)
            pipeline.zscore(DELETED_UNTIL, name)
            values: list[Any] = await pipeline.execute()
            return values

        fields, history, deleted, deleted_history, until_ms = (await self._link.call(read)).value
        if not fields and not deleted:
            return None
        return SavedAdapter(
            name=name,
            fields=_text(fields or deleted),
            history=[entry.decode() for entry in (history if fields else deleted_history)],
            deleted_until_s=None if fields else float(until_ms or 0) / 1000,
        )

    async def tenant(self, name: str) -> SavedTenant | None:
        """A tenant and its keys; None when there is none."""

        async def read(redis: Any) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
            fields = await redis.hgetall(key("tenant", name))
            ids = sorted(await redis.smembers(key("tenant_keys", name)))
            texts = await redis.hmget(API_KEYS, ids) if ids else []
            return fields, {
                id: text for id, text in zip(ids, texts, strict=True) if text is not None
            }

        fields, keys = (await self._link.call(read)).value
        if not fields and not keys:
            return None
        return SavedTenant(name=name, fields=_text(fields), keys=_text(keys))

    async def names(self) -> AsyncIterator[str]:
        """Names of all adapters, and of those that can be restored."""
        for index in (NAMES, DELETED_NAMES):
            async for name in self._members(index):
                yield name

    async def tenant_names(self) -> AsyncIterator[str]:
        """Names of all tenants."""
        yield DEFAULT_TENANT
        async for name in self._members(TENANT_NAMES):
            yield name

    async def begin(self, generation: int) -> str:
        """Say that a rebuild has begun, with changes counted from there; the new incarnation."""
        arguments: list[str | int] = [secrets.token_hex(8), generation]
        reply = await self._link.run(scripts.BEGIN, [STATE, CHANGES], arguments)
        incarnation: str = reply.value.decode()
        return incarnation

    async def finish(self) -> None:
        """Say that it has ended."""
        await self._link.call(lambda redis: redis.hdel(STATE, "rebuilding"))  # type: ignore[arg-type,return-value]

    async def put_back(self, saved: SavedAdapter) -> bool:
        """Write an adapter unless Redis has a newer one; whether it was written."""
        name, until_s = saved.name, saved.deleted_until_s
        if until_s is not None and until_s < time.time():
            return False
        keys = [
            *(STATE, CHANGES, key("adapter", name), key("history", name)),
            *(key("deleted", name), key("deleted_history", name)),
            *(NAMES, DELETED_NAMES, DELETED_UNTIL, key("tenant", tenant_of(name))),
        ]
        head: list[str | int] = [
            *(name, secrets.token_hex(8), _MAX_CHANGES, saved.revision),
            "" if until_s is None else round(until_s * 1000),
            json.dumps(list(saved.history)),
            json.dumps(dict(saved.fields)),
        ]
        reply = await self._link.run(scripts.PUT_BACK, keys, head)
        return bool(reply.value == b"done")

    async def put_back_tenant(self, saved: SavedTenant) -> None:
        """Write a tenant and its keys, unless it is there; what it uses is counted anew."""
        keys = [
            *(STATE, CHANGES, key("tenant", saved.name), TENANT_NAMES),
            *(API_KEYS, key("tenant_keys", saved.name)),
        ]
        head: list[str | int] = [
            *(saved.name, secrets.token_hex(8), _MAX_CHANGES),
            int(saved.name == DEFAULT_TENANT),
            json.dumps(dict(saved.fields)),
            json.dumps(dict(saved.keys)),
        ]
        await self._link.run(scripts.PUT_BACK_TENANT, keys, head)

    async def _members(self, index: str) -> AsyncIterator[str]:
        low = "-"
        while True:

            async def read(redis: Any, low: str = low) -> list[bytes]:
                found: list[bytes] = await redis.zrangebylex(index, low, "+", start=0, num=_PAGE)
                return found

            names = [name.decode() for name in (await self._link.call(read)).value]
            if not names:
                return
            for name in names:
                yield name
            low = f"({names[-1]}"


def lost() -> Unavailable:
    """The error of a change while Redis has not the data that is meant."""
    return Unavailable("the registry's Redis lost data and is being rebuilt; try again")


def _text(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}
