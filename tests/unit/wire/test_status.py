"""Errors over a real wire: the same class and facts on the other side, and no more than that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.core import errors
from lorafleet.core.errors import InvalidAdapter, LorafleetError, NotFound, Retry
from lorafleet.v1 import inference_pb2, inference_pb2_grpc
from lorafleet.wire.channel import GrpcServer, Service, open_channel, open_sync_channel
from lorafleet.wire.status import from_rpc_error, from_status, to_status

LEAVES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, LorafleetError) and kind is not LorafleetError
]


class Failing(inference_pb2_grpc.InferenceServicer):
    """Raises what it is told to, from every kind of method."""

    def __init__(self) -> None:
        self.error: Exception = NotFound("adapter 'x' is not registered", adapter="x")
        self.closed = asyncio.Event()

    async def ListModels(self, request: Any, context: Any) -> Any:
        raise self.error

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id="1"))
        raise self.error

    async def Chat(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            while True:
                yield inference_pb2.ChatResponse()
                await asyncio.sleep(0)
        finally:
            self.closed.set()

    async def Tokenize(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.DATA_LOSS, "its own way")


@pytest.fixture
def servicer() -> Failing:
    return Failing()


@pytest.fixture
async def address(servicer: Failing) -> AsyncIterator[str]:
    add = partial(inference_pb2_grpc.add_InferenceServicer_to_server, servicer)
    server = GrpcServer("127.0.0.1:0", [Service(name="lorafleet.v1.Inference", add=add)])
    yield await server.start()
    await server.stop(0)


@pytest.fixture
async def stub(address: str) -> AsyncIterator[Any]:
    async with open_channel(address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def _raised(stub: Any, method: str = "ListModels") -> grpc.aio.AioRpcError:
    request = getattr(inference_pb2, f"{method}Request")()
    call = getattr(stub, method)(request)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (_drain(call) if method == "Generate" else call)
    return caught.value


async def _drain(stream: Any) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize("kind", LEAVES)
async def test_every_error_arrives_as_itself(
    kind: type[LorafleetError], servicer: Failing, stub: Any
) -> None:
    servicer.error = kind("it is so", file="adapter_config.json", field="r", number=3)
    for method in ("ListModels", "Generate"):
        raised = await _raised(stub, method)
        assert raised.code().name == kind.code
        error = from_rpc_error(raised)
        assert type(error) is kind
        assert error.message == "it is so"
        assert error.facts == servicer.error.facts
        assert error.retry is kind.retry


async def test_a_blocking_client_gets_the_same(servicer: Failing, address: str) -> None:
    def call() -> LorafleetError:
        with open_sync_channel(address) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.ListModels(inference_pb2.ListModelsRequest())
            return from_rpc_error(caught.value)

    error = await asyncio.to_thread(call)
    assert type(error) is NotFound
    assert error.facts == {"adapter": "x"}


async def test_other_languages_see_googles_own_details(servicer: Failing, stub: Any) -> None:
    servicer.error = InvalidAdapter("bad rank", file="adapter_config.json", field="r")
    status = rpc_status.from_call(await _raised(stub))
    assert status is not None
    assert status.code == code_pb2.INVALID_ARGUMENT
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.reason, info.domain) == ("InvalidAdapter", "lorafleet")
    assert dict(info.metadata) == {
        "file": "adapter_config.json",
        "field": "r",
        "retry": Retry.NEVER.value,
    }
    (violation,) = bad.field_violations
    assert (violation.field, violation.description) == ("r", "bad rank")


async def test_a_bug_is_internal_logged_here_and_told_there_without_its_inside(
    servicer: Failing, stub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    servicer.error = ZeroDivisionError("secret /path/of/ours")
    with caplog.at_level(logging.ERROR):
        raised = await _raised(stub, "Generate")
    error = from_rpc_error(raised)
    assert type(error) is errors.Internal
    assert "ZeroDivisionError" in error.message
    assert "secret" not in str(raised)
    assert "Traceback" not in str(raised.trailing_metadata())
    (record,) = caplog.records
    assert "a servicer failed" in str(record.msg)


async def test_an_abort_of_the_servicers_own_passes(stub: Any) -> None:
    raised = await _raised(stub, "Tokenize")
    assert raised.code() == grpc.StatusCode.DATA_LOSS
    error = from_rpc_error(raised)
    assert type(error) is errors.Internal
    assert error.facts == {"grpc_code": "DATA_LOSS"}


async def test_a_cancelled_stream_closes_the_servicers_generator_at_once(
    servicer: Failing, stub: Any
) -> None:
    call = stub.Chat(inference_pb2.ChatRequest())
    await call.read()
    call.cancel()
    await asyncio.wait_for(servicer.closed.wait(), 5)


@pytest.mark.parametrize(
    "text",
    ["x" * 100_000, "é" * 100_000, "%" * 100_000, "\udc80 lone surrogate", "line\nline\x00", ""],
)
async def test_any_message_gets_through_cut_to_fit(text: str, servicer: Failing, stub: Any) -> None:
    servicer.error = InvalidAdapter(text, **{f"fact{n}": text for n in range(30)})
    error = from_rpc_error(await _raised(stub))
    assert type(error) is InvalidAdapter
    assert 1 <= len(error.facts) <= 8
    wanted = text.encode("utf-8", "replace").decode()
    assert error.message == wanted or wanted.startswith(error.message.removesuffix("..."))


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        error = from_rpc_error(await _raised(inference_pb2_grpc.InferenceStub(channel)))
    assert type(error) is errors.Unavailable
    assert error.facts["grpc_code"] == "UNAVAILABLE"


async def test_a_method_that_is_not_there_is_unsupported(address: str) -> None:
    async with open_channel(address) as channel:
        call: Any = channel.unary_unary("/lorafleet.v1.Inference/Nothing")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
    assert type(from_rpc_error(caught.value)) is errors.Unsupported


def test_what_is_not_ours_is_not_taken_for_it() -> None:
    assert from_status(status_pb2.Status(code=5, message="x")) is None
    theirs = to_status(NotFound("x"))
    info = error_details_pb2.ErrorInfo()
    theirs.details[0].Unpack(info)
    for change in ({"domain": "example.com"}, {"reason": "Retry"}, {"reason": "annotations"}):
        fields = {"reason": info.reason, "domain": info.domain, **change}
        status = status_pb2.Status(code=5, message="x")
        status.details.add().Pack(error_details_pb2.ErrorInfo(**fields))
        assert from_status(status) is None


@given(
    kind=st.sampled_from(LEAVES),
    message=st.text(max_size=100),
    facts=st.dictionaries(
        st.from_regex(r"[a-z][a-z_]{0,20}", fullmatch=True), st.text(max_size=40), max_size=5
    ),
)
def test_status_and_back_is_the_same_error(
    kind: type[LorafleetError], message: str, facts: dict[str, str]
) -> None:
    facts.pop("retry", None)
    facts.pop("message", None)
    facts.pop("self", None)
    error = kind(message, **facts)
    back = from_status(to_status(error))
    assert type(back) is kind
    assert (back.message, back.facts) == (message, facts)
