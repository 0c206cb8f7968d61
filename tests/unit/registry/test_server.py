"""The admin process as users run it: starts without Redis, reports its health, ends by SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from lorafleet.core.errors import Unavailable
from lorafleet.core.model import DESCRIPTION_FILE, BaseModel
from lorafleet.registry import EmbeddedRedis
from lorafleet.registry.push import push_messages
from lorafleet.registry.server import SERVICE, RegistryServer, ServerOptions
from lorafleet.v1 import registry_pb2 as pb
from lorafleet.v1 import registry_pb2_grpc
from lorafleet.wire.channel import open_sync_channel
from lorafleet.wire.status import from_rpc_error


class Process:
    """`python -m lorafleet.registry` on a model directory."""

    def __init__(self, folder: Path, redis_url: str, base: BaseModel) -> None:
        self.folder = folder
        self.redis_url = redis_url
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / DESCRIPTION_FILE).write_text(base.to_json())
        self.process: subprocess.Popen[str] | None = None

    def command(self, **changes: str) -> list[str]:
        options = {
            "redis": self.redis_url,
            "blobs": str(self.folder / "blobs"),
            "model-dir": str(self.model),
            "listen": "127.0.0.1:0",
            "address-file": str(self.folder / "run" / "address"),
            "log-file": str(self.folder / "logs" / "registry.log"),
            **changes,
        }
        flags = [part for key, value in options.items() for part in (f"--{key}", value)]
        return [sys.executable, "-m", "lorafleet.registry", *flags]

    def start(self) -> str:
        self.process = subprocess.Popen(self.command(), stdout=subprocess.PIPE, text=True)
        file = self.folder / "run" / "address"
        for _ in range(600):
            if file.exists():
                return file.read_text()
            assert self.process.poll() is None, "it ended instead of serving"
            time.sleep(0.05)
        raise AssertionError("it does not serve")

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(15)


@pytest.fixture
def process(
    tmp_path: Path, redis_url: str, make_base: Callable[..., BaseModel]
) -> Iterator[Process]:
    process = Process(tmp_path, redis_url, make_base())
    yield process
    if process.process is not None:
        process.process.kill()
        process.process.wait()
        assert process.process.stdout is not None
        process.process.stdout.close()


def _health(channel: grpc.Channel, service: str) -> str:
    stub = health_pb2_grpc.HealthStub(channel)
    status = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def _wait_serving(channel: grpc.Channel) -> None:
    begun = time.monotonic()
    while _health(channel, SERVICE) != "SERVING":
        assert time.monotonic() - begun < 10
        time.sleep(0.05)


def test_it_serves_pushes_from_start_to_sigterm(
    process: Process, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    address = process.start()
    with open_sync_channel(address) as channel:
        stub = registry_pb2_grpc.AdapterRegistryStub(channel)
        messages = push_messages(make_adapter(tmp_path / "a"), "org/a")
        version = stub.PushAdapter(messages, timeout=20).version
        listed = stub.ListAdapters(pb.ListAdaptersRequest(), timeout=5).adapters
        assert [adapter.aliases["latest"].shares[0].version for adapter in listed] == [version.id]
        _wait_serving(channel)
        assert _health(channel, "") == "SERVING"
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert {SERVICE, "grpc.health.v1.Health"} <= set(services)
    assert process.stop() == 0
    assert process.process is not None
    assert process.process.stdout is not None
    assert process.process.stdout.read() == f"listening on {address}\n"
    assert not (tmp_path / "run" / "address").exists()
    log = (tmp_path / "logs" / "registry.log").read_text()
    assert '"event": "adapter pushed"' in log
    assert version.id in log


async def test_it_starts_before_redis_and_takes_pushes_soon_after_redis_came(
    tmp_path: Path, make_base: Callable[..., BaseModel], make_adapter: Callable[..., Path]
) -> None:
    redis_server = EmbeddedRedis(tmp_path / "redis")
    url = redis_server.start()
    redis_server.stop()
    (tmp_path / DESCRIPTION_FILE).write_text(make_base().to_json())
    server = RegistryServer(
        ServerOptions(
            redis_url=url,
            blobs_dir=tmp_path / "blobs",
            model_dir=tmp_path,
            listen="127.0.0.1:0",
        )
    )
    directory = make_adapter(tmp_path / "a")

    def use(address: str) -> None:
        with open_sync_channel(address) as channel:
            stub = registry_pb2_grpc.AdapterRegistryStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.PushAdapter(push_messages(directory, "a"), timeout=20)
            assert isinstance(from_rpc_error(caught.value), Unavailable)
            assert _health(channel, SERVICE) == "NOT_SERVING"
            assert _health(channel, "") == "SERVING"
            redis_server.start()
            stub.PushAdapter(push_messages(directory, "a"), timeout=10)
            _wait_serving(channel)

    try:
        await asyncio.to_thread(use, await server.start())
    finally:
        await server.stop()
        redis_server.stop()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model-dir": "/nowhere"}, "is no compiled model"),
        ({"log-level": "loud"}, "log level 'loud' is not known"),
        ({"no-such-option": "x"}, "unrecognized arguments"),
    ],
)
def test_it_ends_with_a_reason_when_it_cannot_start(
    process: Process, changes: dict[str, str], words: str
) -> None:
    ended = subprocess.run(
        process.command(**changes),
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
