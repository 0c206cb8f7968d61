"""One replica: an engine, its gRPC port, its lease, and its view of the registry.

It owns the order in which these start and stop, and the renewal of the lease. It knows nothing of
Ray (`app` puts it into an actor) and nothing of routing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lorafleet.adapters import LoraAdapter, load_adapter
from lorafleet.core.errors import Conflict, LorafleetError, NotFound, Unavailable
from lorafleet.core.log import get_logger
from lorafleet.core.manifest import VersionManifest
from lorafleet.engine import Engine, EngineOptions
from lorafleet.fleet.following import Follower
from lorafleet.fleet.service import REPLICA, ReplicaService
from lorafleet.registry import BlobStore, Catalogue, RegistryStore
from lorafleet.v1.replica_pb2_grpc import add_ReplicaServicer_to_server
from lorafleet.wire.channel import GrpcServer, Service

_LEASE_TTL_S = 3.0
_CATALOGUE_LAG_S = 2.0
"""How long a version may be known to the gateway before this replica must have heard of it."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """What a replica is told.

    Parameters
    ----------
    replica_id : str
        Fresh at each start.
    model_dir, blobs_dir : Path
        The compiled model; the registry's blob store.
    redis_url : str
        The registry's Redis.
    host : str
        The address under which gateways reach this machine.
    engine : EngineOptions
        The engine's sizes.
    """

    replica_id: str
    model_dir: Path
    blobs_dir: Path
    redis_url: str
    host: str = "127.0.0.1"
    engine: EngineOptions = field(default_factory=EngineOptions)


class Replica:
    """A serving replica in the running event loop."""

    def __init__(self, options: ReplicaOptions) -> None:
        self._options = options
        self._engine = Engine(options.model_dir, options=options.engine)
        self._blobs = BlobStore(options.blobs_dir)
        self._store = RegistryStore(options.redis_url)
        self._catalogue = Catalogue(self._store)
        self._follower = Follower(self._engine, self._catalogue, self._store, options.replica_id)
        self._service = ReplicaService(self._engine, options.replica_id)
        self._server = GrpcServer(
            f"{options.host}:0",
            [Service(name=REPLICA, add=partial(add_ReplicaServicer_to_server, self._service))],
        )
        self._lease: asyncio.Task[None] | None = None
        self._fenced = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Load the model, read the catalogue, serve, and take the lease.

        With Redis away it starts, and takes the lease when it has read the catalogue.
        """
        started_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._engine.start)
        self._engine.set_source(self._find_version)
        # Before the lease: a gateway must not send names of which this replica has not heard.
        await self._catalogue.start()
        self._follower.start()
        address = await self._server.start()
        self._lease = asyncio.create_task(self._hold_lease(address), name="lease")
        _log.info(
            "replica started",
            replica=self._options.replica_id,
            address=address,
            seconds=round(time.monotonic() - started_s, 2),
        )

    def check_health(self) -> None:
        """Raise Unavailable when the replica must be replaced."""
        if not self._engine.is_alive:
            raise Unavailable("the engine's step thread has stopped")
        if self._fenced:
            raise Unavailable("another process holds this replica's lease")

    async def stop(self, grace_s: float = 10.0) -> None:
        """Drain: report it, give the lease back, let running streams end, then stop."""
        self._service.drain()
        if self._lease is not None:
            self._lease.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._lease
        await self._service.finish(grace_s)
        await self._server.stop(1.0)
        await self._follower.stop()
        await self._catalogue.stop()
        await self._store.close()
        await asyncio.to_thread(self._engine.stop)
        _log.info("replica stopped", replica=self._options.replica_id)

    async def _hold_lease(self, address: str) -> None:
        """Register and renew for as long as the replica lives; give it back at the end."""
        leases, replica_id = self._store.leases, self._options.replica_id
        digest = self._engine.base.digest
        epoch = 0
        try:
            while not await self._catalogue.wait_synced(_LEASE_TTL_S):
                _log.warning("the registry was not read yet; no lease is taken before")
            while True:
                try:
                    if epoch == 0 or not await self._renewed(epoch):
                        epoch = await leases.register(
                            replica_id, address, digest, ttl_s=_LEASE_TTL_S, after_epoch=epoch
                        )
                        self._service.set_epoch(epoch)
                except Conflict as error:
                    _log.error("replica is fenced off", error=error.message)
                    self._fenced = True
                    return
                except LorafleetError as error:
                    _log.warning("the lease cannot be renewed", error=error.message)
                await asyncio.sleep(_LEASE_TTL_S / 3)
        finally:
            if epoch and not self._fenced:
                with contextlib.suppress(LorafleetError, TimeoutError):
                    async with asyncio.timeout(1.0):
                        await leases.release(replica_id, epoch)

    async def _renewed(self, epoch: int) -> bool:
        try:
            await self._store.leases.renew(self._options.replica_id, epoch, ttl_s=_LEASE_TTL_S)
        except NotFound:
            return False
        return True

    def _find_version(self, version: str) -> LoraAdapter:
        """The engine's source: from the blob store, by the catalogue. Loader threads."""
        assert self._loop is not None
        asked = asyncio.run_coroutine_threadsafe(self._manifest(version), self._loop)
        manifest = asked.result()
        directory = self._blobs.materialise(manifest)
        # What the tensors hash to is the version, which is compared.
        adapter = load_adapter(directory, self._engine.base, known=manifest.files)
        if adapter.version != version:
            raise Unavailable(f"the blobs of {version} make {adapter.version}; push it again")
        return adapter

    async def _manifest(self, version: str) -> VersionManifest:
        deadline_s = time.monotonic() + _CATALOGUE_LAG_S
        while True:
            try:
                return self._catalogue.manifest(version)
            except NotFound:
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(0.01)
