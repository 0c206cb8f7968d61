"""The link: retries until its deadline, finds a new primary, knows a lost reply from an absence."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from lorafleet.core.errors import Exhausted, Unavailable
from lorafleet.core.manifest import VersionManifest
from lorafleet.registry import EmbeddedRedis, LinkOptions, RegistryStore

ManifestMaker = Callable[..., VersionManifest]
ProxyMaker = Callable[[int], Any]


def _port(server: EmbeddedRedis) -> int:
    return int(server.url.rpartition(":")[2].partition("/")[0])


async def test_a_lost_reply_to_a_publish_is_not_taken_for_an_older_push(
    redis_server: EmbeddedRedis,
    redis_url: str,
    make_proxy: ProxyMaker,
    make_manifest: ManifestMaker,
) -> None:
    proxy = make_proxy(_port(redis_server))
    store = RegistryStore(await proxy.start())
    await store.ping()
    proxy.swallow = b"published"
    published = await store.publish_version(make_manifest("a", 1), if_new=True)
    assert proxy.num_swallowed == 1
    assert not published.existed
    assert (await store.cursor()).generation == 1
    await store.close()


async def test_a_lost_reply_to_a_delete_is_not_taken_for_absence(
    redis_server: EmbeddedRedis,
    redis_url: str,
    make_proxy: ProxyMaker,
    make_manifest: ManifestMaker,
) -> None:
    proxy = make_proxy(_port(redis_server))
    store = RegistryStore(await proxy.start())
    await store.publish_version(make_manifest("a", 1))
    # The script is loaded first, so that the next reply with this text is the deletion's own.
    await store.publish_version(make_manifest("b", 1))
    await store.delete_adapter("b")
    proxy.swallow = b"deleted"
    await store.delete_adapter("a")
    assert proxy.num_swallowed == 1
    assert await store.count_adapters() == 0
    await store.close()


async def test_c40_after_a_failover_that_left_old_connections_open_writes_go_to_the_new_primary(
    tmp_path: Path, make_proxy: ProxyMaker, make_manifest: ManifestMaker
) -> None:
    with EmbeddedRedis(tmp_path / "old") as old, EmbeddedRedis(tmp_path / "new") as new:
        proxy = make_proxy(_port(old))
        store = RegistryStore(await proxy.start())
        await store.publish_version(make_manifest("a", 1))
        with redis.Redis.from_url(new.url) as client:
            client.replicaof("127.0.0.1", _port(old))
            while client.info("replication")["master_link_status"] != "up":
                await asyncio.sleep(0.02)
            client.replicaof("NO", "ONE")
        with redis.Redis.from_url(old.url) as client:
            client.replicaof("127.0.0.1", _port(new))
        proxy.target = _port(new)
        begun = time.monotonic()
        await store.publish_version(make_manifest("b", 2))
        assert time.monotonic() - begun < 3
        with redis.Redis.from_url(new.url) as client:
            assert client.zrange("{lorafleet}:names", 0, -1) == [b"a", b"b"]
        await store.close()


async def test_a_redis_that_hangs_is_unavailable_at_the_deadline_and_found_again(
    tmp_path: Path, make_manifest: ManifestMaker
) -> None:
    with EmbeddedRedis(tmp_path) as server:
        store = RegistryStore(server.url, options=LinkOptions(deadline_s=0.5))
        await store.ping()
        os.kill(server.pid or 0, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            with pytest.raises(Unavailable, match="no reply in time"):
                await store.publish_version(make_manifest("a", 1))
            assert time.monotonic() - begun < 1.5
        finally:
            os.kill(server.pid or 0, signal.SIGCONT)
        await store.publish_version(make_manifest("a", 1))
        await store.close()


async def test_a_short_restart_of_redis_is_not_noticed(
    tmp_path: Path, make_manifest: ManifestMaker
) -> None:
    server = EmbeddedRedis(tmp_path)
    store = RegistryStore(server.start(), options=LinkOptions(deadline_s=10))
    await store.publish_version(make_manifest("a", 1))
    await asyncio.to_thread(server.stop)
    publishing = asyncio.create_task(store.publish_version(make_manifest("b", 2)))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(server.start)
    await publishing
    assert await store.count_adapters() == 2
    await store.close()
    await asyncio.to_thread(server.stop)


async def test_a_redis_without_memory_is_exhausted_and_nothing_is_changed(
    tmp_path: Path, make_manifest: ManifestMaker
) -> None:
    with EmbeddedRedis(tmp_path) as server:
        store = RegistryStore(server.url)
        await store.publish_version(make_manifest("a", 1))
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", "100kb")  # less than an empty one takes
        with pytest.raises(Exhausted, match="no memory left"):
            await store.publish_version(make_manifest("b", 2))
        assert [record.name async for record in store.adapters()] == ["a"]
        await store.close()


async def test_a_cancelled_read_leaves_the_link_usable(store: RegistryStore) -> None:
    cursor = await store.cursor()
    for delay_s in (0.0, 0.001, 0.01, 0.1):
        waiting = asyncio.create_task(store.changes(cursor, wait_s=5))
        await asyncio.sleep(delay_s)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, 1)
        await store.ping()
