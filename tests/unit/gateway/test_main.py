"""The gateway as a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from gateway_support import House, eventually, write_model_dir
from lorafleet.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc


def command(redis_url: str, model_dir: Path, options: str = "") -> list[str]:
    text = f"-m lorafleet.gateway --redis {redis_url} --model-dir {model_dir} {options}"
    return [sys.executable, *text.split()]


def start(house: House, tmp_path) -> tuple[subprocess.Popen, str]:
    address_file = tmp_path / "run" / "gateway.address"
    process = subprocess.Popen(
        command(
            house.redis_url,
            house.model_dir,
            f"--listen=127.0.0.1:0 --address-file={address_file} --log-file={tmp_path}/gateway.log",
        )
    )
    deadline = time.monotonic() + 20
    while not address_file.exists():
        assert process.poll() is None, "the gateway has ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process, address_file.read_text()


@pytest.fixture
async def served(house, tmp_path):
    only = await house.replica("only")
    process, address = start(house, tmp_path)
    async with grpc.aio.insecure_channel(address) as channel:
        fleet = fleet_pb2_grpc.FleetStub(channel)
        status = await fleet.GetStatus(fleet_pb2.GetStatusRequest())
        while not any(replica.connected for replica in status.replicas):
            await asyncio.sleep(0.02)
            status = await fleet.GetStatus(fleet_pb2.GetStatusRequest())
        yield process, only, channel, tmp_path
    process.kill()
    process.wait()


async def test_it_serves_and_drains_at_sigterm(served) -> None:
    process, only, channel, tmp_path = served
    stub = inference_pb2_grpc.InferenceStub(channel)
    only.answer = only.slow
    call = stub.Generate(inference_pb2.GenerateRequest(text="x"))
    await call.read()
    process.send_signal(signal.SIGTERM)

    async def until_refused() -> None:
        while True:
            await stub.Tokenize(inference_pb2.TokenizeRequest(text="x"))

    with pytest.raises(grpc.RpcError):
        await until_refused()
    assert process.poll() is None
    assert (await call.read()).HasField("delta")
    call.cancel()
    assert await _ended(process) == 0
    assert not (tmp_path / "run" / "gateway.address").exists()
    lines = [json.loads(line) for line in (tmp_path / "gateway.log").read_text().splitlines()]
    assert {line["process"] for line in lines} == {"gateway"}
    (access,) = [line for line in lines if line["event"] == "request"]
    assert access["code"] == "CANCELLED"
    assert access["tokens"] >= 1


async def test_a_second_signal_ends_it_at_once(served) -> None:
    process, only, channel, _ = served
    only.answer = only.stuck
    stub = inference_pb2_grpc.InferenceStub(channel)
    call = stub.Generate(inference_pb2.GenerateRequest(text="x"))
    await eventually(lambda: only.running == 1)
    process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert await _ended(process) == 0
    call.cancel()


def test_wrong_options_end_it_with_a_sentence(tmp_path) -> None:
    done = subprocess.run(
        command("redis://127.0.0.1:1", tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no compiled model" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_needs_neither_ray_nor_tvm_nor_numpy(tmp_path) -> None:
    write_model_dir(tmp_path)
    code = (
        "import sys, lorafleet.gateway.__main__ as gateway, lorafleet.routing\n"
        "heavy = {'numpy', 'tvm', 'tvm_ffi', 'ray', 'torch', 'lorafleet.native'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


async def _ended(process: subprocess.Popen) -> int:
    return await asyncio.to_thread(process.wait, 10)
