"""A request's way: affinity, retries before the first token, cancellation and deadlines."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest

from gateway_support import ScriptedReplica, delta, eventually, finished
from lorafleet.core.errors import Exhausted, Internal, InvalidInput, Unavailable
from lorafleet.v1 import inference_pb2
from lorafleet.wire.status import from_rpc_error


def served_by(events: list) -> str:
    (started,) = [event.started for event in events if event.HasField("started")]
    assert events[0].HasField("started")
    assert events[-1].HasField("finished")
    return started.replica


def text_of(events: list) -> str:
    return "".join(event.delta.text for event in events)


async def test_requests_go_to_the_replica_that_holds_the_version(house) -> None:
    replicas = [await house.replica(f"r{index}") for index in range(3)]
    versions = {name: await house.publish(name) for name in ("pirate", "json", "sql")}
    await (await house.open()).ready(3)
    homes = {name: served_by(await house.ask(name)) for name in versions}
    await eventually(
        lambda: sum(len(state.held) for state in house.gateway.view.replicas.values()) == 3
    )
    for _ in range(10):
        for name, version in versions.items():
            events = await house.ask(name)
            assert served_by(events) == homes[name]
            assert events[0].started.resident
            assert text_of(events) == f"{homes[name]}:{version}"
    assert sum(len(replica.resident) for replica in replicas) == 3


async def test_a_replica_that_dies_before_the_first_token_is_replaced(house) -> None:
    dying, healthy = await house.replica("dying"), await house.replica("healthy")
    version = await house.publish("pirate")
    dying.resident.add(version)
    await (await house.open()).ready(2)

    async def die(request):
        yield dying.started(request)
        await dying.server.stop(0.0)

    dying.answer = die
    events = await house.ask("pirate")
    assert served_by(events) == "healthy"
    assert text_of(events) == f"healthy:{version}"
    assert len(dying.requests) == 1
    assert len(healthy.requests) == 1


@pytest.mark.parametrize("error", [Unavailable("draining"), Internal("engine stopped")])
async def test_an_error_that_another_replica_may_not_share_is_tried_there(house, error) -> None:
    first, second = await house.replica("a"), await house.replica("b")
    await (await house.open()).ready(2)
    first.answer = first.failing(error)
    for _ in range(10):
        assert served_by(await house.ask()) == "b"
    assert len(second.requests) == 10


@pytest.mark.parametrize("error", [Exhausted("queue full"), InvalidInput("too long", field="text")])
async def test_other_errors_are_given_back_at_once(house, error) -> None:
    replicas = [await house.replica(id) for id in ("a", "b")]
    await (await house.open()).ready(2)
    for replica in replicas:
        replica.answer = replica.failing(error)
    with pytest.raises(grpc.RpcError) as caught:
        await house.ask()
    got = from_rpc_error(caught.value)
    assert type(got) is type(error)
    assert got.message == error.message
    assert sum(len(replica.requests) for replica in replicas) == 1


async def test_three_tries_are_the_most_and_the_last_error_is_told(house) -> None:
    replicas = [await house.replica(f"r{index}") for index in range(4)]
    await (await house.open()).ready(4)
    for replica in replicas:
        replica.answer = replica.failing(Unavailable(f"{replica.id} is out of order"))
    with pytest.raises(grpc.RpcError) as caught:
        await house.ask()
    assert "out of order" in from_rpc_error(caught.value).message
    assert [len(replica.requests) for replica in replicas].count(1) == 3


async def test_a_lone_replicas_error_is_told_rather_than_that_nobody_is_left(house) -> None:
    only = await house.replica("only")
    await (await house.open()).ready(1)
    only.answer = only.failing(Unavailable("the engine has stopped"))
    with pytest.raises(grpc.RpcError) as caught:
        await house.ask()
    assert from_rpc_error(caught.value).message == "the engine has stopped"


async def test_after_the_first_token_nothing_is_tried_again(house) -> None:
    replicas = [await house.replica(id) for id in ("a", "b")]
    await (await house.open()).ready(2)
    for replica in replicas:
        replica.answer = replica.failing(Internal("engine stopped"), after=2)
    got = []

    async def read() -> None:
        async for event in house.stub.Generate(inference_pb2.GenerateRequest(text="x")):
            got.append(event)

    with pytest.raises(grpc.RpcError) as caught:
        await read()
    assert text_of(got) == "0 1 "
    error = from_rpc_error(caught.value)
    assert isinstance(error, Unavailable)
    assert "failed after 2 tokens: engine stopped" in error.message
    assert error.facts["tokens"] == "2"
    assert sum(len(replica.requests) for replica in replicas) == 1


async def test_an_answer_without_an_end_is_an_error(house) -> None:
    only = await house.replica("only")
    await (await house.open()).ready(1)

    async def endless(request):
        yield only.started(request)
        yield delta(1, "x")

    only.answer = endless
    with pytest.raises(grpc.RpcError, match="without a Finished"):
        await house.ask()


async def test_an_answer_without_tokens_still_has_its_start(house) -> None:
    only = await house.replica("only")
    await (await house.open()).ready(1)

    async def nothing(request):
        yield only.started(request)
        yield finished(0)

    only.answer = nothing
    events = await house.ask()
    assert [event.WhichOneof("event") for event in events] == ["started", "finished"]


@pytest.mark.parametrize("phase", ["stuck", "slow"])
async def test_a_cancelled_call_reaches_the_replica(house, phase: str) -> None:
    only = await house.replica("only")
    await (await house.open()).ready(1)
    only.answer = getattr(only, phase)
    call = house.stub.Generate(inference_pb2.GenerateRequest(text="x"))
    if phase == "slow":
        await call.read()
        await call.read()
    await eventually(lambda: only.running == 1)
    assert house.gateway.view.replicas["only"].inflight == 1
    call.cancel()
    await eventually(lambda: only.running == 0 and only.cancelled == 1)
    await eventually(lambda: house.gateway.view.replicas["only"].inflight == 0)


async def test_a_hundred_clients_that_leave_at_once_leave_nothing_behind(house) -> None:
    replicas = [await house.replica(f"r{index}") for index in range(2)]
    names = [f"adapter-{index}" for index in range(6)]
    for name in names:
        await house.publish(name)
    await (await house.open()).ready(2)
    for index, replica in enumerate(replicas):
        replica.answer = replica.slow if index else replica.stuck
    calls = [
        house.stub.Generate(inference_pb2.GenerateRequest(adapter=names[index % 6], text="x"))
        for index in range(100)
    ]
    await eventually(lambda: sum(replica.running for replica in replicas) == 100)
    for call in calls:
        call.cancel()
    await eventually(lambda: sum(replica.running for replica in replicas) == 0)
    view = house.gateway.view
    view.check()
    assert {state.inflight for state in view.replicas.values()} == {0}
    for replica in replicas:
        replica.answer = replica.greet
    assert len(await house.ask("adapter-0")) == 4


async def test_a_deadline_ends_the_call_and_the_replicas_work(house) -> None:
    replicas = [await house.replica(id) for id in ("a", "b")]
    await (await house.open()).ready(2)
    for replica in replicas:
        replica.answer = replica.stuck
    with pytest.raises(grpc.RpcError) as caught:
        await house.ask(timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: sum(replica.running for replica in replicas) == 0)
    (deadline_s,) = [at for replica in replicas for at in replica.deadlines]
    assert 0 < deadline_s <= 0.31  # gRPC rounds it up


async def test_a_hot_adapter_spreads_to_more_replicas(house) -> None:
    replicas = [await house.replica(f"r{index}") for index in range(4)]
    version = await house.publish("hot")
    replicas[0].resident.add(version)
    await (await house.open()).ready(4)
    for replica in replicas:
        replica.answer = replica.slow
    calls = [
        house.stub.Generate(inference_pb2.GenerateRequest(adapter="hot", text="x"))
        for _ in range(40)
    ]
    await eventually(lambda: sum(replica.running for replica in replicas) == 40)
    assert len([replica for replica in replicas if replica.running]) >= 2
    assert max(replica.running for replica in replicas) <= 1.25 * 10 + 4 + 1
    for call in calls:
        call.cancel()


async def test_chat_hands_on_the_conversation(house) -> None:
    only = await house.replica("only")
    await (await house.open()).ready(1)
    messages = [inference_pb2.Message(role="user", content="ahoy")]
    request = inference_pb2.ChatRequest(
        messages=messages, sampling=inference_pb2.SamplingParams(max_tokens=5, seed=3)
    )
    events = [event async for event in house.stub.Chat(request)]
    assert [event.WhichOneof("event") for event in events] == [
        "started",
        "delta",
        "delta",
        "finished",
    ]
    assert text_of(events) == "only:base"
    (asked,) = only.requests
    assert asked.conversation.messages == messages
    assert (asked.sampling.max_tokens, asked.sampling.seed) == (5, 3)


async def test_tokenize_is_answered_by_any_replica(house) -> None:
    gone, _ = await house.replica("a"), await house.replica("b")
    await (await house.open()).ready(2)
    assert (await house.stub.Tokenize(inference_pb2.TokenizeRequest(text="ab"))).token_ids == [
        97,
        98,
    ]
    await gone.server.stop(0.0)
    for _ in range(5):
        answer = await house.stub.Tokenize(inference_pb2.TokenizeRequest(text="c"))
        assert answer.token_ids == [99]


async def test_every_request_leaves_one_line_in_the_access_log(house, caplog) -> None:
    caplog.set_level(logging.INFO, logger="lorafleet.access")
    await house.replica("only")
    version = await house.publish("pirate")
    await (await house.open()).ready(1)
    await house.ask("pirate", metadata=(("x-request-id", "my-id.7"),))
    with pytest.raises(grpc.RpcError):
        await house.ask("parrot")
    await eventually(lambda: len(caplog.records) == 2)
    good, bad = (record.msg for record in caplog.records)
    assert good["request_id"] == "my-id.7"
    assert (good["adapter"], good["version"], good["replica"]) == ("pirate", version, "only")
    assert (good["reason"], good["resident"], good["tries"]) == ("placed", False, 1)
    assert (good["tokens"], good["code"]) == (2, "OK")
    assert 0 < good["ttft_s"] <= good["duration_s"]
    assert (bad["adapter"], bad["code"], bad["replica"]) == ("parrot", "NOT_FOUND", None)
    assert "parrot" in bad["error"]


async def test_a_cancelled_request_is_logged_as_such(house, caplog) -> None:
    caplog.set_level(logging.INFO, logger="lorafleet.access")
    only: ScriptedReplica = await house.replica("only")
    await (await house.open()).ready(1)
    only.answer = only.stuck
    call = house.stub.Generate(inference_pb2.GenerateRequest(text="x"))
    await eventually(lambda: only.running == 1)
    call.cancel()
    await eventually(lambda: len(caplog.records) == 1)
    assert caplog.records[0].msg["code"] == "CANCELLED"
    await asyncio.sleep(0)
