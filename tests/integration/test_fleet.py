"""The whole path: push, route, load, generate, fail, recover. Nothing here is a stand-in."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from lorafleet.core.errors import (
    InvalidInput,
    LorafleetError,
    NotFound,
    Unavailable,
)
from lorafleet.engine import Engine, EngineOptions, Prompt, SamplingParams
from lorafleet.sdk import Client, Sampling
from support.adapters import PREFIX, factors, path_of, write_adapter
from support.fleet import Fleet

PROMPT = [5, 6, 7, 200, 31]
GREEDY = Sampling(max_tokens=12)
NAMES = ("", "one", "two", "three")


def wait_for(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "timed out"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def expected(tiny_model: Path, adapters: dict[str, Path]) -> dict[str, tuple[int, ...]]:
    """What each adapter answers, from an engine in this process."""
    with Engine(tiny_model, options=EngineOptions(kv_tokens=1024)) as engine:
        for name, directory in adapters.items():
            engine.upload_lora(directory, name=name)
        return {
            name: engine.complete(
                Prompt(token_ids=PROMPT), SamplingParams(max_tokens=12), adapter=name or None
            ).token_ids
            for name in NAMES
        }


def test_every_answer_is_of_the_right_adapter_and_from_a_holder(
    fleet: Fleet, expected: dict[str, tuple[int, ...]]
) -> None:
    assert len(set(expected.values())) == 4

    def ask(name: str):  # type: ignore[no-untyped-def]
        return name, fleet.client.complete(PROMPT, adapter=name, sampling=GREEDY)

    for name in NAMES:
        ask(name)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, NAMES * 15))
    for name, answer in answers:
        assert answer.token_ids == expected[name]
    adapted = [answer for name, answer in answers if name]
    assert sum(answer.resident for answer in adapted) / len(adapted) >= 0.95
    assert {answer.version for name, answer in answers if not name} == {""}


def test_names_aliases_and_versions_mean_the_same(
    fleet: Fleet, expected: dict[str, tuple[int, ...]]
) -> None:
    version = fleet.client.get_adapter("two").latest.id
    fleet.client.set_alias("two", "prod", version)
    wait_for(lambda: _answers(fleet, "two@prod"))
    for reference in ("two", "default/two", "two@prod", "two@latest", f"two@{version}"):
        assert _answers(fleet, reference) == expected["two"]
    for reference in ("base", ""):
        assert _answers(fleet, reference) == expected[""]


def _answers(fleet: Fleet, reference: str) -> tuple[int, ...]:
    try:
        return fleet.client.complete(PROMPT, adapter=reference, sampling=GREEDY).token_ids
    except NotFound:
        return ()


@pytest.mark.parametrize("name", ["typo", "ONE", "one@canary", "one@sha256:" + "0" * 64])
def test_c41_what_is_not_registered_is_not_found_by_name(fleet: Fleet, name: str) -> None:
    with pytest.raises(NotFound, match=name.split("@", maxsplit=1)[0]):
        fleet.client.complete(PROMPT, adapter=name, sampling=GREEDY)


@pytest.mark.parametrize("name", ["one ", " ", "../../etc/x", "a:b", "one@", "a" * 300])
def test_c42_malformed_names_are_invalid(fleet: Fleet, name: str) -> None:
    with pytest.raises(InvalidInput):
        fleet.client.complete(PROMPT, adapter=name, sampling=GREEDY)


def broken(kind: str, directory: Path) -> Path:
    """An adapter directory with one thing wrong."""
    if kind == "shape":
        tensors = factors()
        tensors[f"{PREFIX}{path_of(0, 'q_proj')}.lora_A.weight"] = np.zeros((4, 128), np.float32)
        return write_adapter(directory, tensors)
    write_adapter(directory, config={"layer_replication": [[0, 2]]} if kind == "option" else None)
    weights = directory / "adapter_model.safetensors"
    if kind == "json":
        (directory / "adapter_config.json").write_text("{")
    elif kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "pickle":
        weights.rename(directory / "adapter_model.bin").write_bytes(pickle.dumps({}))
    return directory


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("json", ["adapter_config.json", "JSON"]),
        ("truncated", ["adapter_model.safetensors"]),
        ("shape", ["[4, 128]", "[4, 64]", "q_proj"]),
        ("option", ["adapter_config.json", "layer_replication"]),
        ("pickle", ["adapter_model.bin", "pickle"]),
    ],
)
def test_c38_a_broken_adapter_is_refused_by_name_and_leaves_nothing(
    fleet: Fleet, tmp_path: Path, kind: str, words: list[str]
) -> None:
    before = fleet.client.list_adapters()
    with pytest.raises(InvalidInput) as caught:
        fleet.client.push_adapter(broken(kind, tmp_path / "bad"), name="bad")
    assert caught.value.code == "INVALID_ARGUMENT"
    for word in words:
        assert word in caught.value.message
    assert fleet.client.list_adapters() == before
    with pytest.raises(NotFound, match="bad"):
        fleet.client.complete(PROMPT, adapter="bad", sampling=GREEDY)
    # The name is free for a good one.
    if kind == "json":
        fleet.client.push_adapter(write_adapter(tmp_path / "good"), name="bad")
        wait_for(lambda: _answers(fleet, "bad"))
        fleet.client.delete_adapter("bad")
        wait_for(lambda: not _answers(fleet, "bad"))


def test_status_shows_what_replicas_hold(fleet: Fleet) -> None:
    status = fleet.client.status()
    assert status.base_model == "tiny4"
    assert status.registry_connected
    assert len(status.replicas) == 2
    held = {version for replica in status.replicas for version in replica.resident}
    assert fleet.client.get_adapter("one").latest.id in held


def test_health_and_reflection_are_served(fleet: Fleet) -> None:
    for address, service in (
        (fleet.state.gateway, "lorafleet.v1.Inference"),
        (fleet.state.admin, "lorafleet.v1.AdapterRegistry"),
    ):
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            (listed,) = list(reflect(iter([request]), timeout=5))
            assert service in {entry.name for entry in listed.list_services_response.service}


def test_c44_a_client_that_leaves_ends_its_request(fleet: Fleet) -> None:
    streams = [
        fleet.client.generate(PROMPT, adapter=name, sampling=Sampling(max_tokens=900))
        for name in NAMES * 2
    ]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    wait_for(lambda: all(r.running == r.waiting == 0 for r in fleet.client.status().replicas), 10)


def replica_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "ServeReplica" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_c49_a_killed_replica_is_replaced_and_serves_all_adapters(
    fleet: Fleet, expected: dict[str, tuple[int, ...]]
) -> None:
    before = {replica.replica for replica in fleet.client.status().replicas}
    victims = replica_processes()
    assert len(victims) == 2
    os.kill(victims[0].pid, signal.SIGKILL)
    # The other one serves on; a request that the dead one had not begun moves over.
    for name in NAMES * 3:
        assert (
            fleet.client.complete(PROMPT, adapter=name, sampling=GREEDY).token_ids
            == (expected[name])
        )

    def healed() -> bool:
        live = [r for r in fleet.client.status().replicas if r.connected]
        return len(live) == 2 and {r.replica for r in live} != before

    wait_for(healed, 60)
    for name in NAMES * 3:
        assert (
            fleet.client.complete(PROMPT, adapter=name, sampling=GREEDY).token_ids
            == (expected[name])
        )


def test_a_dead_gateway_comes_back_where_it_was(fleet: Fleet) -> None:
    for child in psutil.Process().children():
        if "lorafleet.gateway" in " ".join(child.cmdline()):
            child.kill()
            child.wait()
    with pytest.raises(LorafleetError):
        Client(gateway=fleet.state.gateway, timeout_s=1).complete(PROMPT, sampling=GREEDY)
    fleet.supervisor.watch()

    def answers() -> bool:
        try:
            return bool(fleet.client.complete(PROMPT, adapter="one", sampling=GREEDY).token_ids)
        except (Unavailable, NotFound):
            return False

    wait_for(answers)
