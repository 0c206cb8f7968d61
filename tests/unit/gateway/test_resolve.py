"""What each spelling of an adapter's name gets: never the base model by accident."""

from __future__ import annotations

import grpc
import pytest

from gateway_support import BASE, manifest
from lorafleet.core.errors import Conflict, InvalidInput, NotFound, Unavailable
from lorafleet.gateway.resolve import Asked, Resolver
from lorafleet.registry.catalogue import Catalogue
from lorafleet.registry.link import LinkOptions
from lorafleet.registry.store import RegistryStore
from lorafleet.v1 import inference_pb2
from lorafleet.wire.status import from_rpc_error

PIRATE = manifest("pirate").id
OTHER = "sha256:" + "ee" * 32

# What a client writes, and the error it gets; the version's owner where it gets an answer.
TABLE = [
    ("", "base"),
    ("base", "base"),
    ("default/base", "base"),
    ("pirate", "pirate"),
    ("default/pirate", "pirate"),
    ("pirate@latest", "pirate"),
    (f"pirate@{PIRATE}", "pirate"),
    ("acme/base", NotFound),
    ("pirat", NotFound),
    ("Pirate", NotFound),
    ("acme/pirate", NotFound),
    ("BASE", NotFound),
    ("tiny4", NotFound),
    ("deleted", NotFound),
    ("pirate@prod", NotFound),
    (f"pirate@{OTHER}", NotFound),
    ("pirate ", InvalidInput),
    (" ", InvalidInput),
    ("base ", InvalidInput),
    ("base@latest", InvalidInput),
    ("pirate@", InvalidInput),
    ("pirate@sha256:12", InvalidInput),
    ("a:b", InvalidInput),
    ("../../etc/x", InvalidInput),
    ("a\x00b", InvalidInput),
    ("x" * 300, InvalidInput),
    ("for-another-base", Conflict),
]


@pytest.fixture
async def with_adapters(house):
    await house.replica("only")
    await house.publish("pirate")
    await house.publish("for-another-base", base_digest=OTHER)
    await house.publish("deleted")
    await house.store.delete_adapter("deleted")
    return await (await house.open()).ready(1)


@pytest.mark.parametrize("method", ["Generate", "Chat"])
async def test_each_spelling_gets_what_the_table_says(with_adapters, method: str) -> None:
    house = with_adapters
    for adapter, expected in TABLE:
        if method == "Generate":
            call = house.stub.Generate(inference_pb2.GenerateRequest(adapter=adapter, text="x"))
        else:
            message = inference_pb2.Message(role="user", content="x")
            call = house.stub.Chat(inference_pb2.ChatRequest(adapter=adapter, messages=[message]))
        if isinstance(expected, str):
            text = "".join([event.delta.text async for event in call])
            assert text == ("only:base" if expected == "base" else f"only:{PIRATE}"), adapter
            continue
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
        error = from_rpc_error(caught.value)
        assert type(error) is expected, adapter
        name = adapter.partition("@")[0]
        assert name[:100] in error.message or repr(name)[1:100] in error.message


async def test_a_deleted_adapter_is_not_found_soon_after(with_adapters) -> None:
    house = with_adapters
    await house.ask("pirate")
    await house.store.delete_adapter("pirate")
    for _ in range(100):
        try:
            await house.ask("pirate")
        except grpc.RpcError as caught:
            error = from_rpc_error(caught)
            break
    assert isinstance(error, NotFound)
    assert error.facts["adapter"] == "pirate"


async def test_an_adapter_is_found_as_soon_as_its_push_is_answered(with_adapters) -> None:
    house = with_adapters
    for index in range(20):
        version = await house.publish(f"fresh-{index}")
        events = await house.ask(f"fresh-{index}")
        assert events[0].started.version == version


async def test_before_the_registry_was_read_nobody_can_tell() -> None:
    store = RegistryStore("redis://127.0.0.1:1", options=LinkOptions(deadline_s=0.2))
    catalogue = Catalogue(store)
    resolver = Resolver(catalogue, store, BASE)
    assert await resolver.resolve(Asked(adapter="")) is None
    with pytest.raises(Unavailable, match="not been read"):
        await resolver.resolve(Asked(adapter="pirate"))
    await store.close()
