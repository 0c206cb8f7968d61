"""The truth about adapters: what is registered, in Redis, changed in whole steps only.

It owns reading and changing adapters, aliases and versions, and the feed of changes. It knows
neither weights (the blob store has them, durable before a version is published) nor protobuf. The
service changes it; every process's catalogue follows it.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from lorafleet.core.errors import AlreadyExists, Conflict, NotFound
from lorafleet.core.manifest import VersionManifest
from lorafleet.core.names import LATEST
from lorafleet.core.record import AdapterRecord, Target
from lorafleet.registry import scripts
from lorafleet.registry.leases import Leases
from lorafleet.registry.link import LinkOptions, RedisLink, key

_STATE = key("state")
_NAMES = key("names")
_CHANGES = key("changes")

_SNAPSHOT_PAGE = 200
_MAX_CHANGES_PER_READ = 1000

_Hash: TypeAlias = dict[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A place in the feed of changes: after `generation` changes of the database `incarnation`.

    An empty or flushed Redis is another incarnation, so that an old cursor is not taken for a place
    in its feed. `incarnation` is None while no change was ever made.
    """

    generation: int
    incarnation: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What changed since a cursor; `names` is None when only a snapshot can tell."""

    cursor: Cursor
    names: frozenset[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A publish's outcome. `existed`: this very version had been registered before."""

    manifest: VersionManifest
    existed: bool


class RegistryStore:
    """Adapters in Redis.

    Parameters
    ----------
    redis_url : str
        `redis://`, `rediss://` or `unix://`.
    options : LinkOptions
        How long a command is retried before it fails with Unavailable.
    max_changes : int
        About how many changes the feed keeps; a follower that is further behind takes a snapshot.

    Notes
    -----
    Every method raises Unavailable while Redis is away. Use it from one event loop.
    """

    def __init__(
        self, redis_url: str, *, options: LinkOptions | None = None, max_changes: int = 10_000
    ) -> None:
        self._link = RedisLink(redis_url, options=options)
        self._max_changes = max_changes
        self.leases = Leases(self._link)

    async def close(self) -> None:
        """Close the connections."""
        await self._link.close()

    async def ping(self) -> None:
        """Return when Redis answers."""
        await self._link.call(lambda redis: cast(Any, redis.ping()))

    # Changes.

    async def publish_version(
        self, manifest: VersionManifest, *, if_new: bool = False
    ) -> Published:
        """Register a version under its adapter's name and point `latest` at it, in one step.

        The version's blobs must be durable before. A version registered before stays as it was.

        Raises
        ------
        AlreadyExists
            `if_new`, and the adapter has another version.
        Conflict
            The adapter has too many versions.
        """
        name = manifest.adapter
        text = manifest.to_json()
        reply = await self._change(
            scripts.PUBLISH, name, manifest.id, text, int(if_new), scripts.MAX_VERSIONS
        )
        outcome, value = (part.decode() for part in reply.value)
        if outcome == "taken":
            raise AlreadyExists(
                f"adapter {name!r} has version {value} already; push without if_new to add another",
                adapter=name,
                version=value,
            )
        if outcome == "full":
            raise Conflict(
                f"adapter {name!r} has {value} versions, the most it may have; delete it or push "
                "under another name",
                adapter=name,
            )
        if outcome == "published":
            return Published(manifest=manifest, existed=False)
        stored = value.partition(" ")[2]
        # After a lost reply, what exists may be this very call's own work.
        existed = not (reply.retried and stored == text)
        return Published(manifest=VersionManifest.from_json(stored), existed=existed)

    async def set_alias(self, name: str, alias: str, version: str) -> AdapterRecord:
        """Point an alias at one of the adapter's versions.

        Raises
        ------
        NotFound
            There is no such adapter, or it has no such version.
        """
        reply = await self._change(scripts.SET_ALIAS, name, alias, version)
        if reply.value == b"no version":
            raise NotFound(
                f"adapter {name!r} has no version {version}", adapter=name, version=version
            )
        if reply.value == b"no adapter":
            raise _no_adapter(name)
        return await self.get_adapter(name)

    async def delete_adapter(self, name: str) -> None:
        """Remove an adapter with its aliases and versions.

        Raises
        ------
        NotFound
            There is no such adapter.
        """
        reply = await self._change(scripts.DELETE, name)
        # After a lost reply, its absence may be this very call's own work.
        if not reply.value and not reply.retried:
            raise _no_adapter(name)

    # Reading.

    async def get_adapter(self, name: str) -> AdapterRecord:
        """Return one adapter.

        Raises
        ------
        NotFound
            There is no such adapter.
        """
        record = (await self.get_adapters([name]))[0]
        if record is None:
            raise _no_adapter(name)
        return record

    async def get_adapters(self, names: Sequence[str]) -> list[AdapterRecord | None]:
        """Return adapters in the order of their names given; None for those that do not exist."""

        async def read(redis: Any) -> list[_Hash]:
            pipeline = redis.pipeline(transaction=False)
            for name in names:
                pipeline.hgetall(key("adapter", name))
            return cast(list[_Hash], await pipeline.execute())

        hashes = (await self._link.call(read)).value if names else []
        return [_record(name, data) for name, data in zip(names, hashes, strict=True)]

    async def list_adapters(self, *, after: str | None = None, limit: int) -> list[AdapterRecord]:
        """Return up to `limit` adapters in the order of their names (by bytes), after a name.

        A shorter list than `limit` does not mean the end: some may have been deleted meanwhile. An
        empty one does.
        """
        low = "-" if after is None else f"({after}"
        while True:
            names = await self._names(low, limit)
            found = [record for record in await self.get_adapters(names) if record is not None]
            if found or not names:
                return found
            low = f"({names[-1]}"

    async def adapters(self) -> AsyncIterator[AdapterRecord]:
        """Iterate over all adapters; each is read whole, though not all at one moment."""
        after: str | None = None
        while page := await self.list_adapters(after=after, limit=_SNAPSHOT_PAGE):
            for record in page:
                yield record
            after = page[-1].name

    async def count_adapters(self) -> int:
        """Return how many adapters are registered."""
        return (await self._link.call(lambda redis: cast(Any, redis.zcard(_NAMES)))).value or 0

    # The feed.

    async def cursor(self) -> Cursor:
        """Return the newest place in the feed. What is read later has all changes up to it."""
        generation, incarnation = (
            await self._link.call(
                lambda redis: cast(Any, redis.hmget(_STATE, ["generation", "incarnation"]))
            )
        ).value
        return Cursor(
            generation=int(generation or 0),
            incarnation=incarnation.decode() if incarnation else None,
        )

    async def changes(self, cursor: Cursor, *, wait_s: float = 0.0) -> Changes:
        """Return what changed since a cursor, waiting for the first change.

        Names only: whoever reads the adapters afterwards gets their newest state, and reading it
        twice does no harm.

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
        entries = await self._read_feed(cursor, wait_s)
        if entries:
            return _follow(cursor, entries)
        newest = await self.cursor()
        if newest == cursor:
            return Changes(cursor=cursor, names=frozenset())
        # Either a change was made just now, or the cursor is no place in this feed.
        entries = await self._read_feed(cursor, 0.0)
        return _follow(cursor, entries) if entries else Changes(cursor=newest, names=None)

    async def _read_feed(self, cursor: Cursor, wait_s: float) -> list[tuple[bytes, _Hash]]:
        position: dict[Any, Any] = {_CHANGES: f"{cursor.generation}-0"}
        block_ms = max(1, round(wait_s * 1000)) if wait_s else None
        streams = await self._link.once(
            lambda redis: cast(
                Any, redis.xread(position, count=_MAX_CHANGES_PER_READ, block=block_ms)
            ),
            wait_s=wait_s,
        )
        return streams[0][1] if streams else []

    async def _names(self, low: str, limit: int) -> list[str]:
        reply = await self._link.call(
            lambda redis: cast(Any, redis.zrangebylex(_NAMES, low, "+", start=0, num=limit))
        )
        return [name.decode() for name in reply.value]

    async def _change(self, script: str, name: str, *args: str | int) -> Any:
        keys = [_STATE, _CHANGES, _NAMES, key("adapter", name)]
        head: list[str | int] = [name, secrets.token_hex(8), self._max_changes]
        return await self._link.run(script, keys, [*head, *args])


def _follow(cursor: Cursor, entries: Sequence[tuple[bytes, _Hash]]) -> Changes:
    """Advance a cursor over entries of the feed, or find that it is not a place in it."""
    names = set()
    for entry_id, fields in entries:
        generation = int(entry_id.partition(b"-")[0])
        incarnation = fields[b"incarnation"].decode()
        dense = generation == cursor.generation + 1
        if not dense or cursor.incarnation not in (None, incarnation):
            last = entries[-1]
            newest = int(last[0].partition(b"-")[0])
            names_it = last[1][b"incarnation"].decode()
            return Changes(cursor=Cursor(generation=newest, incarnation=names_it), names=None)
        names.add(fields[b"name"].decode())
        cursor = Cursor(generation=generation, incarnation=incarnation)
    return Changes(cursor=cursor, names=frozenset(names))


def _record(name: str, data: _Hash) -> AdapterRecord | None:
    """Decode an adapter's hash; None when it is empty, that is, when the adapter does not exist."""
    aliases: dict[str, Target] = {}
    versions: list[tuple[int, VersionManifest]] = []
    for field, value in data.items():
        kind, _, label = field.decode().partition(":")
        if kind == "alias":
            aliases[label] = Target.to(value.decode())
        elif kind == "version":
            generation, _, text = value.partition(b" ")
            versions.append((int(generation), VersionManifest.from_json(text)))
    if LATEST not in aliases:
        return None
    versions.sort(key=lambda pair: pair[0])
    return AdapterRecord(
        name=name, aliases=aliases, versions=tuple(manifest for _, manifest in versions)
    )


def _no_adapter(name: str) -> NotFound:
    return NotFound(f"adapter {name!r} is not registered", adapter=name)
