"""Servers and channels of the house over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorafleet.core.errors import Conflict, Exhausted, InvalidInput
from lorafleet.v1 import inference_pb2, inference_pb2_grpc
from lorafleet.wire.channel import (
    GrpcServer,
    Service,
    WireOptions,
    open_channel,
    open_sync_channel,
)
from lorafleet.wire.status import from_rpc_error

NAME = "lorafleet.v1.Inference"


class Echo(inference_pb2_grpc.InferenceServicer):
    """Tokenizes to lengths, and streams slowly."""

    async def Tokenize(self, request: Any, context: Any) -> Any:
        return inference_pb2.TokenizeResponse(token_ids=[len(request.text)])

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for number in range(10):
            yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(token_ids=[number]))
            await asyncio.sleep(0.03)


def _server(listen: str = "127.0.0.1:0", **options: Any) -> GrpcServer:
    add = partial(inference_pb2_grpc.add_InferenceServicer_to_server, Echo())
    return GrpcServer(listen, [Service(name=NAME, add=add)], **options)


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    server = _server()
    await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(server.address) as channel:
        yield channel


async def test_port_zero_picks_a_free_one(server: GrpcServer, channel: grpc.aio.Channel) -> None:
    assert server.address.startswith("127.0.0.1:")
    assert not server.address.endswith(":0")
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    response = await stub.Tokenize(inference_pb2.TokenizeRequest(text="abc"))
    assert list(response.token_ids) == [3]


async def test_a_blocking_channel_reaches_it_too(server: GrpcServer) -> None:
    def call() -> list[int]:
        with open_sync_channel(server.address) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            return list(stub.Tokenize(inference_pb2.TokenizeRequest(text="abcd")).token_ids)

    assert await asyncio.to_thread(call) == [4]


async def test_a_port_in_use_is_an_error_and_not_shared(server: GrpcServer) -> None:
    with pytest.raises(Conflict, match="another process uses the port"):
        await _server(server.address).start()


@pytest.mark.parametrize("listen", ["", "127.0.0.1", "127.0.0.1:", ":80", "h:99999", "h:-1", "h:x"])
async def test_a_malformed_address_is_refused(listen: str) -> None:
    with pytest.raises(InvalidInput, match="expected host:port"):
        await _server(listen).start()


async def test_before_start_it_has_no_address() -> None:
    server = _server()
    with pytest.raises(Conflict, match="not running"):
        _ = server.address
    await server.stop()


async def test_messages_over_the_limit_are_refused_on_either_side(server: GrpcServer) -> None:
    request = inference_pb2.TokenizeRequest(text="x" * (5 << 20))
    for options in (WireOptions(), WireOptions(max_message_bytes=16 << 20)):
        async with open_channel(server.address, options) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Tokenize(request)
            assert isinstance(from_rpc_error(caught.value), Exhausted)


async def test_larger_messages_pass_where_both_sides_allow_them() -> None:
    options = WireOptions(max_message_bytes=16 << 20)
    server = _server(options=options)
    async with open_channel(await server.start(), options) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        response = await stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * (5 << 20)))
        assert list(response.token_ids) == [5 << 20]
    await server.stop(0)


async def _health(channel: grpc.aio.Channel, service: str) -> str:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def test_health_follows_what_the_server_says(
    server: GrpcServer, channel: grpc.aio.Channel
) -> None:
    assert await _health(channel, "") == "SERVING"
    assert await _health(channel, NAME) == "SERVING"
    await server.set_serving(NAME, False)
    assert await _health(channel, NAME) == "NOT_SERVING"
    assert await _health(channel, "") == "SERVING"
    await server.set_serving(NAME, True)
    assert await _health(channel, NAME) == "SERVING"


async def test_a_service_may_begin_as_not_serving() -> None:
    add = partial(inference_pb2_grpc.add_InferenceServicer_to_server, Echo())
    server = GrpcServer("127.0.0.1:0", [Service(name=NAME, add=add, serving=False)])
    async with open_channel(await server.start()) as channel:
        assert await _health(channel, NAME) == "NOT_SERVING"
        assert await _health(channel, "") == "SERVING"
    await server.stop(0)


async def test_health_can_be_watched(server: GrpcServer, channel: grpc.aio.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME))
    statuses = health_pb2.HealthCheckResponse
    assert (await watch.read()).status == statuses.SERVING
    await server.set_serving(NAME, False)
    assert (await watch.read()).status == statuses.NOT_SERVING
    watch.cancel()


async def test_a_graceful_stop_lets_running_streams_end_and_refuses_new_calls(
    server: GrpcServer, channel: grpc.aio.Channel
) -> None:
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    stream = stub.Generate(inference_pb2.GenerateRequest(text="x"))
    received = [await stream.read()]
    stopping = asyncio.create_task(server.stop(5.0))
    await asyncio.sleep(0.02)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(inference_pb2.TokenizeRequest(text="x"))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    received += await _drain(stream)
    assert [response.delta.token_ids[0] for response in received] == list(range(10))
    await stopping
    await server.stop()


async def test_after_the_grace_running_streams_are_cut(
    server: GrpcServer, channel: grpc.aio.Channel
) -> None:
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    stream = stub.Generate(inference_pb2.GenerateRequest(text="x"))
    await stream.read()
    await server.stop(0.05)
    with pytest.raises(grpc.aio.AioRpcError):
        await _drain(stream)


async def test_reflection_names_our_services(server: GrpcServer) -> None:
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )

    def services() -> set[str]:
        with open_sync_channel(server.address) as channel:
            return set(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert {NAME, "grpc.health.v1.Health"} <= await asyncio.to_thread(services)


@pytest.mark.parametrize("side", [WireOptions.for_client, WireOptions.for_server])
def test_options_are_integers_by_distinct_names(side: Callable[..., Any]) -> None:
    options = side(WireOptions(keepalive_time_s=0.5, max_message_bytes=1000))
    assert len({name for name, _ in options}) == len(options)
    assert dict(options)["grpc.keepalive_time_ms"] == 500
    assert dict(options)["grpc.max_receive_message_length"] == 1000
    assert all(isinstance(value, int) for _, value in options)


async def test_a_server_that_vanishes_without_a_word_is_noticed_by_keepalive(
    server: GrpcServer,
) -> None:
    """A proxy that stops passing anything on stands for a machine that lost its power."""
    passing = asyncio.Event()
    passing.set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await passing.wait()
            writer.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = server.address.split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(
            pump(reader, far_writer), pump(far_reader, writer), return_exceptions=True
        )

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    address = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    options = WireOptions(keepalive_time_s=0.2, keepalive_timeout_s=0.2)
    async with open_channel(address, options) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        stream = stub.Generate(inference_pb2.GenerateRequest(text="x"))
        await stream.read()
        passing.clear()
        begun = asyncio.get_running_loop().time()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _drain(stream)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert asyncio.get_running_loop().time() - begun < 3
        passing.set()
    proxy.close()


async def _drain(stream: Any) -> list[Any]:
    """Read a stream to its end."""
    responses = []
    while (response := await stream.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses
