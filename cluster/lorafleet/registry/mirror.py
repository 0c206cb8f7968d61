"""The registry's state once more, as files: what a Redis that lost its data is rebuilt from.

It owns one directory with a file for each adapter and each tenant, replaced as a whole after every
change and before the change is answered. Redis remains the truth: nothing is read here while it has
its data. It knows neither Redis nor protobuf.

    state.json              the incarnation that is mirrored, and the newest change seen
    adapters/<sha256>.json  an adapter's hash and history as they are in Redis, or its tombstone's
    tenants/<sha256>.json   a tenant's quota and API keys
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lorafleet.core.log import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """An adapter: the fields of its hash, and its history (newest first) as JSON texts.

    `deleted_until_s` is set for one that was deleted and can be restored until then.
    """

    name: str
    fields: Mapping[str, str]
    history: Sequence[str]
    deleted_until_s: float | None = None

    @property
    def revision(self) -> int:
        """The change that made it what it is."""
        return int(self.fields.get("revision", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTenant:
    """A tenant: the fields of its hash, and its API keys as JSON texts by id."""

    name: str
    fields: Mapping[str, str]
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    """Which data is mirrored, and up to which change at least."""

    incarnation: str | None = None
    generation: int = 0


class Mirror:
    """The files of one registry.

    Parameters
    ----------
    directory : Path
        Made when first written to; on the same disk as the blobs, which are needed with it.

    Notes
    -----
    Files are replaced without fsync: they are for a Redis that lost its data, not for a machine
    that lost its power, against which Redis's own append-only file is kept.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.state = Mirrored(**(_read(directory / "state.json") or {}))

    def note(self, state: Mirrored) -> None:
        """Write down which data is mirrored."""
        if state != self.state:
            self.state = state
            _replace(self._directory / "state.json", asdict(state))

    def save(self, saved: SavedAdapter | SavedTenant) -> None:
        """Replace what is known of one."""
        _replace(self._path(type(saved), saved.name), asdict(saved))

    def forget(self, kind: type[SavedAdapter | SavedTenant], name: str) -> None:
        """Remove what is known of one."""
        self._path(kind, name).unlink(missing_ok=True)

    def adapters(self) -> Iterator[SavedAdapter]:
        """Every adapter."""
        for data in self._all(SavedAdapter):
            yield SavedAdapter(**data)

    def tenants(self) -> Iterator[SavedTenant]:
        """Every tenant."""
        for data in self._all(SavedTenant):
            yield SavedTenant(**data)

    def clear(self) -> None:
        """Forget everything, to begin with other data."""
        self.note(Mirrored())
        for kind in (SavedAdapter, SavedTenant):
            for path in self._folder(kind).glob("*.json"):
                path.unlink(missing_ok=True)

    def _all(self, kind: type[SavedAdapter | SavedTenant]) -> Iterator[dict[str, Any]]:
        for path in sorted(self._folder(kind).glob("*.json")):
            data = _read(path)
            if data is not None:
                yield data

    def _folder(self, kind: type[SavedAdapter | SavedTenant]) -> Path:
        return self._directory / ("adapters" if kind is SavedAdapter else "tenants")

    def _path(self, kind: type[SavedAdapter | SavedTenant], name: str) -> Path:
        # Names differ by case alone, which not every file system can tell apart.
        return self._folder(kind) / f"{hashlib.sha256(name.encode()).hexdigest()}.json"


def _replace(path: Path, data: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(data))
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(data))
    os.replace(partial, path)


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(FileNotFoundError):
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            return data
        except ValueError:
            _log.error("a file of the mirror is damaged and left out", file=str(path))
    return None
