"""Every way of running Redis: the URL is read as written, and the store works over it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis, RedisCluster

from lorafleet.bench.registry.servers import Watched, cluster, until
from lorafleet.core.errors import InvalidInput, Unavailable
from lorafleet.core.manifest import VersionManifest
from lorafleet.core.names import parse_ref
from lorafleet.registry import Catalogue, RegistryStore
from lorafleet.registry.urls import _parse, connect

BAD = [
    "http://x",
    "redis+sentinel://a:1",
    "redis+sentinel://a:1/",
    "redis+sentinel:///main",
    "redis+sentinel://a:1/main/x",
    "redis+sentinel://a:99999/main",
    "redis+sentinel://a:1,,b:2/main",
    "redis+cluster://",
    "redis+cluster://a:1/0",
    "redis+nonsense://a:1",
    "x+cluster://a:1",
]


@pytest.mark.parametrize("url", BAD)
def test_what_is_no_url_of_redis_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="redis URL") as raised:
        connect(url)
    assert raised.value.facts["field"] == "redis"


def test_errors_do_not_show_the_password() -> None:
    with pytest.raises(InvalidInput) as raised:
        connect("redis+cluster://me:hunter2@a:1/7")
    assert "hunter2" not in raised.value.message


def test_hosts_credentials_service_and_database_are_read() -> None:
    found = _parse("rediss+sentinel://me:p%40ss@a,[::1]:5,c:7/my%20main/3")
    assert found.hosts == [("a", 26379), ("::1", 5), ("c", 7)]
    assert found.credentials == {"username": "me", "password": "p@ss"}
    assert (found.service, found.db, found.tls) == ("my main", 3, True)
    assert _parse("redis+cluster://:secret@a").credentials == {"password": "secret"}


def test_each_kind_gets_its_client() -> None:
    assert isinstance(connect("redis://a"), Redis)
    assert isinstance(connect("unix:///tmp/x"), Redis)
    assert isinstance(connect("redis+sentinel://a/main"), Redis)
    assert isinstance(connect("redis+cluster://a"), RedisCluster)


async def use(url: str, manifest: Callable[..., VersionManifest]) -> None:
    """What every part of the system does with the store."""
    store = RegistryStore(url)
    catalogue = Catalogue(store)
    await catalogue.start()
    assert catalogue.connected
    one = (await store.publish_version(manifest("org/a", 1))).manifest
    two = (await store.publish_version(manifest("org/a", 2))).manifest
    await store.set_alias("org/a", "prod", one.id)
    ref = parse_ref("org/a@prod")
    assert ref is not None
    async with asyncio.timeout(2):
        while len(catalogue) == 0 or "prod" not in catalogue.adapter("org/a").aliases:
            await asyncio.sleep(0.01)
    assert catalogue.resolve(ref) == one
    assert (await store.rollback("org/a", "latest")).latest == one
    assert [record.name async for record in store.adapters()] == ["org/a"]
    assert two.id in {manifest.id for manifest in (await store.get_adapter("org/a")).versions}
    epoch = await store.leases.register("r", "127.0.0.1:1", "sha256:" + "0" * 64)
    assert [lease.epoch for lease in await store.leases.live_replicas()] == [epoch]
    assert len(await store.history("org/a")) == 4
    await store.delete_adapter("org/a")
    await catalogue.stop()
    await store.close()


async def test_the_store_works_over_a_cluster(
    tmp_path: Path, make_manifest: Callable[..., VersionManifest]
) -> None:
    with cluster(tmp_path) as nodes:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        await use(f"redis+cluster://{hosts}", make_manifest)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    servers = Watched(tmp_path)
    yield servers
    servers.stop()


async def test_the_store_follows_a_failover(
    watched: Watched, make_manifest: Callable[..., VersionManifest]
) -> None:
    """The primary dies: known adapters resolve all along, writes are back within 10 s."""
    await use(watched.url, make_manifest)
    store = RegistryStore(watched.url)
    catalogue = Catalogue(store)
    await store.publish_version(make_manifest("kept", 1))
    await catalogue.start()
    dying = watched.primary()
    until(lambda: dying.client().execute_command("WAIT", 1, 1000) == 1)
    dying.kill()
    ref = parse_ref("kept")
    assert ref is not None
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while True:
        assert catalogue.resolve(ref).adapter == "kept"
        try:
            await store.publish_version(make_manifest("new", 1))
            break
        except Unavailable:
            assert loop.time() - began_s < 15
    until(lambda: watched.primary() is not dying)
    async with asyncio.timeout(5):
        while len(catalogue) < 2:
            await asyncio.sleep(0.01)
    await catalogue.stop()
    await store.close()
