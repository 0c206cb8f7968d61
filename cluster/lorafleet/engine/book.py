"""Which adapters this engine knows, and by which names. Thread-safe."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

from lorafleet.adapters import LoraAdapter
from lorafleet.core.errors import InvalidInput, NotFound
from lorafleet.engine.request import Mix

AdapterUse = None | str | Sequence[tuple[str, float]]
"""What answers: None is the base, a name or version id, or several of them with scales."""

Source = Callable[[str], LoraAdapter]
"""Finds a version by its id; may block; raises NotFound."""


class AdapterBook:
    """Uploaded adapters by version, names for them, and where other versions come from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        self._uploaded: dict[str, LoraAdapter] = {}
        self._source: Source | None = None

    def set_source(self, source: Source | None) -> None:
        """Say where versions that were not uploaded come from; None: nowhere."""
        with self._lock:
            self._source = source

    def add(self, adapter: LoraAdapter, name: str | None) -> None:
        """Know an adapter; a name in use moves to it."""
        with self._lock:
            self._uploaded[adapter.version] = adapter
            if name is not None:
                self._names[name] = adapter.version

    def forget(self, version: str) -> None:
        """No longer know an uploaded version, nor any name for it."""
        with self._lock:
            self._uploaded.pop(version, None)
            self._names = {name: v for name, v in self._names.items() if v != version}

    def resolve(self, use: AdapterUse) -> Mix:
        """Turn names into versions.

        Raises
        ------
        NotFound
            A name is not known, and no source could know it.
        InvalidInput
            A scale is not finite.
        """
        if use is None:
            return ()
        uses = [(use, 1.0)] if isinstance(use, str) else use
        for name, scale in uses:
            if not math.isfinite(scale):
                raise InvalidInput(
                    f"adapter {name!r}: expected a finite scale, got {scale}", field="scale"
                )
        with self._lock:
            return tuple((self._version(name), float(scale)) for name, scale in uses)

    def find(self, version: str) -> LoraAdapter:
        """The adapter of a version; may block on the source. NotFound when nobody has it."""
        with self._lock:
            adapter, source = self._uploaded.get(version), self._source
        if adapter is not None:
            return adapter
        if source is None:
            raise NotFound(f"adapter {version!r} is not known", adapter=version)
        return source(version)

    def _version(self, name: str) -> str:
        version = self._names.get(name, name)
        if version not in self._uploaded and self._source is None:
            raise NotFound(f"adapter {name!r} is not known", adapter=name)
        return version
