"""A Redis for the whole folder, emptied before each test, and a house to put things into."""

from __future__ import annotations

import pytest
import redis

from gateway_support import House, write_model_dir
from lorafleet.registry.embedded import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    yield server.start()
    server.stop()


@pytest.fixture
def redis_url(redis_server):
    with redis.Redis.from_url(redis_server) as client:
        client.flushall()
    return redis_server


@pytest.fixture
async def house(redis_url, tmp_path):
    built = House(redis_url, write_model_dir(tmp_path))
    yield built
    await built.close()
