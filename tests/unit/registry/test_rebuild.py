"""A Redis that lost its data is rebuilt, and nobody who serves notices that it was empty."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from lorafleet.core.errors import NotFound, Unauthenticated, Unavailable
from lorafleet.core.manifest import VersionManifest
from lorafleet.core.names import parse_ref
from lorafleet.core.record import Share, Target
from lorafleet.core.tenant import ApiKey, Quota, Scope, new_secret, secret_sha256
from lorafleet.registry import BlobStore, Catalogue, RegistryStore
from lorafleet.registry.garbage import collect_garbage
from lorafleet.registry.keyring import Keyring
from lorafleet.registry.mirror import Mirror, SavedAdapter
from lorafleet.registry.rebuild import Rebuilder

ManifestMaker = Callable[..., VersionManifest]


@pytest.fixture
async def store(redis_url: str, tmp_path: Path) -> AsyncIterator[RegistryStore]:
    """The registry's writer, with a mirror."""
    store = RegistryStore(redis_url, mirror=tmp_path / "mirror")
    yield store
    await store.close()


def rebuilder(store: RegistryStore) -> Rebuilder:
    assert store.rebuilder is not None
    return store.rebuilder


def flush(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()


async def fill(store: RegistryStore, make: ManifestMaker) -> str:
    """One of everything; returns a secret."""
    one = (await store.publish_version(make("org/a", 1), labels={"team": "x"})).manifest
    two = (await store.publish_version(make("org/a", 2))).manifest
    await store.set_alias("org/a", "prod", one.id)
    split = Target((Share(version=one.id, weight=3), Share(version=two.id)))
    await store.set_alias("org/a", "prod", split)
    await store.pin("org/a", one.id, 2)
    await store.publish_version(make("gone", 3))
    await store.delete_adapter("gone")
    await store.publish_version(make("passed", 4))
    await store.delete_adapter("passed", grace_s=0.0)
    await store.publish_version(make("plain", 5))
    await store.tenancy.set_quota("org", Quota(adapters=7, tokens_per_minute=9))
    key_id, secret = new_secret()
    key = ApiKey(id=key_id, tenant="org", scope=Scope.DATA, secret_sha256=secret_sha256(secret))
    await store.tenancy.create_key(key)
    return secret


async def everything(store: RegistryStore) -> dict[str, object]:
    records = [record async for record in store.adapters()]
    return {
        "adapters": records,
        "deleted": [r async for r in store.adapters(deleted=True) if r.name != "passed"],
        "history": [await store.history(record.name) for record in records],
        "tenants": [
            replace(tenant, created_at_s=0.0)
            for tenant in await store.tenancy.page(after=None, limit=100)
        ],
        "keys": await store.tenancy.all_keys(),
    }


async def test_c40_a_flushed_redis_is_rebuilt_with_everything(
    store: RegistryStore, redis_url: str, make_manifest: ManifestMaker
) -> None:
    await fill(store, make_manifest)
    before, generation = await everything(store), (await store.cursor()).generation
    flush(redis_url)
    await rebuilder(store).reconcile()
    assert await everything(store) == before
    assert (await store.cursor()).generation > generation
    record = await store.rollback("org/a", "prod")
    assert record.aliases["prod"] == Target.to(record.versions[0].id)
    assert (await store.restore_adapter("gone")).name == "gone"
    with pytest.raises(NotFound):
        await store.restore_adapter("passed")


async def test_a_new_process_rebuilds_what_an_earlier_one_mirrored(
    store: RegistryStore, redis_url: str, make_manifest: ManifestMaker, tmp_path: Path
) -> None:
    await fill(store, make_manifest)
    before = await everything(store)
    flush(redis_url)
    later = RegistryStore(redis_url, mirror=tmp_path / "mirror")
    await rebuilder(later).reconcile()
    assert await everything(later) == before
    await later.close()


async def test_changes_are_refused_until_it_is_rebuilt(
    store: RegistryStore, redis_url: str, make_manifest: ManifestMaker
) -> None:
    await fill(store, make_manifest)
    flush(redis_url)
    with pytest.raises(Unavailable, match="lost data"):
        await store.publish_version(make_manifest("org/a", 6))
    with pytest.raises(Unavailable, match="lost data"):
        await store.tenancy.create("other", Quota())
    await rebuilder(store).reconcile()
    await store.publish_version(make_manifest("org/a", 6))
    assert len((await store.get_adapter("org/a")).versions) == 3


async def test_followers_never_see_less_than_everything(
    store: RegistryStore, redis_url: str, make_manifest: ManifestMaker
) -> None:
    """Known adapters and keys serve all along; afterwards new ones are heard of again."""
    secret = await fill(store, make_manifest)
    for number in range(100, 300):
        await store.publish_version(make_manifest(f"many-{number}", number))
    follower = RegistryStore(redis_url)
    catalogue, keyring = Catalogue(follower), Keyring(follower)
    await catalogue.start()
    await keyring.start()
    known, count = parse_ref("org/a@prod"), len(catalogue)
    assert known is not None
    failures: list[Exception] = []

    async def serve() -> None:
        while True:
            try:
                assert len(catalogue) >= count
                catalogue.resolve(known)
                assert keyring.authenticate(secret).tenant == "org"
            except (NotFound, Unauthenticated, AssertionError) as error:
                failures.append(error)
            await asyncio.sleep(0.001)

    serving = asyncio.create_task(serve())
    flush(redis_url)
    await asyncio.sleep(1.5)
    await rebuilder(store).reconcile()
    await store.publish_version(make_manifest("new", 7))
    async with asyncio.timeout(5):
        while len(catalogue) != count + 1:
            await asyncio.sleep(0.01)
    serving.cancel()
    assert not failures
    await catalogue.stop()
    await keyring.stop()
    await follower.close()


async def test_a_rebuild_that_broke_off_goes_on(
    store: RegistryStore, redis_url: str, make_manifest: ManifestMaker, tmp_path: Path
) -> None:
    await fill(store, make_manifest)
    before = await everything(store)
    flush(redis_url)
    first = rebuilder(store)
    await first._saver.begin(first._mirror.state.generation)
    saved = next(iter(Mirror(tmp_path / "mirror").adapters()))
    await first._saver.put_back(saved)
    with pytest.raises(Unavailable, match="being rebuilt"):
        await store.cursor()
    with pytest.raises(Unavailable, match="lost data"):
        await store.publish_version(make_manifest("org/a", 6))
    later = RegistryStore(redis_url, mirror=tmp_path / "mirror")
    await rebuilder(later).reconcile()
    assert await everything(later) == before
    await later.close()


async def test_what_a_failover_has_lost_is_put_back(
    store: RegistryStore, redis_url: str, make_manifest: ManifestMaker
) -> None:
    """The new primary had not heard of the last changes: a push, a delete, an alias."""
    await fill(store, make_manifest)
    with redis.Redis.from_url(redis_url) as client:
        old = {name: client.dump(name) for name in client.keys("*")}
        await store.publish_version(make_manifest("late", 8))
        await store.delete_adapter("plain")
        await store.remove_alias("org/a", "prod")
        expected = await everything(store)
        client.flushall()
        for name, value in old.items():
            client.restore(name, 0, value)
    with pytest.raises(Unavailable, match="lost data"):
        await store.publish_version(make_manifest("later", 9))
    await rebuilder(store).reconcile()
    assert await everything(store) == expected
    await store.publish_version(make_manifest("later", 9))


async def test_other_data_is_mirrored_not_overwritten(
    store: RegistryStore, redis_url: str, make_manifest: ManifestMaker, tmp_path: Path
) -> None:
    await fill(store, make_manifest)
    flush(redis_url)
    other = RegistryStore(redis_url)
    await other.publish_version(make_manifest("other", 1))
    await rebuilder(store).reconcile()
    assert [record.name async for record in store.adapters()] == ["other"]
    assert [saved.name for saved in Mirror(tmp_path / "mirror").adapters()] == ["other"]
    await store.publish_version(make_manifest("other", 2))
    await other.close()


async def test_no_file_is_garbage_while_redis_has_lost_what_refers_to_it(
    store: RegistryStore, redis_url: str, blobs: BlobStore, make_manifest: ManifestMaker
) -> None:
    await fill(store, make_manifest)
    flush(redis_url)
    with pytest.raises(Unavailable):
        await collect_garbage(store, blobs, grace_s=0.0)
    await rebuilder(store).reconcile()
    await collect_garbage(store, blobs, grace_s=0.0)


async def test_what_redis_has_lost_is_not_said_to_be_unknown(
    store: RegistryStore, redis_url: str, make_manifest: ManifestMaker
) -> None:
    await fill(store, make_manifest)
    flush(redis_url)
    for reading in (
        store.get_adapter("org/a"),
        store.history("org/a"),
        store.list_adapters(limit=10),
    ):
        with pytest.raises(Unavailable, match="lost data"):
            await reading
    await rebuilder(store).reconcile()
    with pytest.raises(NotFound):
        await store.get_adapter("never")


def test_a_damaged_file_is_left_out_and_the_rest_is_read(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path)
    for name in ("a", "A", "b"):  # by case alone
        mirror.save(SavedAdapter(name=name, fields={"revision": "1"}, history=[]))
    assert sorted(saved.name for saved in mirror.adapters()) == ["A", "a", "b"]
    next((tmp_path / "adapters").glob("*.json")).write_text('{"name": "a", "fie')
    assert len(list(mirror.adapters())) == 2
