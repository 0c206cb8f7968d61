"""The gateway as a whole: its parts, in the order in which they start and stop.

It owns readiness: healthy means that the registry was read once and that at least one replica takes
requests. Redis may be away at the start; the gateway then serves what it can and goes on trying.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lorafleet.core.log import get_logger
from lorafleet.core.model import BaseModel
from lorafleet.core.tenant import Scope
from lorafleet.gateway.dispatch import Dispatcher
from lorafleet.gateway.door import Door
from lorafleet.gateway.limits import Meter
from lorafleet.gateway.replicas import PoolOptions, ReplicaPool
from lorafleet.gateway.resolve import Resolver
from lorafleet.gateway.service import FLEET, INFERENCE, FleetService, InferenceService
from lorafleet.gateway.tasks import end
from lorafleet.registry.auth import authorise_by
from lorafleet.registry.catalogue import Catalogue
from lorafleet.registry.keyring import Keyring, read_operator
from lorafleet.registry.store import RegistryStore
from lorafleet.routing import FleetView
from lorafleet.v1.fleet_pb2_grpc import add_FleetServicer_to_server
from lorafleet.v1.inference_pb2_grpc import add_InferenceServicer_to_server
from lorafleet.wire.channel import GrpcServer, Service

_HEALTH_PERIOD_S = 0.1

# After the last request has ended, its status may still be on its way to the client.
_LAST_WORDS_S = 1.0

_log = get_logger(__name__)


def needed_scope(method: str) -> Scope:
    """The scope that a method of the gateway needs; the fleet's state is of all tenants."""
    return Scope.DATA if method.startswith(f"/{INFERENCE}/") else Scope.OPERATOR


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """What a gateway is told.

    Parameters
    ----------
    redis_url : str
        The registry's Redis.
    model_dir : Path
        The compiled base model; only its description is read.
    listen : str
        `host:port`; port 0 picks a free one.
    require_keys : bool
        Whether callers need an API key; each then sees its own tenant's adapters and the default's.
    operator_key_file : Path, optional
        Has the operator's own API key, which is valid beside those in the registry.
    pool : PoolOptions
        How closely replicas are followed.
    """

    redis_url: str
    model_dir: Path
    listen: str = "127.0.0.1:8470"
    require_keys: bool = False
    operator_key_file: Path | None = None
    pool: PoolOptions = field(default_factory=PoolOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    server: GrpcServer
    pool: ReplicaPool
    door: Door
    health: asyncio.Task[None]


class Gateway:
    """One gateway in the running event loop.

    Parameters
    ----------
    options : GatewayOptions
    """

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._exit = contextlib.AsyncExitStack()
        self._running: _Running | None = None
        self._ready = False

    @property
    def ready(self) -> bool:
        """Whether it takes requests that can be served."""
        return self._ready

    @property
    def view(self) -> FleetView:
        """The fleet as this gateway sees it; empty while it is not running."""
        return self._running.pool.view if self._running is not None else FleetView()

    async def start(self) -> str:
        """Serve; returns the address. Does not wait for Redis nor for replicas.

        Raises
        ------
        InvalidInput
            The model directory is incomplete.
        Conflict
            The address is in use.
        """
        options = self._options
        base = BaseModel.read(options.model_dir)
        async with contextlib.AsyncExitStack() as stack:
            store = RegistryStore(options.redis_url)
            stack.push_async_callback(store.close)
            catalogue = Catalogue(store)
            await catalogue.start(wait_s=0.0)
            stack.push_async_callback(catalogue.stop)
            keyring = Keyring(store, read_operator(options.operator_key_file))
            await keyring.start(wait_s=0.0)
            stack.push_async_callback(keyring.stop)
            meter = Meter(keyring.quota, store.usage)
            await meter.start()
            stack.push_async_callback(meter.stop)
            pool = ReplicaPool(store.leases, base.digest, options=options.pool)
            await pool.start()
            stack.push_async_callback(pool.stop)
            dispatcher = Dispatcher(
                resolver=Resolver(catalogue, store, base), pool=pool, meter=meter
            )
            door = Door()
            inference = InferenceService(dispatcher, catalogue, base, door)
            fleet = FleetService(pool, catalogue, base)
            server = GrpcServer(
                options.listen,
                [
                    Service(
                        name=INFERENCE, add=partial(add_InferenceServicer_to_server, inference)
                    ),
                    Service(name=FLEET, add=partial(add_FleetServicer_to_server, fleet)),
                ],
                authorise=(
                    authorise_by(keyring.authenticate, needed_scope, "gateway")
                    if options.require_keys
                    else None
                ),
            )
            address = await server.start()
            await self._tell(server, False)
            health = asyncio.create_task(self._follow_health(server, catalogue, pool))
            stack.push_async_callback(end, health)
            self._running = _Running(server=server, pool=pool, door=door, health=health)
            self._exit = stack.pop_all()
        _log.info("gateway started", address=address, base=base.name, digest=base.digest)
        return address

    async def stop(self, grace_s: float = 5.0) -> None:
        """Report not ready, refuse new requests, let streams end for `grace_s`, then close all."""
        if self._running is None:
            return
        running, self._running = self._running, None
        await end(running.health)
        await self._tell(running.server, False)
        running.door.close()
        empty = await running.door.wait_empty(grace_s)
        if not empty:
            _log.warning("requests are cut off", requests=running.door.inside, grace_s=grace_s)
        await running.server.stop(_LAST_WORDS_S if empty else 0.0)
        await self._exit.aclose()
        _log.info("gateway stopped")

    async def _follow_health(
        self, server: GrpcServer, catalogue: Catalogue, pool: ReplicaPool
    ) -> None:
        while True:
            ready = catalogue.synced and bool(pool.view.eligible)
            if ready != self._ready:
                await self._tell(server, ready)
                _log.info("gateway is ready" if ready else "gateway is not ready")
            await asyncio.sleep(_HEALTH_PERIOD_S)

    async def _tell(self, server: GrpcServer, ready: bool) -> None:
        """Set the health of the whole and of Inference; Fleet answers at any time."""
        self._ready = ready
        for name in ("", INFERENCE):
            await server.set_serving(name, ready)
