"""A gateway with two scripted replicas and a real registry, both on a thread of their own.

The blocking client would otherwise stop the very loop that serves it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import redis
from safetensors.numpy import save_file

from gateway_support import House, write_model_dir
from lorafleet.registry.embedded import EmbeddedRedis
from lorafleet.registry.server import RegistryServer, ServerOptions


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory):
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    yield server.start()
    server.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the tests of a module talk to."""

    house: House
    loop: asyncio.AbstractEventLoop
    gateway: str
    admin: str

    def run(self, coroutine):
        """Run a coroutine where the servers run."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)

    def replicas(self) -> list:
        return self.house.replicas


async def open_house(redis_url: str, directory: Path) -> tuple[House, str]:
    house = House(redis_url, write_model_dir(directory))
    house.replicas = [await house.replica(id) for id in ("r0", "r1")]
    registry = RegistryServer(
        ServerOptions(
            redis_url=redis_url,
            blobs_dir=directory / "blobs",
            model_dir=directory,
            listen="127.0.0.1:0",
        )
    )
    admin = await registry.start()
    house.exit.push_async_callback(registry.stop, 0.0)
    await (await house.open()).ready(2)
    return house, admin


@pytest.fixture(scope="session")
def session(redis_url, tmp_path_factory):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    opening = open_house(redis_url, tmp_path_factory.mktemp("model"))
    house, admin = asyncio.run_coroutine_threadsafe(opening, loop).result(60)
    served = Served(house=house, loop=loop, gateway=house.address, admin=admin)
    try:
        yield served
        served.run(house.close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def served(session, redis_url):
    """The house without adapters and with replicas that greet."""
    yield session
    with redis.Redis.from_url(redis_url) as client:
        names = [key.decode() for key in client.zrange("{lorafleet}:names", 0, -1)]
    for name in names:
        session.run(session.house.store.delete_adapter(name))
    for replica in session.replicas():
        replica.answer = replica.greet
        replica.requests.clear()


@pytest.fixture
def adapter_dir(tmp_path):
    """A PEFT directory; another seed is another version."""

    def make(seed: int = 0) -> Path:
        directory = tmp_path / f"adapter-{seed}"
        directory.mkdir()
        rng = np.random.default_rng(seed)
        module = "base_model.model.model.layers.0.self_attn.q_proj"
        tensors = {
            f"{module}.lora_A.weight": rng.standard_normal((4, 8), dtype=np.float32),
            f"{module}.lora_B.weight": rng.standard_normal((8, 4), dtype=np.float32),
        }
        save_file(tensors, directory / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8}
        config |= {"bias": "none", "target_modules": ["q_proj"]}
        (directory / "adapter_config.json").write_text(json.dumps(config))
        return directory

    return make
