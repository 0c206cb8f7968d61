"""What a replica answers on its own port."""

from __future__ import annotations

import asyncio
import itertools
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from lorafleet.core.errors import InvalidInput, NotFound
from lorafleet.fleet.service import REPLICA
from lorafleet.v1 import inference_pb2, replica_pb2
from lorafleet.wire.channel import open_channel
from lorafleet.wire.status import from_rpc_error
from support.replica import TOKENS, Served, eventually


async def test_a_stream_is_started_then_deltas_then_finished(served: Served) -> None:
    events = [response.WhichOneof("event") async for response in served.generate()]
    assert events == ["started", *["delta"] * TOKENS, "finished"]
    started, ids, finished = await served.answer()
    assert (started.request_id, started.replica, started.version) == ("r1", "only", "")
    assert started.resident
    assert started.prompt_tokens == 3
    assert len(ids) == finished.completion_tokens == TOKENS
    assert finished.reason == inference_pb2.FINISH_REASON_LENGTH
    assert 0 <= finished.queue_s <= finished.ttft_s


async def test_a_pushed_version_is_loaded_for_the_first_request_and_kept(
    served: Served, version: str
) -> None:
    base = await served.answer()
    first = await served.answer(version)
    second = await served.answer(version)
    assert (first[0].version, first[0].resident) == (version, False)
    assert second[0].resident
    assert first[1] == second[1] != base[1]
    # A mixed batch answers each as if alone.
    answers = await asyncio.gather(*(served.answer(v) for v in ["", version] * 4))
    for answer, alone in zip(answers, itertools.cycle((base, first)), strict=False):
        assert answer[1] == alone[1]


async def test_text_and_conversations_are_prompts_too(served: Served) -> None:
    turns = [inference_pb2.Message(role="user", content="Hi")]
    conversation = replica_pb2.Conversation(messages=turns)
    _, by_turns, _ = await served.answer(conversation=conversation)
    _, by_text, _ = await served.answer(text="user:Hi\n")  # the tiny model's chat template
    assert by_turns == by_text
    as_turns = await served.stub.Tokenize(inference_pb2.TokenizeRequest(messages=turns))
    as_text = await served.stub.Tokenize(inference_pb2.TokenizeRequest(text="user:Hi\n"))
    assert as_turns == as_text
    assert len(as_text.token_ids) == len("user:Hi\n")


async def test_an_unknown_version_is_not_found_by_name(served: Served) -> None:
    unknown = "sha256:" + "0" * 64
    with pytest.raises(grpc.RpcError) as caught:
        await served.answer(unknown)
    error = from_rpc_error(caught.value)
    assert isinstance(error, NotFound)
    assert unknown in error.message


async def test_a_request_without_a_prompt_is_invalid(served: Served) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in served.stub.Generate(replica_pb2.ReplicaGenerateRequest()):
            pass
    assert isinstance(from_rpc_error(caught.value), InvalidInput)


async def test_reports_come_at_once_at_changes_and_every_second(
    served: Served, version: str
) -> None:
    began_s = time.monotonic()
    watch = served.watch()
    reports = [await watch.read()]
    assert time.monotonic() - began_s < 0.9
    assert reports[0].epoch == served.lease.epoch
    assert reports[0].num_pages == reports[0].free_pages == 8
    reports.append(await watch.read())  # nothing has changed
    assert 0.5 < time.monotonic() - began_s < 5
    await served.answer(version)
    async with asyncio.timeout(5):
        while version not in reports[-1].resident or reports[-1].running:
            reports.append(await watch.read())
    assert reports[-1].free_pages == 7
    sequences = [report.sequence for report in reports]
    assert sequences == sorted(set(sequences))
    watch.cancel()


async def test_c44_a_client_that_leaves_ends_its_request(served: Served) -> None:
    calls = [served.generate(tokens=900) for _ in range(3)]
    for call in calls:
        await anext(aiter(call))
    watch = served.watch()
    async with asyncio.timeout(5):
        while not (await watch.read()).running:
            pass
    for call in calls:
        call.cancel()  # type: ignore[attr-defined]
    async with asyncio.timeout(5):
        while (await watch.read()).running:
            pass
    watch.cancel()


async def test_health_and_reflection_are_served(served: Served) -> None:
    async with open_channel(served.lease.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = await health.Check(health_pb2.HealthCheckRequest(service=REPLICA))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        async for listed in reflect(iter([asked])):
            assert REPLICA in {entry.name for entry in listed.list_services_response.service}


async def test_a_deleted_adapter_gives_its_pages_back(served: Served, registry, version) -> None:  # type: ignore[no-untyped-def]
    await served.answer(version)
    await registry.delete_adapter("x")
    watch = served.watch()

    async def gone() -> bool:
        report = await watch.read()
        return version not in report.resident and report.free_pages == report.num_pages

    await eventually(gone)
    watch.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        await served.answer(version)
    assert isinstance(from_rpc_error(caught.value), NotFound)
