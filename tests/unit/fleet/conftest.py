"""One replica over `tiny4` without Ray, its registry on a real Redis, and a gRPC client to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from lorafleet.engine import EngineOptions
from lorafleet.fleet.replica import ReplicaOptions
from lorafleet.registry import EmbeddedRedis
from lorafleet.registry.server import RegistryServer, ServerOptions
from lorafleet.sdk import AsyncClient
from support.adapters import factors, write_adapter
from support.replica import Served, serve

ENGINE = EngineOptions(kv_tokens=2048, num_adapter_pages=8)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """An empty database."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def options(tiny_model: Path, redis_url: str, tmp_path: Path) -> ReplicaOptions:
    return ReplicaOptions(
        replica_id="only",
        model_dir=tiny_model,
        blobs_dir=tmp_path / "blobs",
        redis_url=redis_url,
        engine=ENGINE,
    )


@pytest.fixture
async def served(options: ReplicaOptions) -> AsyncIterator[Served]:
    async with serve(options) as served:
        yield served


@pytest.fixture
async def registry(options: ReplicaOptions) -> AsyncIterator[AsyncClient]:
    """A client of a registry that shares Redis and blobs with the replica."""
    server = RegistryServer(
        ServerOptions(
            redis_url=options.redis_url,
            blobs_dir=options.blobs_dir,
            model_dir=options.model_dir,
            listen="127.0.0.1:0",
        )
    )
    async with AsyncClient(admin=await server.start()) as client:
        yield client
    await server.stop(0.0)


@pytest.fixture
async def version(registry: AsyncClient, tmp_path: Path) -> str:
    """An adapter's version, pushed."""
    directory = write_adapter(tmp_path / "adapter", factors(rank=4, seed=7))
    manifest, _ = await registry.push_adapter(directory, name="x")
    return manifest.id
