"""The registry's admin process: the servicer on a port, and its health by Redis's.

It owns start, stop and readiness; the work is the service's. While Redis is away the process stays
up and reports `lorafleet.v1.AdapterRegistry` as not serving, so that it may start before Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from lorafleet import native
from lorafleet.adapters import load_adapter
from lorafleet.core.errors import InvalidInput, LorafleetError
from lorafleet.core.log import get_logger
from lorafleet.core.model import BaseModel
from lorafleet.registry.auth import authorise_by, needed_scope
from lorafleet.registry.blobs import BlobStore
from lorafleet.registry.changes import DEFAULT_GRACE_S
from lorafleet.registry.garbage import collect_forever
from lorafleet.registry.keyring import Keyring, read_operator
from lorafleet.registry.pushing import PushLimits
from lorafleet.registry.rebuild import reconcile_forever
from lorafleet.registry.service import Policy, RegistryService
from lorafleet.registry.store import RegistryStore
from lorafleet.registry.tenants_service import TenantsService
from lorafleet.v1 import registry_pb2, registry_pb2_grpc, tenants_pb2, tenants_pb2_grpc
from lorafleet.wire.channel import GrpcServer, Service

SERVICE = registry_pb2.DESCRIPTOR.services_by_name["AdapterRegistry"].full_name
TENANTS = tenants_pb2.DESCRIPTOR.services_by_name["Tenants"].full_name

MIRROR = "mirror"
"""The folder in that of the blobs from which a Redis that lost its data is rebuilt."""

_PROBE_EVERY_S = 1.0
_RECONCILE_EVERY_S = 0.5

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What the admin process needs to know.

    Parameters
    ----------
    redis_url, blobs_dir, model_dir
        The registry's Redis, its blob store, the compiled base model.
    listen : str
        `host:port`; port 0 picks a free one.
    limits : PushLimits
        Bounds of a push.
    operator_key_file : Path, optional
        Has the operator's own API key; made with a fresh one if it is not there.
    auth : bool, optional
        Whether callers need a key; if not given, they do where there is an operator key file.
    allow_sources : tuple of str
        URLs at or below which adapters may be imported from.
    trash_grace_s : float
        How long a deleted adapter can be restored.
    gc_every_s : float
        Between two collections of garbage.
    """

    redis_url: str
    blobs_dir: Path
    model_dir: Path
    listen: str
    limits: PushLimits = field(default_factory=PushLimits)
    operator_key_file: Path | None = None
    auth: bool | None = None
    allow_sources: tuple[str, ...] = ()
    trash_grace_s: float = DEFAULT_GRACE_S
    gc_every_s: float = 3600.0


class RegistryServer:
    """The admin process, as an object; start and stop it on one event loop."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._exit = contextlib.AsyncExitStack()
        self._server: GrpcServer | None = None

    async def start(self) -> str:
        """Serve and return the address; Redis need not be there.

        Raises
        ------
        InvalidInput
            The model directory is no compiled model, an allowed source is malformed, or the server
            would be open to other machines without asking for keys.
        Conflict
            The address is in use.
        Internal
            The native library was not built.
        """
        options = self._options
        authorised = options.auth if options.auth is not None else bool(options.operator_key_file)
        if not authorised and not _is_loopback(options.listen):
            raise InvalidInput(
                f"listen: {options.listen} is open to other machines; give --operator-key-file, or "
                "listen on 127.0.0.1",
                field="listen",
            )
        base = await asyncio.to_thread(BaseModel.read, options.model_dir)
        await asyncio.to_thread(native.load)  # takes seconds: not at the expense of the first push
        async with contextlib.AsyncExitStack() as stack:
            store = RegistryStore(options.redis_url, mirror=options.blobs_dir / MIRROR)
            blobs = BlobStore(options.blobs_dir)
            stack.push_async_callback(store.close)
            service = RegistryService(
                store,
                blobs,
                load=functools.partial(load_adapter, base=base),
                limits=options.limits,
                policy=Policy(
                    allow_sources=options.allow_sources,
                    grace_s=options.trash_grace_s,
                    create_tenants=not authorised,
                ),
            )
            stack.callback(service.close)
            authorise = None
            if authorised:
                keyring = Keyring(store, read_operator(options.operator_key_file))
                stack.push_async_callback(keyring.stop)
                await keyring.start(wait_s=0.0)
                authorise = authorise_by(keyring.authenticate, needed_scope, "admin plane")
            self._server = GrpcServer(
                options.listen, _services(service, TenantsService(store)), authorise=authorise
            )
            address = await self._server.start()
            garbage = collect_forever(store, blobs, every_s=options.gc_every_s)
            collector = asyncio.create_task(garbage, name="garbage")
            stack.push_async_callback(_cancel, collector)
            assert store.rebuilder is not None
            mirroring = reconcile_forever(store.rebuilder, every_s=_RECONCILE_EVERY_S)
            reconciler = asyncio.create_task(mirroring, name="mirror")
            stack.push_async_callback(_cancel, reconciler)
            probe = asyncio.create_task(self._probe(self._server, store), name="redis probe")
            stack.push_async_callback(_cancel, probe)
            self._exit = stack.pop_all()
        _log.info("the registry serves", address=address, base=base.name)
        return address

    async def stop(self, grace_s: float = 10.0) -> None:
        """Refuse new calls, let running ones end, and close everything."""
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None
        await self._exit.aclose()
        _log.info("the registry has stopped")

    async def _probe(self, server: GrpcServer, store: RegistryStore) -> None:
        """Report the service's health by whether Redis answers."""
        serving: bool | None = None
        while True:
            try:
                await store.ping()
                now = True
            except LorafleetError as error:
                now = False
                if serving is not False:
                    _log.warning("Redis is away; pushes fail until it is back", error=error.message)
            if now != serving:
                for name in (SERVICE, TENANTS):
                    await server.set_serving(name, now)
                serving = now
            await asyncio.sleep(_PROBE_EVERY_S)


def _services(adapters: RegistryService, tenants: TenantsService) -> list[Service]:
    add_adapters = registry_pb2_grpc.add_AdapterRegistryServicer_to_server
    add_tenants = tenants_pb2_grpc.add_TenantsServicer_to_server
    return [
        Service(name=SERVICE, add=functools.partial(add_adapters, adapters), serving=False),
        Service(name=TENANTS, add=functools.partial(add_tenants, tenants), serving=False),
    ]


def _is_loopback(listen: str) -> bool:
    host = listen.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
