"""Reading adapters from Redis: by name, in pages, by what they are labelled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from lorafleet.core.record import AdapterRecord, HistoryEntry
from lorafleet.registry import scripts
from lorafleet.registry.changes import no_adapter
from lorafleet.registry.encoding import Hash, history_of, record_of
from lorafleet.registry.layout import DELETED_NAMES, DELETED_UNTIL, NAMES, key
from lorafleet.registry.link import RedisLink

_SNAPSHOT_PAGE = 200
_SCAN = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which adapters.

    Parameters
    ----------
    tenants : collection of str
        Of these alone; empty is all.
    search : str
        Part of the name.
    labels : mapping
        Labels that they have.
    deleted : bool
        Those that can be restored, instead of those that are registered.
    """

    tenants: Collection[str] = ()
    search: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    deleted: bool = False

    @property
    def is_narrow(self) -> bool:
        """Whether it leaves anything out."""
        return bool(self.tenants or self.search or self.labels)


ALL = Filter()


class Reader:
    """Reads adapters; every method raises Unavailable while Redis is away."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def get(self, name: str) -> AdapterRecord:
        """One adapter; NotFound when there is none."""
        record = (await self.get_many([name]))[0]
        if record is None:
            raise no_adapter(name)
        return record

    async def get_many(
        self, names: Sequence[str], *, deleted: bool = False
    ) -> list[AdapterRecord | None]:
        """Adapters in the order of the names; None for those that do not exist."""
        kind = "deleted" if deleted else "adapter"

        async def read(redis: Any) -> list[Hash]:
            pipeline = redis.pipeline(transaction=False)
            for name in names:
                pipeline.hgetall(key(kind, name))
            return cast(list[Hash], await pipeline.execute())

        hashes = (await self._link.call(read)).value if names else []
        return [record_of(name, data) for name, data in zip(names, hashes, strict=True)]

    async def page(
        self, *, after: str | None, limit: int, wanted: Filter = ALL
    ) -> list[AdapterRecord]:
        """Up to `limit` adapters in the order of their names (by bytes), after a name.

        A shorter list than `limit` does not mean the end: some may have been deleted meanwhile. An
        empty one does.
        """
        low = "-" if after is None else f"({after}"
        while True:
            names, low_next, end = await self._names(low, limit, wanted)
            records = await self.get_many(names, deleted=wanted.deleted)
            found = [record for record in records if record is not None]
            if found or end:
                return found
            low = low_next

    async def all(self, *, deleted: bool = False) -> AsyncIterator[AdapterRecord]:
        """Every adapter; each is read whole, though not all at one moment."""
        after: str | None = None
        wanted = Filter(deleted=deleted)
        while page := await self.page(after=after, limit=_SNAPSHOT_PAGE, wanted=wanted):
            for record in page:
                yield record
            after = page[-1].name

    async def count(self) -> int:
        """How many adapters are registered."""
        return (await self._link.call(lambda redis: cast(Any, redis.zcard(NAMES)))).value or 0

    async def history(self, name: str, limit: int) -> list[HistoryEntry]:
        """What was done to an adapter, newest first; also to one that can be restored."""

        async def read(redis: Any) -> list[Any]:
            pipeline = redis.pipeline(transaction=False)
            pipeline.lrange(key("history", name), 0, limit - 1)
            pipeline.lrange(key("deleted_history", name), 0, limit - 1)
            return cast(list[Any], await pipeline.execute())

        registered, deleted = (await self._link.call(read)).value
        entries = registered or deleted
        if not entries:
            raise no_adapter(name)
        return [history_of(entry) for entry in entries]

    async def expired(self, now_s: float) -> list[str]:
        """Names of deleted adapters whose grace ended before a time."""
        reply = await self._link.call(
            lambda redis: cast(Any, redis.zrangebyscore(DELETED_UNTIL, "-inf", now_s * 1000))
        )
        return [name.decode() for name in reply.value]

    async def _names(self, low: str, limit: int, wanted: Filter) -> tuple[list[str], str, bool]:
        """Names from a lower bound on, the next bound, and whether there are no more."""
        names = DELETED_NAMES if wanted.deleted else NAMES
        if not wanted.is_narrow:
            reply = await self._link.call(
                lambda redis: cast(Any, redis.zrangebylex(names, low, "+", start=0, num=limit))
            )
            found = [name.decode() for name in reply.value]
            return found, f"({found[-1]}" if found else low, not found
        labels = [part for pair in wanted.labels.items() for part in pair]
        prefix = key("deleted" if wanted.deleted else "adapter", "")
        arguments: list[str | int] = [prefix, low, "+", limit, _SCAN, wanted.search]
        arguments += [len(wanted.tenants), *wanted.tenants, *labels]
        last, end, *found_names = (
            part.decode() for part in (await self._link.run(scripts.FIND, [names], arguments)).value
        )
        return found_names, f"({last}", end == "1"
