"""Adapters as fields of Redis hashes, both ways. It knows the fields' form and no connection."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeAlias

from lorafleet.core.manifest import VersionManifest
from lorafleet.core.names import LATEST
from lorafleet.core.record import AdapterRecord, HistoryEntry, Share, Target

Hash: TypeAlias = Mapping[bytes, bytes]


def target_text(target: Target) -> str:
    """`<id>` or `<id>=<weight>,<id>=<weight>`."""
    if target.version is not None:
        return target.version
    return ",".join(f"{share.version}={share.weight}" for share in target.shares)


def target_of(text: str) -> Target:
    """The inverse of `target_text`."""
    if "=" not in text:
        return Target.to(text)
    pairs = (each.split("=") for each in text.split(","))
    return Target(tuple(Share(version=version, weight=int(weight)) for version, weight in pairs))


def record_of(name: str, data: Hash) -> AdapterRecord | None:
    """An adapter of its hash; None when it is empty, that is, when the adapter does not exist."""
    aliases: dict[str, Target] = {}
    versions: list[tuple[int, VersionManifest]] = []
    labels: dict[str, str] = {}
    pins: dict[str, int] = {}
    for field, value in data.items():
        kind, _, label = field.decode().partition(":")
        if kind == "alias":
            aliases[label] = target_of(value.decode())
        elif kind == "version":
            generation, _, text = value.partition(b" ")
            versions.append((int(generation), VersionManifest.from_json(text)))
        elif kind == "label":
            labels[label] = value.decode()
        elif kind == "pin":
            pins[label] = int(value)
    if LATEST not in aliases:
        return None
    versions.sort(key=lambda pair: pair[0])
    return AdapterRecord(
        name=name,
        aliases=aliases,
        versions=tuple(manifest for _, manifest in versions),
        labels=labels,
        pins=pins,
        revision=int(data.get(b"revision", 0)),
    )


def manifest_bytes(manifest: VersionManifest) -> int:
    """Bytes of a version's files."""
    return sum(entry.size_bytes for entry in manifest.files)


def history_of(text: str | bytes) -> HistoryEntry:
    """A change of an adapter, as the scripts write it."""
    data = json.loads(text)
    return HistoryEntry(
        revision=int(data["revision"]),
        action=data["action"],
        alias=data["alias"],
        before=target_of(data["before"]) if data["before"] else None,
        after=target_of(data["after"]) if data["after"] else None,
        at_s=data["at_ms"] / 1000,
        actor=data["actor"],
    )
