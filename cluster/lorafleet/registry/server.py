"""The registry's admin process: the servicer on a port, and its health by Redis's.

It owns start, stop and readiness; the work is the service's. While Redis is away the process stays
up and reports `lorafleet.v1.AdapterRegistry` as not serving, so that it may start before Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from dataclasses import dataclass, field
from pathlib import Path

from lorafleet import native
from lorafleet.adapters import load_adapter
from lorafleet.core.errors import LorafleetError
from lorafleet.core.log import get_logger
from lorafleet.core.model import BaseModel
from lorafleet.registry.blobs import BlobStore
from lorafleet.registry.service import PushLimits, RegistryService
from lorafleet.registry.store import RegistryStore
from lorafleet.v1 import registry_pb2, registry_pb2_grpc
from lorafleet.wire.channel import GrpcServer, Service

SERVICE = registry_pb2.DESCRIPTOR.services_by_name["AdapterRegistry"].full_name

_PROBE_EVERY_S = 1.0

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What the admin process needs to know; `listen` is `host:port`, port 0 picks a free one."""

    redis_url: str
    blobs_dir: Path
    model_dir: Path
    listen: str
    limits: PushLimits = field(default_factory=PushLimits)


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
            The model directory is no compiled model.
        Conflict
            The address is in use.
        Internal
            The native library was not built.
        """
        options = self._options
        base = await asyncio.to_thread(BaseModel.read, options.model_dir)
        await asyncio.to_thread(native.load)  # takes seconds: not at the expense of the first push
        async with contextlib.AsyncExitStack() as stack:
            store = RegistryStore(options.redis_url)
            stack.push_async_callback(store.close)
            service = RegistryService(
                store,
                BlobStore(options.blobs_dir),
                load=functools.partial(load_adapter, base=base),
                limits=options.limits,
            )
            stack.callback(service.close)
            add = functools.partial(
                registry_pb2_grpc.add_AdapterRegistryServicer_to_server, service
            )
            self._server = GrpcServer(
                options.listen, [Service(name=SERVICE, add=add, serving=False)]
            )
            address = await self._server.start()
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
                await server.set_serving(SERVICE, now)
                serving = now
            await asyncio.sleep(_PROBE_EVERY_S)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
