"""Weighted rendezvous hashing that does not look at every member.

It decides in which order a key prefers the members, so that everybody with the same members agrees
without talking, and so that a member's coming or going moves only keys of its own. It does not know
what members or keys are. Used by the routing policy.

In textbook form each member draws u in [0, 1) from a hash of (key, member) and has the score
-ln(1 - u) / weight; the smallest wins, so a member wins in proportion to its weight. That costs one
hash a member and decision. Here u is the member's place in the key's own walk over a fixed ring of
slots: a member sits in a few slots that its id hashes to, and a key visits the slots from a start
and by an odd stride that are both hashes of the key (double hashing). Few members: compute each
one's place. Many: take the walk and stop at the first slot that is taken. Both give the same order.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

_NUM_SLOTS = 1 << 14
_MASK = _NUM_SLOTS - 1

# Slots are shared by chance (at 1,000 members a fifth of them) and then halve a member's part of
# the slot: several seats even that out, and shorten the walk.
_NUM_SEATS = 4

# Ranking n taken slots costs n steps, walking to the first costs _NUM_SLOTS / n: equal here.
_WALK_FROM = 128

# Weights are compared by their three leading bits (steps of at most 25%), so that page counts that
# differ by a few between like machines neither move keys nor make a class of their own.
_WEIGHT_BITS = 3

_Slots = Mapping[int, tuple[str, ...]]
_Steps = Iterator[tuple[int, Sequence[str]]]
_NO_SLOTS: _Slots = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """An immutable set of weighted members; `order` ranks them for a key."""

    classes: Mapping[int, _Slots] = field(default_factory=lambda: MappingProxyType({}))

    def added(self, member: str, weight: int) -> Rendezvous:
        """Return a set with one more member; a weight below 1 adds nothing."""
        if weight < 1:
            return self
        rounded = _rounded(weight)
        slots = dict(self.classes.get(rounded, _NO_SLOTS))
        for index in _seats(member):
            slots[index] = tuple(sorted((*slots.get(index, ()), member)))
        return Rendezvous({**self.classes, rounded: slots})

    def removed(self, member: str, weight: int) -> Rendezvous:
        """Return a set without a member that was added with this weight."""
        if weight < 1:
            return self
        rounded = _rounded(weight)
        slots = dict(self.classes[rounded])
        for index in _seats(member):
            slots[index] = tuple(other for other in slots[index] if other != member)
            if not slots[index]:
                del slots[index]
        classes = {**self.classes, rounded: slots}
        if not slots:
            del classes[rounded]
        return Rendezvous(classes)

    def order(self, key: str) -> Iterator[str]:
        """Yield members from the most preferred down, computed as far as the caller reads.

        Notes
        -----
        The first member costs some 128 steps at most for each distinct (rounded) weight.
        """
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        start = int.from_bytes(digest[:4], "little") & _MASK
        stride = (int.from_bytes(digest[4:], "little") & _MASK) | 1
        scored = []
        for weight, slots in self.classes.items():
            steps = (_walk if len(slots) >= _WALK_FROM else _rank)(slots, start, stride)
            scored.append(_scored(steps, weight, key))
        seen: set[str] = set()
        for _, member in scored[0] if len(scored) == 1 else heapq.merge(*scored):
            if member not in seen:
                seen.add(member)
                yield member


def _rounded(weight: int) -> int:
    shift = max(0, weight.bit_length() - _WEIGHT_BITS)
    return weight >> shift << shift


def _seats(member: str) -> set[int]:
    digest = hashlib.blake2b(member.encode(), digest_size=2 * _NUM_SEATS).digest()
    return {index & _MASK for (index,) in struct.iter_unpack("<H", digest)}


def _tie(key: str, member: str) -> bytes:
    return hashlib.blake2b(f"{key} {member}".encode(), digest_size=8).digest()


def _scored(steps: _Steps, weight: int, key: str) -> Iterator[tuple[float, str]]:
    """Yield (score, member) of one weight class, ascending."""
    for step, members in steps:
        score = -math.log1p(-(step + 0.5) / _NUM_SLOTS) / weight
        if len(members) > 1:
            # Inside a slot the hash of both decides, so that no member is always second.
            members = sorted(members, key=partial(_tie, key))
        for member in members:
            yield score, member


def _walk(slots: _Slots, start: int, stride: int) -> _Steps:
    index = start
    for step in range(_NUM_SLOTS):
        if index in slots:
            yield step, slots[index]
        index = (index + stride) & _MASK


def _rank(slots: _Slots, start: int, stride: int) -> _Steps:
    inverse = pow(stride, -1, _NUM_SLOTS)
    steps = [(index - start) * inverse & _MASK for index in slots]
    heapq.heapify(steps)
    while steps:
        step = heapq.heappop(steps)
        yield step, slots[(start + step * stride) & _MASK]
