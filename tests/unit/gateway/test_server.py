"""Readiness, a start without Redis, and a graceful end."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway_support import House, eventually, write_model_dir
from lorafleet.core.errors import Conflict, InvalidInput, Unavailable
from lorafleet.gateway import Gateway, GatewayOptions
from lorafleet.registry.embedded import EmbeddedRedis
from lorafleet.v1 import inference_pb2
from lorafleet.wire.status import from_rpc_error

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(house: House, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(house.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_it_is_healthy_only_with_a_replica(house) -> None:
    await house.open()
    for service in ("", "lorafleet.v1.Inference"):
        assert await health(house, service) == NOT_SERVING
    assert await health(house, "lorafleet.v1.Fleet") == SERVING
    replica = await house.replica("a")
    await house.ready(1)
    for service in ("", "lorafleet.v1.Inference"):
        assert await health(house, service) == SERVING
    await replica.server.stop(0.0)
    await eventually(lambda: not house.gateway.ready)
    assert await health(house) == NOT_SERVING


async def test_without_a_replica_requests_are_unavailable(house) -> None:
    await house.open()
    with pytest.raises(grpc.RpcError) as caught:
        await house.ask()
    assert isinstance(from_rpc_error(caught.value), Unavailable)


async def test_redis_away_at_the_start_is_waited_for(tmp_path) -> None:
    server = EmbeddedRedis(tmp_path / "redis")
    url = server.start()
    server.stop()
    house = House(url, write_model_dir(tmp_path))
    try:
        await house.open()
        assert await health(house) == NOT_SERVING
        for adapter in ("", "pirate"):
            with pytest.raises(grpc.RpcError) as caught:
                await house.ask(adapter)
            assert isinstance(from_rpc_error(caught.value), Unavailable)
        again = EmbeddedRedis(tmp_path / "redis", port=int(url.rpartition(":")[2].split("/")[0]))
        again.start()
        house.exit.callback(again.stop)
        await house.replica("a")
        await house.ready(1)
        assert await health(house) == SERVING
        version = await house.publish("pirate")
        assert (await house.ask("pirate"))[0].started.version == version
    finally:
        await house.close()


async def test_redis_away_later_does_not_stop_known_adapters(tmp_path) -> None:
    server = EmbeddedRedis(tmp_path / "redis")
    house = House(server.start(), write_model_dir(tmp_path))
    try:
        version = await house.publish("pirate")
        await house.replica("a")
        await (await house.open()).ready(1)
        await house.ask("pirate")
        server.stop()
        for _ in range(20):
            assert (await house.ask("pirate"))[0].started.version == version
            await asyncio.sleep(0.01)
        assert await health(house) == SERVING
    finally:
        await house.close()


async def test_stopping_lets_streams_end_and_takes_no_new_ones(house) -> None:
    only = await house.replica("only")
    await (await house.open()).ready(1)
    release = asyncio.Event()

    async def patient(request):
        async for response in only.greet(request):
            yield response
            await release.wait()

    only.answer = patient
    call = house.stub.Generate(inference_pb2.GenerateRequest(text="x"))
    await eventually(lambda: only.running == 1)
    stopping = asyncio.create_task(house.gateway.stop(10.0))
    await asyncio.sleep(0.1)
    with pytest.raises(grpc.RpcError) as caught:
        await house.ask()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    release.set()
    events = [event async for event in call]
    assert events[-1].HasField("finished")
    await asyncio.wait_for(stopping, 5.0)
    assert not house.gateway.ready


async def test_streams_that_outlive_the_grace_are_cut(house) -> None:
    only = await house.replica("only")
    await (await house.open()).ready(1)
    only.answer = only.stuck
    call = house.stub.Generate(inference_pb2.GenerateRequest(text="x"))
    await eventually(lambda: only.running == 1)
    await asyncio.wait_for(house.gateway.stop(0.2), 5.0)
    with pytest.raises(grpc.RpcError):
        await call.read()
    await eventually(lambda: only.running == 0)
    await house.gateway.stop()


async def test_what_cannot_start_says_why(house, tmp_path) -> None:
    await house.open()
    taken = GatewayOptions(
        redis_url=house.redis_url, model_dir=house.model_dir, listen=house.address
    )
    with pytest.raises(Conflict, match=house.address):
        await Gateway(taken).start()
    nothing = GatewayOptions(redis_url=house.redis_url, model_dir=tmp_path / "none")
    with pytest.raises(InvalidInput, match="no compiled model"):
        await Gateway(nothing).start()
