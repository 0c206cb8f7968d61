"""Watching adapters: everything first, then each change, resumable at any point."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from lorafleet.core.errors import Unavailable
from lorafleet.core.names import tenant_of
from lorafleet.registry.feed import Cursor
from lorafleet.registry.store import RegistryStore
from lorafleet.v1 import registry_pb2 as pb
from lorafleet.wire.messages import adapter_to_proto

_LIFE_SIGN_S = 1.0
_PAUSE_S = 0.5


async def watch(
    store: RegistryStore, cursor: str, sees: Callable[[str], bool]
) -> AsyncGenerator[pb.WatchResponse, None]:
    """Stream what changes after a cursor; all adapters first if there is none, or it is too old.

    While Redis is away the stream waits. `sees` says which tenants' adapters are told.

    Raises
    ------
    InvalidInput
        The cursor is malformed.
    """
    place = Cursor.parse(cursor) if cursor else None
    while True:
        try:
            if place is None:
                place = await store.cursor()  # before the adapters: later changes come again
                yield pb.WatchResponse(restart=True)
                async for record in store.adapters():
                    if sees(tenant_of(record.name)):
                        yield pb.WatchResponse(changed=adapter_to_proto(record))
                yield pb.WatchResponse(current=True, cursor=place.to_text())
            changes = await store.changes(place, wait_s=_LIFE_SIGN_S)
            if changes.names is None:
                place = None
                continue
            names = sorted(name for name in changes.names if sees(tenant_of(name)))
            for name, changed in zip(names, await store.get_adapters(names), strict=True):
                if changed is None:
                    yield pb.WatchResponse(deleted=name)
                else:
                    yield pb.WatchResponse(changed=adapter_to_proto(changed))
            place = changes.cursor
            # Only now: who resumes from a cursor has had everything before it.
            yield pb.WatchResponse(current=True, cursor=place.to_text())
        except Unavailable:
            await asyncio.sleep(_PAUSE_S)
