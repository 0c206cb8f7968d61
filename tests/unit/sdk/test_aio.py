"""The asyncio client has the blocking one's methods and manners."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from gateway_support import eventually
from lorafleet.core.errors import (
    AlreadyExists,
    InvalidAdapter,
    InvalidInput,
    NotFound,
    Unavailable,
)
from lorafleet.sdk import AsyncClient, Client, Delta, Finished, Sampling, Started


@pytest.fixture
async def client(served):
    async with AsyncClient(gateway=served.gateway, admin=served.admin) as opened:
        yield opened


def test_both_clients_have_the_same_methods_and_parameters() -> None:
    def methods(kind: type) -> dict[str, inspect.Signature]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert methods(Client) == methods(AsyncClient)


async def test_a_stream_is_started_then_deltas_then_finished(client) -> None:
    events = [event async for event in client.generate("hi", sampling=Sampling(max_tokens=4))]
    assert [type(event) for event in events] == [Started, Delta, Delta, Finished]


async def test_adapters_from_push_to_delete(client, adapter_dir) -> None:
    version, existed = await client.push_adapter(adapter_dir(), name="pirate")
    assert not existed
    done = await client.complete([1, 2, 3], adapter="pirate")
    assert done.version == version.id
    record = await client.set_alias("pirate", "prod", version.id)
    assert record == await client.get_adapter("pirate")
    assert [adapter.name for adapter in await client.list_adapters()] == ["pirate"]
    assert [model.name for model in await client.list_models()] == ["base", "pirate"]
    with pytest.raises(AlreadyExists):
        await client.push_adapter(adapter_dir(1), name="pirate", if_new=True)
    await client.delete_adapter("pirate")
    with pytest.raises(NotFound, match="pirate"):
        await client.get_adapter("pirate")


async def test_chat_tokenize_and_status(client) -> None:
    assert (await client.chat([("user", "hi")])).text.endswith(":base")
    streamed = [event async for event in client.chat_stream([("user", "hi")])]
    assert isinstance(streamed[-1], Finished)
    assert await client.tokenize("a") == [97]
    assert len((await client.status()).replicas) == 2


async def test_errors_are_those_of_core(client) -> None:
    with pytest.raises(NotFound, match="no-such"):
        await client.complete("hi", adapter="no-such")
    with pytest.raises(InvalidInput):
        client.generate("hi", sampling=Sampling(top_k=-1))
    async with AsyncClient(gateway="127.0.0.1:1") as nobody:
        with pytest.raises(Unavailable, match="lorafleet up"):
            await nobody.status()


async def test_a_file_that_vanishes_during_a_push_is_named(client, adapter_dir) -> None:
    directory = adapter_dir()

    def vanish(sent: int, _total: int) -> None:
        if sent == 0:
            (directory / "adapter_config.json").unlink()

    with pytest.raises(InvalidAdapter, match="adapter_config"):
        await client.push_adapter(directory, name="broken", progress=vanish)


async def test_a_cancelled_task_ends_the_request_on_the_replica(client, served) -> None:
    for replica in served.replicas():
        replica.answer = replica.stuck
    task = asyncio.create_task(client.complete("hi"))
    await eventually(lambda: sum(replica.running for replica in served.replicas()) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: sum(replica.running for replica in served.replicas()) == 0)
