"""The feed of changes: what changed since a place in it.

It owns cursors and the reading of the stream. It says what changed by name only: whoever reads the
thing afterwards gets its newest state, and reading it twice does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

from lorafleet.core.errors import InvalidInput, Unavailable
from lorafleet.registry.layout import CHANGES, STATE
from lorafleet.registry.link import RedisLink

_MAX_PER_READ = 1000

_Fields: TypeAlias = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A place in the feed of changes: after `generation` changes of the database `incarnation`.

    An empty or flushed Redis is another incarnation, so that an old cursor is not taken for a place
    in its feed. `incarnation` is None while no change was ever made.
    """

    generation: int
    incarnation: str | None

    def to_text(self) -> str:
        """`<generation>-<incarnation>`, to be kept by clients."""
        return f"{self.generation}-{self.incarnation or ''}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """The inverse of `to_text`; InvalidInput when it is none."""
        generation, dash, incarnation = text.partition("-")
        if not dash or not generation.isdecimal() or len(text) > 64:
            raise InvalidInput(f"cursor {text[:64]!r} is not valid", field="cursor")
        return cls(generation=int(generation), incarnation=incarnation or None)


class Prefetch(NamedTuple):
    """A hint: so many replicas should load a version now."""

    adapter: str
    version: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What changed since a cursor.

    `names` are adapters; None when only a snapshot can tell. `tenants` and `keys` are the names of
    tenants and the ids of API keys.
    """

    cursor: Cursor
    names: frozenset[str] | None
    tenants: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    prefetches: tuple[Prefetch, ...] = field(default=())


class Feed:
    """Reads the stream of changes."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def cursor(self) -> Cursor:
        """Return the newest place in the feed. What is read later has all changes up to it.

        Raises
        ------
        Unavailable
            Redis is away, or is being rebuilt after a loss: what it has now is not everything.
        """
        fields = ["generation", "incarnation", "rebuilding"]
        generation, incarnation, rebuilding = (
            await self._link.call(lambda redis: cast(Any, redis.hmget(STATE, fields)))
        ).value
        if rebuilding:
            raise Unavailable("the registry's Redis lost its data and is being rebuilt")
        return Cursor(
            generation=int(generation or 0),
            incarnation=incarnation.decode() if incarnation else None,
        )

    async def changes(self, cursor: Cursor, *, wait_s: float = 0.0) -> Changes:
        """Return what changed since a cursor, waiting for the first change.

        Parameters
        ----------
        cursor : Cursor
            From `cursor()` or from the changes before.
        wait_s : float
            Longest wait; 0 returns at once.

        Raises
        ------
        Unavailable
            Redis went away; not retried, as it is the follower who decides what to do then.
        """
        entries = await self._read(cursor, wait_s)
        if entries:
            return _follow(cursor, entries)
        newest = await self.cursor()
        if newest == cursor:
            return Changes(cursor=cursor, names=frozenset())
        # Either a change was made just now, or the cursor is no place in this feed.
        entries = await self._read(cursor, 0.0)
        return _follow(cursor, entries) if entries else Changes(cursor=newest, names=None)

    async def _read(self, cursor: Cursor, wait_s: float) -> list[tuple[bytes, _Fields]]:
        position: dict[Any, Any] = {CHANGES: f"{cursor.generation}-0"}
        block_ms = max(1, round(wait_s * 1000)) if wait_s else None
        streams = await self._link.once(
            lambda redis: cast(Any, redis.xread(position, count=_MAX_PER_READ, block=block_ms)),
            wait_s=wait_s,
        )
        return streams[0][1] if streams else []


def _follow(cursor: Cursor, entries: Sequence[tuple[bytes, _Fields]]) -> Changes:
    """Advance a cursor over entries of the feed, or find that it is not a place in it."""
    found: dict[bytes, set[str]] = {b"adapter": set(), b"tenant": set(), b"key": set()}
    prefetches = []
    for entry_id, fields in entries:
        generation = int(entry_id.partition(b"-")[0])
        incarnation = fields[b"incarnation"].decode()
        dense = generation == cursor.generation + 1
        if not dense or cursor.incarnation not in (None, incarnation):
            last = entries[-1]
            newest = int(last[0].partition(b"-")[0])
            names_it = last[1][b"incarnation"].decode()
            return Changes(cursor=Cursor(generation=newest, incarnation=names_it), names=None)
        name = fields[b"name"].decode()
        if fields[b"kind"] == b"prefetch":
            version, replicas = fields[b"version"].decode(), int(fields[b"replicas"])
            prefetches.append(Prefetch(adapter=name, version=version, replicas=replicas))
        else:
            found[fields[b"kind"]].add(name)
        cursor = Cursor(generation=generation, incarnation=incarnation)
    return Changes(
        cursor=cursor,
        names=frozenset(found[b"adapter"]),
        tenants=frozenset(found[b"tenant"]),
        keys=frozenset(found[b"key"]),
        prefetches=tuple(prefetches),
    )
