"""Listing, status, and what the edge refuses before any replica hears of it."""

from __future__ import annotations

import grpc
import pytest

from gateway_support import BASE, eventually
from lorafleet.core.errors import InvalidInput
from lorafleet.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2
from lorafleet.wire.status import from_rpc_error


async def test_models_are_the_base_and_then_adapters_by_name(house) -> None:
    versions = {name: await house.publish(name) for name in ("sql", "acme/json", "pirate")}
    await house.publish("for-another-base", base_digest="sha256:other")
    await house.replica("only")
    await (await house.open()).ready(1)
    models = (await house.stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert (models[0].name, models[0].base, models[0].version) == ("base", True, "")
    assert [(model.name, model.version) for model in models[1:]] == sorted(versions.items())
    for model in models:
        assert (await house.ask(model.name))[0].started.version == model.version


async def test_status_shows_every_replica(house) -> None:
    replica = await house.replica("a", num_pages=16)
    replica.resident.add("v1")
    await house.store.leases.register("b", "127.0.0.1:1", BASE.digest, ttl_s=60.0)
    await house.publish("pirate")
    await (await house.open()).ready(1)
    await eventually(lambda: len(house.gateway.view.replicas) == 2)
    stub = fleet_pb2_grpc.FleetStub(house.channel)
    status = await stub.GetStatus(fleet_pb2.GetStatusRequest())
    assert (status.base_model, status.base_digest) == (BASE.name, BASE.digest)
    assert (status.num_adapters, status.registry_connected) == (1, True)
    first, second = status.replicas
    assert (first.address, first.connected, first.report.num_pages) == (replica.address, True, 16)
    assert list(first.report.resident) == ["v1"]
    assert (second.address, second.connected, second.HasField("report")) == (
        "127.0.0.1:1",
        False,
        False,
    )


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("Generate", inference_pb2.GenerateRequest(), "prompt"),
        (
            "Generate",
            inference_pb2.GenerateRequest(
                text="x", sampling=inference_pb2.SamplingParams(temperature=3.0)
            ),
            "sampling.temperature",
        ),
        ("Chat", inference_pb2.ChatRequest(), "messages"),
        (
            "Tokenize",
            inference_pb2.TokenizeRequest(messages=[inference_pb2.Message(role="robot")]),
            "messages[0].role",
        ),
    ],
)
async def test_wrong_input_is_refused_by_field(house, method, request_, field) -> None:
    only = await house.replica("only")
    await (await house.open()).ready(1)
    call = getattr(house.stub, method)(request_)
    with pytest.raises(grpc.RpcError) as caught:
        await (call if method == "Tokenize" else call.read())
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidInput)
    assert error.facts["field"] == field
    assert only.requests == []


async def test_a_request_id_is_the_clients_when_it_is_well_formed(house) -> None:
    only = await house.replica("only")
    await (await house.open()).ready(1)
    given = await house.ask(metadata=(("x-request-id", "trace-1"),))
    assert given[0].started.request_id == "trace-1"
    made = await house.ask(metadata=(("x-request-id", "bad id"),))
    assert made[0].started.request_id not in ("", "bad id")
    assert [request.request_id for request in only.requests] == [
        "trace-1",
        made[0].started.request_id,
    ]
