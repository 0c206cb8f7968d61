"""Keeping the mirror true, and rebuilding a Redis that lost its data from it.

It owns the decision which of the two is right. Redis is, as long as it has the data that is
mirrored, or other data; an empty Redis is not, nor one that has gone back in time, as after a
failover to a server that had not yet heard of everything. While it decides otherwise, changes are
refused: they say which data they mean, and Redis compares.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from weakref import WeakValueDictionary

from lorafleet.core.errors import LorafleetError
from lorafleet.core.log import get_logger
from lorafleet.core.names import tenant_of
from lorafleet.registry.link import RedisLink
from lorafleet.registry.mirror import Mirror, Mirrored, SavedAdapter, SavedTenant
from lorafleet.registry.saving import Saver, lost

_log = get_logger(__name__)


class Rebuilder:
    """Keeps one Redis and one mirror together.

    Parameters
    ----------
    link : RedisLink
        To the registry's Redis.
    mirror : Mirror
        Its files.
    """

    def __init__(self, link: RedisLink, mirror: Mirror) -> None:
        self._saver = Saver(link)
        self._mirror = mirror
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reconciling = asyncio.Lock()
        self._tenants: set[str] = set()

    @property
    def expected(self) -> str:
        """The data that changes are made to, as the scripts take it; empty while there is none."""
        state = self._mirror.state
        return f"={state.incarnation} {state.generation}" if state.incarnation else ""

    async def changed(self, name: str) -> None:
        """Mirror an adapter after a change of it, and its tenant, which it may have made."""
        tenant = tenant_of(name)
        if tenant not in self._tenants:
            await self.tenant_changed(tenant)
            self._tenants.add(tenant)
        saved = await self._mirror_adapter(name)
        if self._mirror.state.incarnation is None:
            await self.reconcile()
        elif saved is not None and saved.revision > self._mirror.state.generation:
            self._mirror.note(replace(self._mirror.state, generation=saved.revision))

    async def tenant_changed(self, name: str) -> None:
        """Mirror a tenant after a change of it."""
        async with self._lock(f"tenant {name}"):
            await self._keep(SavedTenant, name, await self._saver.tenant(name))

    async def check(self) -> None:
        """Raise Unavailable while Redis has not the data that is mirrored."""
        found, rebuilding = await self._saver.state()
        known = self._mirror.state.incarnation
        if rebuilding or (known is not None and found.incarnation != known):
            raise lost()

    async def reconcile(self) -> None:
        """Compare Redis with the mirror, and mend whichever is behind.

        Raises
        ------
        Unavailable
            Redis is away; try again.
        """
        async with self._reconciling:
            await self._reconcile()

    async def _reconcile(self) -> None:
        found, rebuilding = await self._saver.state()
        known = self._mirror.state
        if found.incarnation is None or rebuilding:
            if known.incarnation is not None:
                await self._rebuild(known)
        elif found.incarnation != known.incarnation:
            await self._adopt(found)
        elif found.generation < known.generation:
            _log.warning("Redis has gone back in time", found=found, known=known)
            await self._put_back_all()
        else:
            self._mirror.note(found)

    async def _rebuild(self, known: Mirrored) -> None:
        began_s = time.monotonic()
        _log.warning("Redis has lost its data; it is being rebuilt", generation=known.generation)
        incarnation = await self._saver.begin(known.generation)
        count = await self._put_back_all()
        await self._saver.finish()
        self._mirror.note(Mirrored(incarnation=incarnation, generation=known.generation))
        seconds = round(time.monotonic() - began_s, 2)
        _log.warning("Redis is rebuilt", adapters=count, seconds=seconds)

    async def _put_back_all(self) -> int:
        for tenant in self._mirror.tenants():
            await self._saver.put_back_tenant(tenant)
        count = 0
        for saved in self._mirror.adapters():
            count += await self._saver.put_back(saved)
        return count

    async def _adopt(self, found: Mirrored) -> None:
        """Mirror data that is not known yet."""
        self._mirror.clear()
        async for name in self._saver.tenant_names():
            await self.tenant_changed(name)
        async for name in self._saver.names():
            await self._mirror_adapter(name)
        self._mirror.note(found)

    async def _mirror_adapter(self, name: str) -> SavedAdapter | None:
        # One at a time, lest an older state replace a newer one.
        async with self._lock(name):
            saved = await self._saver.adapter(name)
            await self._keep(SavedAdapter, name, saved)
            return saved

    def _lock(self, what: str) -> asyncio.Lock:
        lock = self._locks.get(what)
        if lock is None:
            lock = self._locks[what] = asyncio.Lock()
        return lock

    async def _keep(
        self,
        kind: type[SavedAdapter | SavedTenant],
        name: str,
        saved: SavedAdapter | SavedTenant | None,
    ) -> None:
        try:
            if saved is None:
                await asyncio.to_thread(self._mirror.forget, kind, name)
            else:
                await asyncio.to_thread(self._mirror.save, saved)
        except OSError as error:
            # Redis has it, durably: what is lost is only what it could be rebuilt from.
            _log.error("the mirror cannot be written", error=str(error))


async def reconcile_forever(rebuilder: Rebuilder, *, every_s: float) -> None:
    """Reconcile again and again until cancelled."""
    while True:
        try:
            await rebuilder.reconcile()
        except (LorafleetError, OSError) as error:
            _log.debug("the mirror cannot be compared", error=str(error))
        await asyncio.sleep(every_s)
