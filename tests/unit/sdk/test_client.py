"""The blocking client against a real gateway and a real registry."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gateway_support import BASE, delta, finished
from lorafleet.core.errors import (
    AlreadyExists,
    Exhausted,
    InvalidAdapter,
    InvalidInput,
    LorafleetError,
    NotFound,
    Unavailable,
)
from lorafleet.core.record import Target
from lorafleet.sdk import Client, Delta, Finished, Sampling, Started


@pytest.fixture
def client(served):
    with Client(gateway=served.gateway, admin=served.admin) as opened:
        yield opened


def test_a_stream_is_started_then_deltas_then_finished(client) -> None:
    first, *middle, last = client.generate("hi")
    assert isinstance(first, Started)
    assert first.version == ""
    assert first.resident
    assert [type(event) for event in middle] == [Delta, Delta]
    assert "".join(event.text for event in middle) == f"{first.replica}:base"
    assert isinstance(last, Finished)
    assert (last.reason, last.completion_tokens) == ("stop", 2)


def test_pushing_makes_an_adapter_answer(client, adapter_dir) -> None:
    seen: list[tuple[int, int]] = []
    version, existed = client.push_adapter(
        adapter_dir(), name="pirate", progress=lambda sent, total: seen.append((sent, total))
    )
    assert not existed
    assert version.adapter == "pirate"
    assert (version.max_rank, version.target_modules) == (4, ("q_proj",))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] > 0
    done = client.complete("hi", adapter="pirate")
    assert done.version == version.id
    assert done.text == f"{done.replica}:{version.id}"
    assert done.token_ids == (1, 2)
    assert done.finish_reason == "stop"
    assert 0 < done.ttft_s < 5
    assert done.tokens_per_s > 0


def test_adapters_are_listed_pointed_at_and_deleted(client, adapter_dir) -> None:
    old, _ = client.push_adapter(adapter_dir(1), name="acme/json")
    new, _ = client.push_adapter(adapter_dir(2), name="acme/json")
    assert client.push_adapter(adapter_dir(3), name="sql")[1] is False
    assert [record.name for record in client.list_adapters()] == ["acme/json", "sql"]
    record = client.set_alias("acme/json", "prod", old.id)
    assert record.aliases == {"latest": Target.to(new.id), "prod": Target.to(old.id)}
    assert client.get_adapter("acme/json") == record
    assert client.complete("hi", adapter="acme/json@prod").version == old.id
    assert client.complete("hi", adapter="acme/json").version == new.id
    models = client.list_models()
    assert [(model.name, model.base) for model in models] == [
        ("base", True),
        ("acme/json", False),
        ("sql", False),
    ]
    client.delete_adapter("acme/json")
    with pytest.raises(NotFound, match="acme/json"):
        client.get_adapter("acme/json")
    with pytest.raises(NotFound, match="acme/json"):
        client.delete_adapter("acme/json")


def test_the_same_weights_again_are_said_to_exist(client, adapter_dir) -> None:
    directory = adapter_dir()
    first, _ = client.push_adapter(directory, name="pirate")
    again, existed = client.push_adapter(directory, name="pirate")
    assert existed
    assert again.id == first.id
    with pytest.raises(AlreadyExists, match="pirate"):
        client.push_adapter(adapter_dir(1), name="pirate", if_new=True)


def test_errors_are_those_of_core(client, served) -> None:
    with pytest.raises(NotFound) as caught:
        client.complete("hi", adapter="no-such-adapter")
    assert caught.value.facts["adapter"] == "no-such-adapter"
    for wrong, field in (
        ({"prompt": ""}, "text"),
        ({"prompt": []}, "token_ids.ids"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [0.5]}, "prompt"),
        ({"prompt": "x", "sampling": Sampling(temperature=9.0)}, "sampling.temperature"),
        ({"prompt": "x", "sampling": Sampling(max_tokens=-1)}, "sampling.max_tokens"),
        ({"prompt": "x", "sampling": Sampling(stop="word")}, "sampling.stop"),
    ):
        with pytest.raises(InvalidInput) as refused:
            client.complete(**wrong)
        assert refused.value.facts["field"] == field
    for replica in served.replicas():
        replica.answer = replica.failing(Exhausted("the queue is full", limit=4))
    with pytest.raises(Exhausted, match="the queue is full") as full:
        client.complete("hi")
    assert full.value.facts["limit"] == "4"


def test_a_broken_adapter_is_refused_by_file_and_field(client, adapter_dir) -> None:
    directory = adapter_dir()
    config = directory / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": "four"'))
    with pytest.raises(InvalidAdapter) as caught:
        client.push_adapter(directory, name="broken")
    assert "adapter_config.json" in caught.value.message
    with pytest.raises(LorafleetError, match="nowhere"):
        client.push_adapter(directory / "nowhere", name="broken")
    assert client.list_adapters() == []


def test_a_file_that_vanishes_during_a_push_is_named(client, adapter_dir) -> None:
    directory = adapter_dir()

    def vanish(sent: int, _total: int) -> None:
        if sent == 0:
            (directory / "adapter_config.json").unlink()

    with pytest.raises(InvalidAdapter, match="adapter_config"):
        client.push_adapter(directory, name="broken", progress=vanish)
    assert client.list_adapters() == []


def test_chat_and_tokenize(client, served) -> None:
    done = client.chat([("system", "be brief"), ("user", "ahoy")], sampling=Sampling(seed=1))
    assert done.text == f"{done.replica}:base"
    (asked,) = [request for replica in served.replicas() for request in replica.requests]
    assert [(turn.role, turn.content) for turn in asked.conversation.messages] == [
        ("system", "be brief"),
        ("user", "ahoy"),
    ]
    assert asked.sampling.seed == 1
    assert client.tokenize("ab") == [97, 98]
    assert client.tokenize([("user", "c")]) == [99]
    with pytest.raises(InvalidInput) as caught:
        client.chat([("robot", "x")])
    assert caught.value.facts["field"] == "messages[0].role"
    with pytest.raises(InvalidInput, match="pairs of role and content"):
        client.chat(["hello"])


def test_closing_a_stream_ends_the_request_on_the_replica(client, served) -> None:
    for replica in served.replicas():
        replica.answer = replica.slow
    events = client.generate("hi")
    next(events)
    next(events)
    assert sum(replica.running for replica in served.replicas()) == 1
    events.close()
    deadline = threading.Event()
    for _ in range(200):
        if sum(replica.running for replica in served.replicas()) == 0:
            break
        deadline.wait(0.02)
    assert sum(replica.running for replica in served.replicas()) == 0


def test_a_deadline_is_unavailable_and_says_so(served) -> None:
    for replica in served.replicas():
        replica.answer = replica.stuck
    with (
        Client(gateway=served.gateway, timeout_s=0.2) as client,
        pytest.raises(Unavailable, match="deadline"),
    ):
        client.complete("hi")


def test_nobody_there_names_the_address_and_the_remedy() -> None:
    with Client(gateway="127.0.0.1:1", admin="127.0.0.1:1") as client:
        for call in (lambda: client.complete("hi"), client.list_adapters):
            with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1.*lorafleet up"):
                call()


def test_status_is_the_fleet_as_the_gateway_sees_it(client) -> None:
    status = client.status()
    assert (status.base_model, status.base_digest) == (BASE.name, BASE.digest)
    assert status.registry_connected
    assert [replica.replica for replica in status.replicas] == ["r0", "r1"]
    assert all(replica.connected and replica.num_pages == 64 for replica in status.replicas)
    assert status.to_dict()["replicas"][0]["address"] == status.replicas[0].address


def test_one_client_serves_many_threads(client) -> None:
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda _: client.complete("hi").text, range(40)))
    assert all(text.endswith(":base") for text in texts)


def test_a_closed_client_opens_again(client) -> None:
    client.complete("hi")
    client.close()
    assert client.complete("hi").finish_reason == "stop"


def test_times_are_the_clients_own(client, served) -> None:
    async def paced(request):
        yield replica.started(request)
        await asyncio.sleep(0.1)
        for _ in range(5):
            yield delta(1, "x")
            await asyncio.sleep(0.05)
        yield finished(5)

    for replica in served.replicas():
        replica.answer = paced
    done = client.complete("hi")
    assert 0.1 <= done.ttft_s < 1.0
    assert 4 / 1.0 < done.tokens_per_s <= 4 / 0.2 + 1
