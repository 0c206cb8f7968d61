"""The catalogue: current within a second, and serving what it knows while Redis is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import redis

from lorafleet.core.errors import Conflict, NotFound, Unavailable
from lorafleet.core.manifest import VersionManifest
from lorafleet.core.names import AdapterRef, parse_ref
from lorafleet.registry import Catalogue, EmbeddedRedis, LinkOptions, RegistryStore

ManifestMaker = Callable[..., VersionManifest]


def _ref(text: str) -> AdapterRef:
    ref = parse_ref(text)
    assert ref is not None
    return ref


async def _until(condition: Callable[[], bool], timeout_s: float = 5.0) -> float:
    """Wait for a condition; returns how long it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < timeout_s, "it did not come to pass"
        await asyncio.sleep(0.005)
    return time.monotonic() - begun


@pytest.fixture
async def catalogue(store: RegistryStore) -> AsyncIterator[Catalogue]:
    catalogue = Catalogue(store)
    await catalogue.start()
    yield catalogue
    await catalogue.stop()


async def test_it_knows_after_start_what_was_registered_before(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    for number in range(5):
        await store.publish_version(make_manifest(f"a{number}", number))
    catalogue = Catalogue(store)
    await catalogue.start()
    assert catalogue.synced
    assert catalogue.connected
    assert catalogue.names() == [f"a{number}" for number in range(5)]
    assert len(catalogue) == 5
    assert catalogue.generation == 5
    await catalogue.stop()


async def test_references_resolve_to_versions(
    store: RegistryStore, catalogue: Catalogue, make_manifest: ManifestMaker
) -> None:
    one, two = make_manifest("org/a", 1), make_manifest("org/a", 2)
    await store.publish_version(one)
    await store.publish_version(two)
    await store.set_alias("org/a", "prod", one.id)
    await _until(lambda: catalogue.generation == 3)
    assert catalogue.resolve(_ref("org/a")) == two
    assert catalogue.resolve(_ref("org/a@latest")) == two
    assert catalogue.resolve(_ref("org/a@prod")) == one
    assert catalogue.resolve(_ref(f"org/a@{one.id}")) == one
    assert catalogue.manifests() == [one, two]
    for text in ("org/A", "org/ab", "org/a@canary", f"org/a@sha256:{9:064x}"):
        with pytest.raises(NotFound) as caught:
            catalogue.resolve(_ref(text))
        assert caught.value.facts["adapter"] == text.partition("@")[0]


async def test_a_version_is_found_by_id_under_whichever_name_has_it(
    store: RegistryStore, catalogue: Catalogue, make_manifest: ManifestMaker
) -> None:
    await store.publish_version(make_manifest("a", 1))
    await store.publish_version(make_manifest("b", 1))
    await _until(lambda: catalogue.generation == 2)
    await store.delete_adapter("a")
    await _until(lambda: catalogue.generation == 3)
    assert catalogue.manifest(make_manifest("b", 1).id).adapter == "b"
    await store.delete_adapter("b")
    await _until(lambda: catalogue.generation == 4)
    with pytest.raises(NotFound, match="sha256"):
        catalogue.manifest(make_manifest("b", 1).id)


async def test_changes_are_visible_in_well_under_a_second(
    store: RegistryStore, catalogue: Catalogue, make_manifest: ManifestMaker
) -> None:
    for number in range(5):
        await store.publish_version(make_manifest("a", number))
        assert await _until(lambda: _is(catalogue, "a", number)) < 0.5  # noqa: B023
    await store.delete_adapter("a")
    assert await _until(lambda: catalogue.names() == []) < 0.5


def _is(catalogue: Catalogue, name: str, number: int) -> bool:
    if name not in catalogue.names():
        return False
    return catalogue.resolve(_ref(name)).id == f"sha256:{number:064x}"


async def test_listeners_hear_names_and_cannot_break_it(
    store: RegistryStore, catalogue: Catalogue, make_manifest: ManifestMaker
) -> None:
    heard: list[frozenset[str]] = []

    def broken(_names: frozenset[str]) -> None:
        raise RuntimeError("a listener's bug")

    catalogue.on_change(broken)
    end = catalogue.on_change(heard.append)
    await store.publish_version(make_manifest("a", 1))
    await _until(lambda: bool(heard))
    assert heard == [frozenset({"a"})]
    end()
    end()
    await store.publish_version(make_manifest("b", 1))
    await _until(lambda: "b" in catalogue.names())
    assert len(heard) == 1


async def test_c40_an_empty_redis_is_a_loss_and_what_is_known_stays_until_there_is_new_data(
    store: RegistryStore, redis_url: str, catalogue: Catalogue, make_manifest: ManifestMaker
) -> None:
    await store.publish_version(make_manifest("a", 1))
    await _until(lambda: catalogue.names() == ["a"])
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    await _until(lambda: not catalogue.connected)
    assert catalogue.names() == ["a"]
    await store.publish_version(make_manifest("b", 1))
    await _until(lambda: catalogue.names() == ["b"])
    assert catalogue.connected


async def test_a_resync_mends_what_the_feed_did_not_tell(
    store: RegistryStore, redis_url: str, make_manifest: ManifestMaker
) -> None:
    await store.publish_version(make_manifest("a", 1))
    catalogue = Catalogue(store, resync_s=0.2)
    await catalogue.start()
    with redis.Redis.from_url(redis_url) as client:
        client.delete("{lorafleet}:adapter:a")
    await _until(lambda: catalogue.names() == [])
    await catalogue.stop()


async def test_it_starts_without_redis_and_catches_up_when_redis_comes(
    tmp_path: Path, make_manifest: ManifestMaker
) -> None:
    server = EmbeddedRedis(tmp_path)
    url = server.start()
    store = RegistryStore(url)
    await store.publish_version(make_manifest("a", 1))
    await asyncio.to_thread(server.stop)
    late = RegistryStore(url, options=LinkOptions(deadline_s=0.3))
    catalogue = Catalogue(late)
    await catalogue.start(wait_s=0.5)
    assert not catalogue.connected
    assert not catalogue.synced
    with pytest.raises(Unavailable, match="not been read yet"):
        catalogue.resolve(_ref("a"))
    assert catalogue.names() == []
    await asyncio.to_thread(server.start)
    assert await _until(lambda: catalogue.connected, 10) < 5
    assert catalogue.resolve(_ref("a")) == make_manifest("a", 1)
    await catalogue.stop()
    await late.close()
    await store.close()
    await asyncio.to_thread(server.stop)


async def test_with_redis_away_it_answers_from_what_it_knows_and_recovers(
    tmp_path: Path, make_manifest: ManifestMaker
) -> None:
    server = EmbeddedRedis(tmp_path)
    store = RegistryStore(server.start(), options=LinkOptions(deadline_s=0.3))
    catalogue = Catalogue(store)
    await store.publish_version(make_manifest("a", 1))
    await catalogue.start()
    await asyncio.to_thread(server.stop)
    await _until(lambda: not catalogue.connected)
    for _ in range(20):
        assert catalogue.resolve(_ref("a")) == make_manifest("a", 1)
        with pytest.raises(NotFound):
            catalogue.resolve(_ref("unknown"))
        await asyncio.sleep(0.05)
    with pytest.raises(Unavailable):
        await store.publish_version(make_manifest("b", 2))
    await asyncio.to_thread(server.start)
    await store.publish_version(make_manifest("b", 2))
    assert await _until(lambda: catalogue.connected and "b" in catalogue.names(), 10) < 5
    assert catalogue.names() == ["a", "b"]
    await catalogue.stop()
    await store.close()
    await asyncio.to_thread(server.stop)


async def test_it_is_started_once_and_readable_after_stop(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    await store.publish_version(make_manifest("a", 1))
    catalogue = Catalogue(store)
    await catalogue.start()
    with pytest.raises(Conflict):
        await catalogue.start()
    await catalogue.stop()
    await catalogue.stop()
    assert catalogue.names() == ["a"]
    assert not catalogue.connected


async def test_a_thousand_adapters_are_read_in_pages(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    await asyncio.gather(
        *(store.publish_version(make_manifest(f"a{number:04d}", number)) for number in range(1000))
    )
    catalogue = Catalogue(store)
    begun = time.monotonic()
    await catalogue.start()
    assert time.monotonic() - begun < 3
    assert len(catalogue) == 1000
    await catalogue.stop()
