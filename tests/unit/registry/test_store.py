"""The store: every change as a whole, exactly one winner, and a feed that misses nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis

from lorafleet.core.errors import AlreadyExists, Conflict, Internal, LorafleetError, NotFound
from lorafleet.core.manifest import VersionManifest
from lorafleet.core.record import Target
from lorafleet.registry import LinkOptions, RegistryStore, scripts
from lorafleet.registry.store import Cursor

ManifestMaker = Callable[..., VersionManifest]


async def test_a_published_version_is_latest(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    manifest = make_manifest("org/a", 1)
    published = await store.publish_version(manifest)
    assert published.manifest == manifest
    assert not published.existed
    record = await store.get_adapter("org/a")
    assert record.name == "org/a"
    assert record.versions == (manifest,)
    assert record.aliases == {"latest": Target.to(manifest.id)}


async def test_publishing_again_changes_nothing_and_keeps_the_first_manifest(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    first = make_manifest("a", 1)
    await store.publish_version(first)
    cursor = await store.cursor()
    again = await store.publish_version(make_manifest("a", 1, created_at_s=2e9))
    assert again.existed
    assert again.manifest == first
    assert (await store.get_adapter("a")).versions == (first,)
    assert await store.cursor() == cursor


async def test_publishing_an_older_version_again_moves_latest_back(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    for number in (1, 2):
        await store.publish_version(make_manifest("a", number))
    published = await store.publish_version(make_manifest("a", 1))
    assert published.existed
    record = await store.get_adapter("a")
    assert record.latest == make_manifest("a", 1)
    assert [manifest.id for manifest in record.versions] == [
        make_manifest("a", number).id for number in (1, 2)
    ]


async def test_versions_are_oldest_first_whatever_their_ids(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    order = [7, 3, 11, 1, 9, 5]
    for number in order:
        await store.publish_version(make_manifest("a", number, created_at_s=1.0))
    record = await store.get_adapter("a")
    assert [int(manifest.id[7:], 16) for manifest in record.versions] == order


async def test_if_new_refuses_another_version_but_not_the_same(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    await store.publish_version(make_manifest("a", 1), if_new=True)
    again = await store.publish_version(make_manifest("a", 1), if_new=True)
    assert again.existed
    with pytest.raises(AlreadyExists, match="'a'") as caught:
        await store.publish_version(make_manifest("a", 2), if_new=True)
    assert caught.value.facts == {"adapter": "a", "version": make_manifest("a", 1).id}
    assert (await store.get_adapter("a")).versions == (make_manifest("a", 1),)


async def test_of_twenty_concurrent_first_publishes_one_wins(
    store: RegistryStore, redis_url: str, make_manifest: ManifestMaker
) -> None:
    others = [RegistryStore(redis_url) for _ in range(3)]
    stores = [store, *others]
    results = await asyncio.gather(
        *(
            stores[number % 4].publish_version(make_manifest("a", number), if_new=True)
            for number in range(20)
        ),
        return_exceptions=True,
    )
    for other in others:
        await other.close()
    winners = [result for result in results if not isinstance(result, BaseException)]
    losers = [result for result in results if isinstance(result, AlreadyExists)]
    assert (len(winners), len(losers)) == (1, 19)
    record = await store.get_adapter("a")
    assert record.versions == (winners[0].manifest,)
    assert await store.count_adapters() == 1


async def test_concurrent_publishes_under_one_name_all_stay(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    await asyncio.gather(
        *(store.publish_version(make_manifest("a", number)) for number in range(20))
    )
    record = await store.get_adapter("a")
    assert len(record.versions) == 20
    assert record.latest == record.versions[-1]


async def test_an_adapter_has_a_largest_number_of_versions(
    store: RegistryStore, make_manifest: ManifestMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "MAX_VERSIONS", 2)
    for number in (1, 2):
        await store.publish_version(make_manifest("a", number))
    with pytest.raises(Conflict, match="has 2 versions"):
        await store.publish_version(make_manifest("a", 3))
    assert (await store.publish_version(make_manifest("a", 1))).existed


async def test_c42_names_that_look_alike_are_different_adapters(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    names = ["org/a", "org_a", "org.a", "ORG/a", "a", "org/a-b"]
    for number, name in enumerate(names):
        await store.publish_version(make_manifest(name, number))
    assert [record.name async for record in store.adapters()] == sorted(names)
    for number, name in enumerate(names):
        assert (await store.get_adapter(name)).latest == make_manifest(name, number)


async def test_a_missing_adapter_is_not_found_by_name(store: RegistryStore) -> None:
    attempts: list[Awaitable[Any]] = [
        store.get_adapter("ghost"),
        store.delete_adapter("ghost"),
        store.set_alias("ghost", "prod", "sha256:" + "0" * 64),
    ]
    for attempt in attempts:
        with pytest.raises(NotFound, match="'ghost' is not registered") as caught:
            await attempt
        assert caught.value.facts == {"adapter": "ghost"}
    assert await store.get_adapters(["ghost"]) == [None]
    assert await store.get_adapters([]) == []
    assert (await store.cursor()).generation == 0


async def test_an_alias_points_at_a_version_of_its_own_adapter(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    for number in (1, 2):
        await store.publish_version(make_manifest("a", number))
    await store.publish_version(make_manifest("b", 3))
    record = await store.set_alias("a", "prod", make_manifest("a", 1).id)
    assert record.aliases == {
        "latest": Target.to(make_manifest("a", 2).id),
        "prod": Target.to(make_manifest("a", 1).id),
    }
    with pytest.raises(NotFound, match="has no version"):
        await store.set_alias("a", "prod", make_manifest("b", 3).id)
    assert (await store.get_adapter("a")).aliases == record.aliases


async def test_a_deleted_adapter_is_gone_and_its_name_is_free(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    await store.publish_version(make_manifest("a", 1))
    await store.set_alias("a", "prod", make_manifest("a", 1).id)
    await store.delete_adapter("a")
    with pytest.raises(NotFound):
        await store.get_adapter("a")
    with pytest.raises(NotFound):
        await store.delete_adapter("a")
    assert await store.list_adapters(limit=10) == []
    await store.publish_version(make_manifest("a", 2), if_new=True)
    assert (await store.get_adapter("a")).aliases == {"latest": Target.to(make_manifest("a", 2).id)}


async def test_pages_go_through_all_adapters_in_the_order_of_names(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    names = [f"t/{number:03d}" for number in range(25)]
    for number, name in enumerate(reversed(names)):
        await store.publish_version(make_manifest(name, number))
    seen: list[str] = []
    while page := await store.list_adapters(after=seen[-1] if seen else None, limit=10):
        assert len(page) <= 10
        seen += [record.name for record in page]
    assert seen == names
    assert [record.name async for record in store.adapters()] == names


async def test_every_key_is_in_one_hash_slot(
    store: RegistryStore, redis_url: str, make_manifest: ManifestMaker
) -> None:
    await store.publish_version(make_manifest("a", 1))
    await store.leases.register("r", "127.0.0.1:1", "sha256:b")
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        keys = client.keys()
    assert len(keys) == 10
    assert all(key.startswith("{lorafleet}:") for key in keys)


# The feed.


async def test_changes_name_what_changed_since_a_cursor(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    start = await store.cursor()
    await store.publish_version(make_manifest("a", 1))
    await store.publish_version(make_manifest("b", 2))
    await store.set_alias("a", "prod", make_manifest("a", 1).id)
    await store.delete_adapter("b")
    changes = await store.changes(start)
    assert changes.names == {"a", "b"}
    assert changes.cursor == await store.cursor()
    assert changes.cursor.generation == 4
    assert (await store.changes(changes.cursor)).names == frozenset()


async def test_a_change_wakes_whoever_waits(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    waiting = asyncio.create_task(store.changes(await store.cursor(), wait_s=2))
    await asyncio.sleep(0.1)
    begun = time.monotonic()
    await store.publish_version(make_manifest("a", 1))
    assert (await waiting).names == {"a"}
    assert time.monotonic() - begun < 0.5


async def test_waiting_without_a_change_ends_in_time(store: RegistryStore) -> None:
    begun = time.monotonic()
    assert (await store.changes(await store.cursor(), wait_s=0.2)).names == frozenset()
    assert 0.15 < time.monotonic() - begun < 1.0


async def test_a_cursor_that_fell_out_of_the_feed_asks_for_a_snapshot(
    redis_url: str, make_manifest: ManifestMaker
) -> None:
    store = RegistryStore(redis_url, max_changes=10)
    start = await store.cursor()
    await asyncio.gather(
        *(store.publish_version(make_manifest("a", number)) for number in range(300))
    )
    changes = await store.changes(start)
    assert changes.names is None
    assert changes.cursor == await store.cursor()
    await store.publish_version(make_manifest("b", 1))
    assert (await store.changes(changes.cursor)).names == {"b"}
    await store.close()


async def test_a_flushed_database_asks_for_a_snapshot(
    store: RegistryStore, redis_url: str, make_manifest: ManifestMaker
) -> None:
    await store.publish_version(make_manifest("a", 1))
    cursor = await store.cursor()
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    emptied = await store.changes(cursor)
    assert (emptied.names, emptied.cursor) == (None, Cursor(generation=0, incarnation=None))
    # Also when the new database has caught up in numbers.
    for number in (1, 2):
        await store.publish_version(make_manifest("b", number))
    refilled = await store.changes(cursor)
    assert refilled.names is None
    assert refilled.cursor == await store.cursor()


async def test_the_feed_is_trimmed(redis_url: str, make_manifest: ManifestMaker) -> None:
    store = RegistryStore(redis_url, max_changes=10)
    await asyncio.gather(
        *(store.publish_version(make_manifest("a", number)) for number in range(500))
    )
    with redis.Redis.from_url(redis_url) as client:
        assert client.xlen("{lorafleet}:changes") < 250
    await store.close()


# Redis away.


async def test_a_command_that_redis_refuses_is_internal_at_once(
    store: RegistryStore, redis_url: str, make_manifest: ManifestMaker
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.set("{lorafleet}:adapter:a", "no hash")
    with pytest.raises(Internal, match="WRONGTYPE"):
        await store.publish_version(make_manifest("a", 1))


async def test_with_redis_away_everything_is_unavailable_soon(
    make_manifest: ManifestMaker,
) -> None:
    store = RegistryStore("redis://127.0.0.1:1/0", options=LinkOptions(deadline_s=0.3))
    attempts: list[Awaitable[Any]] = [
        store.ping(),
        store.publish_version(make_manifest("a", 1)),
        store.set_alias("a", "prod", make_manifest("a", 1).id),
        store.delete_adapter("a"),
        store.get_adapter("a"),
        store.list_adapters(limit=1),
        store.changes(Cursor(generation=0, incarnation=None), wait_s=0.1),
        store.leases.live_replicas(),
    ]
    begun = time.monotonic()
    results = await asyncio.gather(*attempts, return_exceptions=True)
    assert time.monotonic() - begun < 1.5
    for result in results:
        assert isinstance(result, LorafleetError)
        assert result.code == "UNAVAILABLE"
        assert "does not answer" in result.message
    await store.close()
