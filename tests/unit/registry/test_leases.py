"""Leases: epochs fence, deadlines end, renewals revive."""

from __future__ import annotations

import asyncio

import pytest
import redis

from lorafleet.core.errors import Conflict, NotFound
from lorafleet.registry import RegistryStore, ReplicaLease

BASE = "sha256:" + "b" * 64


async def test_a_registered_replica_is_live_with_what_it_said(store: RegistryStore) -> None:
    epoch = await store.leases.register("r1", "127.0.0.1:5000", BASE)
    assert await store.leases.live_replicas() == [
        ReplicaLease(replica_id="r1", epoch=epoch, address="127.0.0.1:5000", base_digest=BASE)
    ]


async def test_epochs_grow_with_each_start_of_an_id_also_after_a_release(
    store: RegistryStore,
) -> None:
    first = await store.leases.register("r1", "a:1", BASE)
    second = await store.leases.register("r1", "a:2", BASE)
    await store.leases.release("r1", second)
    third = await store.leases.register("r1", "a:3", BASE)
    assert first < second < third
    assert await store.leases.register("r2", "a:4", BASE) == 1


async def test_epochs_grow_over_a_loss_of_redis_when_the_replica_says_its_own(
    store: RegistryStore, redis_url: str
) -> None:
    for _ in range(3):
        epoch = await store.leases.register("r1", "a:1", BASE)
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    assert await store.leases.register("r1", "a:1", BASE, after_epoch=epoch) == epoch + 1


async def test_an_older_epoch_is_fenced_off(store: RegistryStore) -> None:
    old = await store.leases.register("r1", "a:1", BASE)
    new = await store.leases.register("r1", "a:2", BASE)
    with pytest.raises(Conflict, match=f"replaced by epoch {new}"):
        await store.leases.renew("r1", old)
    await store.leases.release("r1", old)
    assert [lease.address for lease in await store.leases.live_replicas()] == ["a:2"]


async def test_a_lease_ends_without_renewal_and_renewal_revives_it(store: RegistryStore) -> None:
    epoch = await store.leases.register("r1", "a:1", BASE, ttl_s=0.2)
    await store.leases.register("r2", "a:2", BASE, ttl_s=5)
    await asyncio.sleep(0.3)
    assert [lease.replica_id for lease in await store.leases.live_replicas()] == ["r2"]
    await store.leases.renew("r1", epoch, ttl_s=5)
    assert [lease.replica_id for lease in await store.leases.live_replicas()] == ["r1", "r2"]


async def test_a_renewed_lease_stays(store: RegistryStore) -> None:
    epoch = await store.leases.register("r1", "a:1", BASE, ttl_s=0.3)
    for _ in range(5):
        await asyncio.sleep(0.1)
        await store.leases.renew("r1", epoch, ttl_s=0.3)
    assert len(await store.leases.live_replicas()) == 1


async def test_a_released_lease_is_gone_at_once_and_cannot_be_renewed(
    store: RegistryStore,
) -> None:
    epoch = await store.leases.register("r1", "a:1", BASE)
    await store.leases.release("r1", epoch)
    await store.leases.release("r1", epoch)
    assert await store.leases.live_replicas() == []
    with pytest.raises(NotFound, match="register again"):
        await store.leases.renew("r1", epoch)


async def test_a_lease_that_ran_out_long_ago_is_forgotten(
    store: RegistryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorafleet.registry.leases._FORGET_AFTER_S", 0.05)
    epoch = await store.leases.register("r1", "a:1", BASE, ttl_s=0.05)
    await asyncio.sleep(0.2)
    assert await store.leases.live_replicas() == []
    with pytest.raises(NotFound):
        await store.leases.renew("r1", epoch)
    assert await store.leases.register("r1", "a:1", BASE) == epoch + 1


async def test_of_concurrent_starts_each_has_its_own_epoch(store: RegistryStore) -> None:
    epochs = await asyncio.gather(
        *(store.leases.register("r1", f"a:{number}", BASE) for number in range(10))
    )
    assert sorted(epochs) == list(range(1, 11))
    (live,) = await store.leases.live_replicas()
    assert live.epoch == 10
