"""The catalogue: one process's own view of the registry, current within a second.

It owns following the feed of changes, starting over when the feed cannot tell, and telling its
listeners. It changes nothing in the registry. While Redis is away it keeps answering from what it
knows; gateways and replicas resolve every request here, without a round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import TypeVar

from lorafleet.core.errors import Conflict, LorafleetError, NotFound, Unavailable
from lorafleet.core.log import get_logger
from lorafleet.core.manifest import VersionManifest
from lorafleet.core.names import AdapterRef
from lorafleet.core.record import AdapterRecord
from lorafleet.registry.feed import Cursor, Prefetch
from lorafleet.registry.store import RegistryStore

_WAIT_S = 1.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0

_log = get_logger(__name__)

Listener = Callable[[frozenset[str]], None]
"""Called with the names of adapters that were added, changed or removed."""

PrefetchListener = Callable[[Prefetch], None]
"""Called with a hint that a version should be loaded."""

T = TypeVar("T")


class Catalogue:
    """A local view of all adapters.

    Parameters
    ----------
    store : RegistryStore
        Followed; not closed by the catalogue.
    resync_s : float
        Everything is read anew after this time, whatever the feed said.

    Notes
    -----
    `resolve` and the other questions are synchronous and cost a dictionary look-up or two; ask them
    on the event loop's thread.
    """

    def __init__(self, store: RegistryStore, *, resync_s: float = 300.0) -> None:
        self._store = store
        self._resync_s = resync_s
        self._adapters: dict[str, AdapterRecord] = {}
        self._versions: dict[str, dict[str, VersionManifest]] = {}
        self._cursor: Cursor | None = None
        self._connected = False
        self._synced = asyncio.Event()
        self._listeners: list[Listener] = []
        self._prefetch_listeners: list[PrefetchListener] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self, *, wait_s: float = 5.0) -> None:
        """Begin to follow; return when the registry was read, or after `wait_s` without it.

        With Redis away this is no error: `connected` and `synced` say so, and it goes on trying.
        """
        if self._task is not None:
            raise Conflict("the catalogue is started already")
        self._task = asyncio.create_task(self._follow_forever(), name="catalogue")
        await self.wait_synced(wait_s)

    async def stop(self) -> None:
        """Stop following; what is known stays readable."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self._connected = False

    async def wait_synced(self, timeout_s: float) -> bool:
        """Wait until the registry has been read once; returns whether it has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._synced.wait()
        return self.synced

    @property
    def connected(self) -> bool:
        """Whether the view is current, that is, Redis answered the last time it was asked."""
        return self._connected

    @property
    def synced(self) -> bool:
        """Whether the registry has been read at least once."""
        return self._synced.is_set()

    @property
    def generation(self) -> int:
        """The number of changes that the view includes."""
        return self._cursor.generation if self._cursor else 0

    def names(self) -> list[str]:
        """All adapters' names, sorted."""
        return sorted(self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)

    def adapter(self, name: str) -> AdapterRecord:
        """Return one adapter by its canonical name.

        Raises
        ------
        NotFound
            It is not registered.
        Unavailable
            The registry was never read, so that nobody can tell.
        """
        record = self._adapters.get(name)
        if record is None:
            self._require_synced()
            raise NotFound(f"adapter {name!r} is not registered", adapter=name)
        return record

    def resolve(self, ref: AdapterRef, sticky_key: str = "") -> VersionManifest:
        """Return the version that a reference means now; errors as in `adapter`.

        Of a split alias, requests with the same sticky key get the same version.
        """
        return self.adapter(ref.name).resolve(ref, sticky_key)

    def manifest(self, version_id: str) -> VersionManifest:
        """Return a version by its id alone; errors as in `adapter`.

        Where several adapters have the version, it is the manifest of any of them.
        """
        owners = self._versions.get(version_id)
        if not owners:
            self._require_synced()
            raise NotFound(f"version {version_id} is not registered", version=version_id)
        return next(iter(owners.values()))

    def manifests(self) -> list[VersionManifest]:
        """All versions of all adapters, adapters by name, versions oldest first."""
        return [manifest for name in self.names() for manifest in self._adapters[name].versions]

    def on_change(self, listener: Listener) -> Callable[[], None]:
        """Call a function after each change of the view; returns what ends that.

        It runs on the event loop and must not block. What it raises is logged.
        """
        self._listeners.append(listener)

        def end() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return end

    def on_prefetch(self, listener: PrefetchListener) -> Callable[[], None]:
        """Call a function at each hint to load a version; as `on_change`."""
        self._prefetch_listeners.append(listener)

        def end() -> None:
            with contextlib.suppress(ValueError):
                self._prefetch_listeners.remove(listener)

        return end

    # Following.

    async def _follow_forever(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._read_all()
                pause_s = _FIRST_PAUSE_S
                await self._follow_until_resync()
            except Unavailable as error:
                if self._connected or not self.synced:
                    _log.warning("the registry cannot be reached", error=error.message)
                self._connected = False
                await asyncio.sleep(pause_s * (0.5 + random.random()))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except LorafleetError as error:
                # Redis refuses us: nothing here can mend that, and the view stays what it was.
                _log.error("the registry cannot be followed", error=error.message)
                self._connected = False
                await asyncio.sleep(_LONGEST_PAUSE_S)

    async def _read_all(self) -> None:
        """Take a snapshot."""
        # The cursor comes first: later changes are then read again rather than missed.
        cursor = await self._store.cursor()
        if cursor.incarnation is None and self._adapters:
            raise Unavailable("the registry's Redis lost its data; it will be rebuilt")
        found = {record.name: record async for record in self._store.adapters()}
        names = found.keys() | self._adapters.keys()
        self._apply({name: found.get(name) for name in names}, cursor)
        if not self._connected:
            _log.info("the registry is read", adapters=len(found), generation=cursor.generation)
        self._connected = True
        self._synced.set()

    async def _follow_until_resync(self) -> None:
        clock = asyncio.get_running_loop().time
        resync_at = clock() + self._resync_s
        while clock() < resync_at:
            assert self._cursor is not None, "a snapshot sets it"
            changes = await self._store.changes(self._cursor, wait_s=_WAIT_S)
            if changes.names is None:
                return
            names = sorted(changes.names)
            records = await self._store.get_adapters(names)
            self._apply(dict(zip(names, records, strict=True)), changes.cursor)
            for hint in changes.prefetches:
                _tell(self._prefetch_listeners, hint)

    def _apply(self, records: dict[str, AdapterRecord | None], cursor: Cursor) -> None:
        """Make the view contain these records, all at once; None removes an adapter."""
        self._cursor = cursor
        changed = frozenset(
            name for name, record in records.items() if self._adapters.get(name) != record
        )
        for name in changed:
            self._replace(name, records[name])
        if changed:
            _tell(self._listeners, changed)

    def _replace(self, name: str, record: AdapterRecord | None) -> None:
        old = self._adapters.pop(name, None)
        for manifest in old.versions if old else ():
            owners = self._versions[manifest.id]
            del owners[name]
            if not owners:
                del self._versions[manifest.id]
        if record is not None:
            self._adapters[name] = record
            for manifest in record.versions:
                self._versions.setdefault(manifest.id, {})[name] = manifest

    def _require_synced(self) -> None:
        if not self.synced:
            raise Unavailable("the registry has not been read yet; it is being tried")


def _tell(listeners: list[Callable[[T], None]], what: T) -> None:
    for listener in listeners[:]:
        try:
            listener(what)
        except Exception as error:
            _log.error("a listener of the catalogue failed", exc_info=error)
