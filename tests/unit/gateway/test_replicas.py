"""Replicas come by their leases, and stay by their reports."""

from __future__ import annotations

import asyncio

import pytest

from gateway_support import BASE, FAST, ScriptedReplica, eventually
from lorafleet.core.errors import Unavailable
from lorafleet.gateway.replicas import ReplicaPool
from lorafleet.v1 import replica_pb2


@pytest.fixture
async def pool(house):
    built = ReplicaPool(house.store.leases, BASE.digest, options=FAST)
    await built.start()
    house.exit.push_async_callback(built.stop)
    return built


async def eligible(pool: ReplicaPool, *ids: str) -> None:
    await eventually(lambda: pool.view.eligible == ids)


async def test_a_replica_is_found_by_its_lease_and_known_by_its_reports(house, pool) -> None:
    assert pool.view.eligible == ()
    replica = await house.replica("a", num_pages=32)
    await eligible(pool, "a")
    assert pool.view.replicas["a"].num_pages == 32
    replica.resident.add("v1")
    replica.changed()
    await eventually(lambda: pool.view.replicas["a"].is_resident("v1"))
    pool.view.check()


async def test_a_replica_of_another_base_is_left_alone(house, pool) -> None:
    await house.store.leases.register("other", "127.0.0.1:1", "sha256:other")
    await house.replica("a")
    await eligible(pool, "a")
    assert "other" not in pool.view.replicas


async def test_a_dead_replica_is_not_eligible_and_comes_back_by_itself(house, pool) -> None:
    replica = await house.replica("a")
    await house.replica("b")
    await eligible(pool, "a", "b")
    address = replica.address
    await replica.server.stop(0.0)
    await eligible(pool, "b")
    replica.server.listen = address
    await replica.server.start()
    await eligible(pool, "a", "b")


async def test_a_silent_replica_is_not_eligible(house, pool) -> None:
    replica = await house.replica("a")
    await eligible(pool, "a")
    replica.silent = True
    await eligible(pool)
    replica.silent = False
    await eligible(pool, "a")


async def test_a_draining_replica_is_not_eligible(house, pool) -> None:
    replica = await house.replica("a")
    await eligible(pool, "a")
    replica.draining = True
    replica.changed()
    await eligible(pool)
    assert pool.view.replicas["a"].connected


async def test_reports_of_an_older_epoch_are_ignored(house, pool) -> None:
    stale = ScriptedReplica("a")
    stale.epoch = 0
    stale.resident.add("old")
    await stale.server.start()
    house.exit.push_async_callback(stale.server.stop, 0.0)
    await house.store.leases.register("a", stale.address, BASE.digest, ttl_s=60.0)
    await eventually(lambda: "a" in pool.view.replicas)
    await asyncio.sleep(0.3)
    assert stale.sequence > 0
    assert pool.view.eligible == ()
    assert pool.view.replicas["a"].report is None


async def test_a_restarted_replica_replaces_its_older_self(house, pool) -> None:
    old = await house.replica("a")
    old.resident.add("old")
    old.changed()
    await eventually(lambda: "a" in pool.view.holders.get("old", ()))
    new = await house.replica("a")
    await eventually(lambda: pool.view.replicas["a"].address == new.address)
    await eligible(pool, "a")
    assert pool.view.replicas["a"].epoch == new.epoch > old.epoch
    assert pool.view.holders.get("old", ()) == ()
    old.changed()
    await asyncio.sleep(0.1)
    assert pool.view.holders.get("old", ()) == ()


async def test_another_process_behind_the_address_is_not_taken_for_the_replica(house, pool) -> None:
    replica = await house.replica("a")
    replica.named = "somebody else"
    await eventually(lambda: "a" in pool.view.replicas)
    await asyncio.sleep(0.3)
    assert pool.view.eligible == ()
    replica.named = "a"
    await eligible(pool, "a")


async def test_a_lease_that_ran_out_does_not_end_a_replica_that_reports(house, pool) -> None:
    replica = await house.replica("a")
    await eligible(pool, "a")
    await house.store.leases.release("a", replica.epoch)
    await asyncio.sleep(0.3)
    assert pool.view.eligible == ("a",)
    await replica.server.stop(0.0)
    await eventually(lambda: "a" not in pool.view.replicas)


async def test_a_gone_replica_is_kept_until_its_last_request_has_ended(house, pool) -> None:
    replica = await house.replica("a")
    await eligible(pool, "a")
    with pool.open("a"):
        await house.store.leases.release("a", replica.epoch)
        await replica.server.stop(0.0)
        await eventually(lambda: not pool.view.eligible)
        await asyncio.sleep(0.2)
        assert pool.view.replicas["a"].inflight == 1
        with pytest.raises(Unavailable, match="gone"), pool.open("a"):
            pass
    await eventually(lambda: "a" not in pool.view.replicas)


async def test_requests_are_counted_while_open(house, pool) -> None:
    await house.replica("a")
    await eligible(pool, "a")

    def fail() -> None:
        with pool.open("a"), pool.open("a"):
            assert pool.view.replicas["a"].inflight == 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert pool.view.replicas["a"].inflight == 0


async def test_a_new_epoch_at_the_same_address_cuts_no_request(house, pool) -> None:
    replica = await house.replica("a")
    await eligible(pool, "a")
    replica.answer = replica.slow
    with pool.open("a") as stub:
        call = stub.Generate(replica_pb2.ReplicaGenerateRequest(text="x"))
        await call.read()
        replica.epoch = await house.store.leases.register(
            "a", replica.address, BASE.digest, after_epoch=replica.epoch
        )
        await eventually(lambda: pool.view.replicas["a"].epoch == replica.epoch)
        await eligible(pool, "a")
        await asyncio.sleep(0.2)
        assert (await call.read()).HasField("delta")
        call.cancel()


async def test_a_replaced_replica_may_end_its_requests(house, pool) -> None:
    old = await house.replica("a")
    await eligible(pool, "a")
    old.answer = old.slow
    with pool.open("a") as stub:
        call = stub.Generate(replica_pb2.ReplicaGenerateRequest(text="x"))
        await call.read()
        new = await house.replica("a")
        await eventually(lambda: pool.view.replicas["a"].address == new.address)
        await eligible(pool, "a")
        await asyncio.sleep(0.2)
        assert (await call.read()).HasField("delta")
        assert pool.view.replicas["a"].inflight == 1
        call.cancel()
    await eventually(lambda: old.running == 0)
    assert pool.view.replicas["a"].inflight == 0
