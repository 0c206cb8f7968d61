"""How a replica comes, holds its lease through Redis's troubles, and goes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import redis

from lorafleet.core.errors import Unavailable
from lorafleet.fleet.replica import Replica, ReplicaOptions
from lorafleet.registry import EmbeddedRedis, RegistryStore
from lorafleet.sdk import AsyncClient
from lorafleet.v1 import replica_pb2_grpc
from lorafleet.wire.channel import open_channel
from lorafleet.wire.status import from_rpc_error
from support.replica import TOKENS, Served, eventually, leased, serve


async def test_its_lease_has_its_address_and_its_base_and_lasts(served: Served) -> None:
    lease = served.lease
    assert lease.address.startswith("127.0.0.1:")
    assert lease.base_digest.startswith("sha256:")
    await asyncio.sleep(3.5)  # longer than a lease without renewal
    assert await served.store.leases.live_replicas() == [lease]
    served.replica.check_health()


async def test_c40_after_redis_lost_everything_it_takes_a_higher_epoch(served: Served) -> None:
    with redis.Redis.from_url(served.options.redis_url) as client:
        client.flushall()
    renewed = await leased(served.store, "only", above_epoch=served.lease.epoch)
    assert renewed.address == served.lease.address
    report = await served.watch().read()
    assert report.epoch == renewed.epoch


async def test_c40_with_redis_away_it_serves_what_it_knows_and_comes_back(
    options: ReplicaOptions, registry: AsyncClient, version: str, tmp_path: Path
) -> None:
    del registry
    with EmbeddedRedis(tmp_path / "redis") as server:
        async with serve(replace(options, redis_url=server.url)) as served:
            server.stop()
            await asyncio.sleep(1.5)
            assert len((await served.answer())[1]) == TOKENS
            served.replica.check_health()
            server.start()
            await leased(served.store, "only")


async def test_c40_without_redis_at_the_start_it_waits_for_the_catalogue_before_it_shows_itself(
    options: ReplicaOptions, tmp_path: Path
) -> None:
    server = EmbeddedRedis(tmp_path / "redis")
    url = server.start()
    server.stop()
    replica, store = Replica(replace(options, redis_url=url)), RegistryStore(url)
    starting = asyncio.create_task(replica.start())
    await asyncio.sleep(1.0)
    server.start()  # the same port again
    try:
        await starting
        await leased(store, "only")
        replica.check_health()
    finally:
        await replica.stop(grace_s=0.0)
        await store.close()
        server.stop()


async def test_one_whose_lease_was_taken_is_to_be_replaced(served: Served) -> None:
    await served.store.leases.register("only", "127.0.0.1:1", served.lease.base_digest)

    def unhealthy() -> bool:
        try:
            served.replica.check_health()
        except Unavailable:
            return True
        return False

    await eventually(unhealthy)


async def test_at_the_end_streams_finish_new_requests_go_elsewhere_and_the_lease_is_given_back(
    options: ReplicaOptions,
) -> None:
    async with serve(options) as served:
        stream = aiter(served.generate(tokens=300))
        await anext(stream)
        watch = served.watch()
        stopping = asyncio.create_task(served.replica.stop(grace_s=30.0))
        async with asyncio.timeout(5):
            while not (await watch.read()).draining:
                pass
        with pytest.raises(grpc.RpcError) as caught:
            await served.answer()
        assert isinstance(from_rpc_error(caught.value), Unavailable)
        assert "draining" in from_rpc_error(caught.value).message
        events = [response.WhichOneof("event") async for response in stream]
        assert events.count("delta") == 300
        assert events[-1] == "finished"
        await stopping
        assert await served.store.leases.live_replicas() == []


async def test_a_stopped_replica_answers_nobody(options: ReplicaOptions) -> None:
    async with serve(options) as served:
        address = served.lease.address
    async with open_channel(address) as channel:
        stub = replica_pb2_grpc.ReplicaStub(channel)  # type: ignore[no-untyped-call]
        served.stub = stub
        with pytest.raises(grpc.RpcError):
            await served.answer()
