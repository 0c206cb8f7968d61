"""What the registry asks of one replica: keep pinned versions, load hinted ones, drop deleted ones.

A pin says on how many replicas a version stays. Which ones, each replica works out by itself, by
the order in which the router would choose them: so they agree without talking, and requests find
the pinned copies. It owns no lease and serves no request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

from lorafleet.core.errors import LorafleetError, NotFound, Unavailable
from lorafleet.core.log import get_logger
from lorafleet.core.manifest import VersionManifest
from lorafleet.engine import Engine
from lorafleet.registry import Catalogue, RegistryStore
from lorafleet.registry.feed import Prefetch
from lorafleet.routing.rendezvous import Rendezvous

_LOOK_EVERY_S = 1.0

_log = get_logger(__name__)


def chosen(version: str, count: int, replicas: Iterable[str]) -> frozenset[str]:
    """The replicas that hold a version of which so many are wanted."""
    ring = Rendezvous()
    for replica in replicas:
        ring = ring.added(replica, 1)
    order = ring.order(version)
    return frozenset(replica for _, replica in zip(range(count), order, strict=False))


class Follower:
    """Follows the catalogue for an engine.

    Parameters
    ----------
    engine, catalogue, store
        Of the replica, and started.
    replica_id : str
        Its name among the live replicas.
    """

    def __init__(
        self, engine: Engine, catalogue: Catalogue, store: RegistryStore, replica_id: str
    ) -> None:
        self._engine = engine
        self._catalogue = catalogue
        self._store = store
        self._replica_id = replica_id
        self._live: Sequence[str] = (replica_id,)
        self._kept: list[str] = []
        self._changed = asyncio.Event()
        self._prefetches: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; the catalogue's changes are acted on at once."""
        self._catalogue.on_change(lambda _: self._changed.set())
        self._catalogue.on_prefetch(self._take_hint)
        self._task = asyncio.create_task(self._follow(), name="following")

    async def stop(self) -> None:
        """Ask nothing more of the engine."""
        tasks = [*self._prefetches, *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _follow(self) -> None:
        while True:
            try:
                await self._look()
            except LorafleetError as error:
                _log.warning("what the registry asks cannot be done", error=error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._changed.wait()
                self._changed.clear()

    async def _look(self) -> None:
        await self._unload_deleted()
        pinned = self._pinned()
        if pinned:
            await self._refresh_live()
        keep = [
            manifest.id
            for manifest, count in pinned
            if self._replica_id in chosen(manifest.id, count, self._live)
        ]
        if keep != self._kept:
            await asyncio.to_thread(self._engine.keep, keep)
            self._kept = keep
            _log.info("pinned versions", keep=keep)

    def _pinned(self) -> list[tuple[VersionManifest, int]]:
        """Pinned versions of this base model; those on the most replicas first."""
        found: dict[str, tuple[VersionManifest, int]] = {}
        for name in self._catalogue.names():
            record = self._catalogue.adapter(name)
            for version, count in record.pins.items():
                manifest = record.version(version)
                if manifest.base_digest == self._engine.base.digest:
                    found[version] = (manifest, max(count, found.get(version, (manifest, 0))[1]))
        return sorted(found.values(), key=lambda pin: (-pin[1], pin[0].id))

    async def _refresh_live(self) -> None:
        """Ask who else is there; without Redis the last answer holds."""
        with contextlib.suppress(Unavailable):
            leases = await self._store.leases.live_replicas()
            digest = self._engine.base.digest
            live = {lease.replica_id for lease in leases if lease.base_digest == digest}
            self._live = sorted(live | {self._replica_id})

    def _take_hint(self, hint: Prefetch) -> None:
        task = asyncio.create_task(self._prefetch(hint), name="prefetch")
        self._prefetches.add(task)
        task.add_done_callback(self._prefetches.discard)

    async def _prefetch(self, hint: Prefetch) -> None:
        try:
            if self._catalogue.manifest(hint.version).base_digest != self._engine.base.digest:
                return
            await self._refresh_live()
            if self._replica_id in chosen(hint.version, hint.replicas, self._live):
                await asyncio.to_thread(self._engine.prefetch, hint.version)
        except LorafleetError as error:
            _log.warning("a prefetch failed", version=hint.version, error=error.message)

    async def _unload_deleted(self) -> None:
        """Versions that nobody can ask for any more give their pages back."""
        for version in self._engine.residency().resident:
            try:
                self._catalogue.manifest(version)
            except NotFound:
                with contextlib.suppress(LorafleetError):
                    # In use: it goes when the pool needs its pages.
                    await asyncio.to_thread(self._engine.unload, version)
            except Unavailable:
                return
