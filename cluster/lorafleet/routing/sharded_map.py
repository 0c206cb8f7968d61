"""An immutable mapping whose updates copy only what they touch.

It owns how a large index is shared between successive views of the fleet: a plain dict of 100,000
versions would be copied whole at every change. It does not know what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

# An update copies this many pointers and the shards it touches: 1,024 keeps both near 100 entries
# for 100,000 keys.
_NUM_SHARDS = 1024
_MASK = _NUM_SHARDS - 1

V = TypeVar("V")


class ShardedMap(Generic[V]):
    """A persistent map from strings: `updated` returns a new map, the old one stays as it was."""

    __slots__ = ("_shards",)

    def __init__(self, shards: tuple[dict[str, V], ...] | None = None) -> None:
        self._shards = shards if shards is not None else ({},) * _NUM_SHARDS

    def get(self, key: str, default: V) -> V:
        """Return the value of a key, or `default`."""
        return self._shards[hash(key) & _MASK].get(key, default)

    def updated(self, changes: Mapping[str, V | None]) -> ShardedMap[V]:
        """Return a map with these values; None removes a key, absent keys included."""
        if not changes:
            return self
        shards = list(self._shards)
        copied: set[int] = set()
        for key, value in changes.items():
            index = hash(key) & _MASK
            if index not in copied:
                shards[index] = shards[index].copy()
                copied.add(index)
            if value is None:
                shards[index].pop(key, None)
            else:
                shards[index][key] = value
        return ShardedMap(tuple(shards))

    def items(self) -> Iterator[tuple[str, V]]:
        """Yield every pair, in no order."""
        for shard in self._shards:
            yield from shard.items()

    def __len__(self) -> int:
        return sum(map(len, self._shards))
