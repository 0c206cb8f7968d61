"""A replica over `tiny4` without Ray, and a gRPC client to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from lorafleet.fleet.replica import Replica, ReplicaOptions
from lorafleet.registry import RegistryStore
from lorafleet.v1 import inference_pb2, replica_pb2, replica_pb2_grpc
from lorafleet.wire.channel import open_channel

TOKENS = 6


async def eventually(true: Callable[[], Any], timeout_s: float = 15.0) -> None:
    """Wait until something, asked again and again, holds; it may be a coroutine function."""
    async with asyncio.timeout(timeout_s):
        while True:
            held = true()
            if asyncio.iscoroutine(held):
                held = await held
            if held:
                return
            await asyncio.sleep(0.02)


@dataclass(kw_only=True)
class Served:
    """A running replica and what it takes to talk to it."""

    replica: Replica
    lease: Any
    stub: Any
    store: RegistryStore
    options: ReplicaOptions

    def generate(
        self, version: str = "", *, tokens: int = TOKENS, **prompt: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Send a request; the call can be iterated and cancelled."""
        prompt = prompt or {"token_ids": inference_pb2.TokenIds(ids=[5, 6, 7])}
        sampling = inference_pb2.SamplingParams(max_tokens=tokens)
        call: AsyncIterator[inference_pb2.GenerateResponse] = self.stub.Generate(
            replica_pb2.ReplicaGenerateRequest(
                version=version, request_id="r1", sampling=sampling, **prompt
            )
        )
        return call

    async def answer(self, version: str = "", **prompt: Any) -> tuple[Any, list[int], Any]:
        """A whole answer: Started, token ids, Finished."""
        started, ids, finished = None, [], None
        async for response in self.generate(version, **prompt):
            match response.WhichOneof("event"):
                case "started":
                    started = response.started
                case "delta":
                    ids += response.delta.token_ids
                case "finished":
                    finished = response.finished
        return started, ids, finished

    def watch(self) -> Any:
        return self.stub.WatchResidency(replica_pb2.WatchResidencyRequest())


@asynccontextmanager
async def serve(options: ReplicaOptions) -> AsyncIterator[Served]:
    """Run a replica and wait for its lease."""
    replica, store = Replica(options), RegistryStore(options.redis_url)
    await replica.start()
    try:
        lease = await leased(store, options.replica_id)
        async with open_channel(lease.address) as channel:
            stub = replica_pb2_grpc.ReplicaStub(channel)  # type: ignore[no-untyped-call]
            yield Served(replica=replica, lease=lease, stub=stub, store=store, options=options)
    finally:
        await replica.stop(grace_s=0.0)
        await store.close()


async def leased(store: RegistryStore, replica_id: str, *, above_epoch: int = 0) -> Any:
    """The lease of a replica, once it has one above an epoch."""
    found: list[Any] = []

    async def there() -> bool:
        found[:] = [
            lease
            for lease in await store.leases.live_replicas()
            if lease.replica_id == replica_id and lease.epoch > above_epoch
        ]
        return bool(found)

    await eventually(there)
    return found[0]
