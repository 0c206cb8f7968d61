"""The truth about adapters: what is registered, in Redis, changed in whole steps only.

It owns one link to Redis and what is done over it: changes, reading, the feed, tenants, leases. It
knows neither weights (the blob store has them, durable before a version is published) nor protobuf.
The service changes it; every process's catalogue follows it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from lorafleet.core.errors import NotFound
from lorafleet.core.manifest import VersionManifest
from lorafleet.core.record import AdapterRecord, HistoryEntry, Target
from lorafleet.registry.changes import (
    ANY,
    DEFAULT_GRACE_S,
    Changer,
    Condition,
    Published,
)
from lorafleet.registry.feed import Changes, Cursor, Feed
from lorafleet.registry.leases import Leases
from lorafleet.registry.link import LinkOptions, RedisLink
from lorafleet.registry.mirror import Mirror
from lorafleet.registry.reading import ALL, Filter, Reader
from lorafleet.registry.rebuild import Rebuilder
from lorafleet.registry.tenancy import Tenancy
from lorafleet.registry.usage import UsageBook

T = TypeVar("T")

__all__ = ["Changes", "Condition", "Cursor", "Filter", "Published", "RegistryStore"]


class RegistryStore:
    """Adapters in Redis.

    Parameters
    ----------
    redis_url : str
        See `urls`.
    options : LinkOptions
        How long a command is retried before it fails with Unavailable.
    max_changes : int
        About how many changes the feed keeps; a follower that is further behind takes a snapshot.

    mirror : Path, optional
        Where the registry's one writer mirrors it, to rebuild a Redis that lost its data.

    Notes
    -----
    Every method raises Unavailable while Redis is away. Every change raises Conflict when its
    condition's revision is not the adapter's, and InvalidInput when its idempotency key was used
    for another change. Use it from one event loop.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        options: LinkOptions | None = None,
        max_changes: int = 10_000,
        mirror: Path | None = None,
    ) -> None:
        self._link = RedisLink(redis_url, options=options)
        self.rebuilder = Rebuilder(self._link, Mirror(mirror)) if mirror is not None else None
        self._changer = Changer(self._link, max_changes, self.rebuilder)
        self._reader = Reader(self._link)
        self._feed = Feed(self._link)
        self.leases = Leases(self._link)
        self.tenancy = Tenancy(self._link, max_changes, self.rebuilder)
        self.usage = UsageBook(self._link)

    async def close(self) -> None:
        """Close the connections."""
        await self._link.close()

    async def ping(self) -> None:
        """Return when Redis answers."""
        await self._link.call(lambda redis: cast(Any, redis.ping()))

    # Changes.

    async def publish_version(
        self,
        manifest: VersionManifest,
        *,
        if_new: bool = False,
        labels: Mapping[str, str] | None = None,
        create_tenant: bool = True,
        condition: Condition = ANY,
    ) -> Published:
        """Register a version under its adapter's name and point `latest` at it, in one step.

        The version's blobs must be durable before. A version registered before stays as it was.

        Parameters
        ----------
        manifest : VersionManifest
            What is registered.
        if_new : bool
            Refuse when the adapter has another version.
        labels : mapping, optional
            Set on the adapter beside those it has.
        create_tenant : bool
            Make the name's tenant if it is not there.
        condition : Condition
            What it depends on.

        Raises
        ------
        AlreadyExists
            `if_new`, and the adapter has another version.
        Conflict
            The adapter has too many versions.
        NotFound
            The tenant does not exist, and is not to be made.
        Exhausted
            The tenant's quota of adapters or bytes; named.
        """
        return await self._changer.publish(
            manifest,
            if_new=if_new,
            labels=labels or {},
            create_tenant=create_tenant,
            condition=condition,
        )

    async def set_alias(
        self, name: str, alias: str, target: Target | str, condition: Condition = ANY
    ) -> AdapterRecord:
        """Point an alias at a version, or at several by weight.

        Raises
        ------
        NotFound
            There is no such adapter, or it has no such version; named.
        """
        wanted = Target.to(target) if isinstance(target, str) else target
        return await self._changer.set_alias(name, alias, wanted, condition)

    async def remove_alias(
        self, name: str, alias: str, condition: Condition = ANY
    ) -> AdapterRecord:
        """Remove an alias; NotFound when the adapter has none of that name."""
        return await self._changer.remove_alias(name, alias, condition)

    async def rollback(self, name: str, alias: str, condition: Condition = ANY) -> AdapterRecord:
        """Point an alias at what it meant before its newest change; a second goes further back.

        Raises
        ------
        Conflict
            It meant nothing before.
        """
        return await self._changer.rollback(name, alias, condition)

    async def set_labels(
        self, name: str, labels: Mapping[str, str], condition: Condition = ANY
    ) -> AdapterRecord:
        """Replace an adapter's labels."""
        return await self._changer.set_labels(name, labels, condition)

    async def pin(
        self, name: str, version: str, replicas: int, condition: Condition = ANY
    ) -> AdapterRecord:
        """Keep a version resident on so many replicas; 0 ends it."""
        return await self._changer.pin(name, version, replicas, condition)

    async def prefetch(self, name: str, version: str, replicas: int) -> None:
        """Tell so many replicas to load a version; a hint that is not stored."""
        await self._changer.prefetch(name, version, replicas)

    async def delete_adapter(
        self, name: str, condition: Condition = ANY, *, grace_s: float = DEFAULT_GRACE_S
    ) -> float:
        """Remove an adapter with its aliases and versions.

        Returns
        -------
        float
            Until when it can be restored, in Unix seconds.
        """
        return await self._changer.delete(name, condition, grace_s=grace_s)

    async def restore_adapter(self, name: str, condition: Condition = ANY) -> AdapterRecord:
        """Bring a deleted adapter back.

        Raises
        ------
        AlreadyExists
            Its name was taken since.
        NotFound
            There is no such deleted adapter, or its grace has ended.
        """
        return await self._changer.restore(name, condition)

    async def purge(self, name: str) -> bool:
        """Forget a deleted adapter whose grace has ended; whether it was forgotten."""
        return await self._changer.purge(name)

    # Reading.

    async def get_adapter(self, name: str) -> AdapterRecord:
        """Return one adapter.

        Raises
        ------
        NotFound
            There is no such adapter.
        """
        return await self._found(self._reader.get(name))

    async def get_adapters(self, names: Sequence[str]) -> list[AdapterRecord | None]:
        """Return adapters in the order of their names given; None for those that do not exist."""
        return await self._reader.get_many(names)

    async def list_adapters(
        self, *, after: str | None = None, limit: int, wanted: Filter = ALL
    ) -> list[AdapterRecord]:
        """Return up to `limit` adapters in the order of their names (by bytes), after a name.

        A shorter list than `limit` does not mean the end: some may have been deleted meanwhile. An
        empty one does.
        """
        page = await self._reader.page(after=after, limit=limit, wanted=wanted)
        if self.rebuilder is not None:
            await self.rebuilder.check()
        return page

    def adapters(self, *, deleted: bool = False) -> AsyncIterator[AdapterRecord]:
        """Iterate over all adapters, or over those that can be restored.

        Each is read whole, though not all at one moment.
        """
        return self._reader.all(deleted=deleted)

    async def count_adapters(self) -> int:
        """Return how many adapters are registered."""
        return await self._reader.count()

    async def history(self, name: str, limit: int = 100) -> list[HistoryEntry]:
        """Return what was done to an adapter, newest first; NotFound when there is none."""
        return await self._found(self._reader.history(name, limit))

    async def _found(self, reading: Awaitable[T]) -> T:
        """What was read; what is not there may be what Redis has lost."""
        try:
            return await reading
        except NotFound:
            if self.rebuilder is not None:
                await self.rebuilder.check()
            raise

    async def expired(self, now_s: float) -> list[str]:
        """Return the deleted adapters whose grace ended before a time."""
        return await self._reader.expired(now_s)

    # The feed.

    async def cursor(self) -> Cursor:
        """Return the newest place in the feed; see `Feed.cursor`."""
        return await self._feed.cursor()

    async def changes(self, cursor: Cursor, *, wait_s: float = 0.0) -> Changes:
        """Return what changed since a cursor, waiting for the first change; see `Feed.changes`."""
        return await self._feed.changes(cursor, wait_s=wait_s)
