"""An adapter as the registry keeps it: a name, its aliases, its versions, its history.

These are the values that the store returns, that each process's catalogue holds and that the wire
carries; they know neither Redis nor protobuf.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from lorafleet.core.errors import NotFound
from lorafleet.core.manifest import VersionManifest
from lorafleet.core.names import LATEST, AdapterRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A version's part of an alias; `weight` is relative to the other shares' weights."""

    version: str
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Target:
    """What an alias means: one share for a plain alias, several for a split."""

    shares: tuple[Share, ...]

    @classmethod
    def to(cls, version: str) -> Target:
        """A plain target."""
        return cls((Share(version=version),))

    @property
    def version(self) -> str | None:
        """The only version, or None for a split."""
        return self.shares[0].version if len(self.shares) == 1 else None

    @property
    def versions(self) -> frozenset[str]:
        return frozenset(share.version for share in self.shares)

    def pick(self, sticky_key: str = "") -> str:
        """The version for a request; the same for the same key while the shares stay.

        Weighted rendezvous hashing: when weights change, only as many keys move as must. Without a
        key each call draws.

        References: Schindelhauer and Schomaker, "Weighted Distributed Hash Tables" (2005).
        """
        if len(self.shares) == 1:
            return self.shares[0].version
        key = sticky_key or secrets.token_hex(8)
        return max(self.shares, key=lambda share: _score(key, share)).version


def _score(key: str, share: Share) -> float:
    digest = hashlib.sha256(f"{share.version}\0{key}".encode("utf-8", "surrogatepass")).digest()
    uniform = (int.from_bytes(digest[:8], "big") + 0.5) / 2.0**64
    return share.weight / -math.log(uniform) if uniform < 1.0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRecord:
    """One adapter.

    `versions` are oldest first; `aliases` always has `latest`. `pins` are version ids with the
    number of replicas that keep them resident. `revision` grows with every change.
    """

    name: str
    aliases: Mapping[str, Target]
    versions: tuple[VersionManifest, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    pins: Mapping[str, int] = field(default_factory=dict)
    revision: int = 0

    @property
    def latest(self) -> VersionManifest:
        """What a bare name means; of a split, its first share."""
        return self.version(self.aliases[LATEST].shares[0].version)

    def version(self, version_id: str) -> VersionManifest:
        """Return one version's manifest.

        Raises
        ------
        NotFound
            The adapter has no such version.
        """
        for manifest in self.versions:
            if manifest.id == version_id:
                return manifest
        raise NotFound(
            f"adapter {self.name!r} has no version {version_id}",
            adapter=self.name,
            version=version_id,
        )

    def resolve(self, ref: AdapterRef, sticky_key: str = "") -> VersionManifest:
        """Return the version that a reference to this adapter means now.

        Raises
        ------
        NotFound
            The reference's alias or version does not exist.
        """
        if ref.version is not None:
            return self.version(ref.version)
        alias = ref.alias or LATEST
        if alias not in self.aliases:
            raise NotFound(
                f"adapter {self.name!r} has no alias {alias!r}: it has "
                f"{', '.join(sorted(self.aliases))}",
                adapter=self.name,
                alias=alias,
            )
        return self.version(self.aliases[alias].pick(sticky_key))


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One change of an adapter; fields as in `registry.proto`, `at_s` in Unix seconds."""

    revision: int
    action: str
    alias: str = ""
    before: Target | None = None
    after: Target | None = None
    at_s: float = 0.0
    actor: str = ""
