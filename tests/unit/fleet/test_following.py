"""Pins and hints of the registry reach the engines, on as many replicas as they say."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.fleet.following import chosen
from lorafleet.fleet.replica import ReplicaOptions
from lorafleet.sdk import AsyncClient, admin
from support.adapters import factors, write_adapter
from support.replica import Served, eventually, serve

REPLICAS = st.sets(st.text("abcdef", min_size=1, max_size=5), min_size=1, max_size=20)


@given(replicas=REPLICAS, count=st.integers(1, 30), version=st.text(min_size=1, max_size=8))
def test_as_many_replicas_are_chosen_as_are_wanted_or_there(replicas, count, version):
    found = chosen(version, count, replicas)
    assert len(found) == min(count, len(replicas))
    assert found <= replicas


@given(replicas=REPLICAS, count=st.integers(1, 5), version=st.text(min_size=1, max_size=8))
def test_a_replica_that_goes_moves_no_other_holder(replicas, count, version):
    before = chosen(version, count, replicas)
    for gone in sorted(replicas)[:3]:
        if len(replicas) > 1:
            assert before - {gone} <= chosen(version, count, replicas - {gone})


def test_holders_are_spread_over_the_replicas():
    replicas = [f"replica-{index}" for index in range(4)]
    counts = Counter(r for i in range(2000) for r in chosen(f"sha256:{i}", 2, replicas))
    assert all(700 < counts[replica] < 1300 for replica in replicas)


async def resident(served: Served, version: str) -> bool:
    report = await served.watch().read()
    return version in report.resident


async def test_a_pinned_version_is_loaded_and_stays_until_it_is_unpinned(
    served: Served, registry: AsyncClient, version: str, tmp_path: Path
) -> None:
    await registry.run(admin.pin("x", "latest", 1))
    await eventually(lambda: resident(served, version))
    for seed in range(10):  # more than the pool has pages
        directory = write_adapter(tmp_path / f"other-{seed}", factors(rank=4, seed=100 + seed))
        other, _ = await registry.push_adapter(directory, name=f"other-{seed}")
        await served.answer(other.id)
        assert await resident(served, version)
    await registry.run(admin.pin("x", "latest", 0))
    await asyncio.sleep(0.3)
    for seed in range(10):
        record = await registry.get_adapter(f"other-{seed}")
        await served.answer(record.latest.id)
    assert not await resident(served, version)


async def test_a_prefetched_version_is_resident_before_its_first_request(
    served: Served, registry: AsyncClient, version: str
) -> None:
    assert not await resident(served, version)
    await registry.run(admin.prefetch("x", "latest", 1))
    await eventually(lambda: resident(served, version))
    started, _, _ = await served.answer(version)
    assert started.resident


@pytest.mark.parametrize("count", [1, 2])
async def test_a_pin_is_held_by_as_many_replicas_as_it_says(
    options: ReplicaOptions, registry: AsyncClient, version: str, count: int
) -> None:
    async with (
        serve(replace(options, replica_id="one")) as one,
        serve(replace(options, replica_id="two")) as two,
    ):
        await registry.run(admin.pin("x", "latest", count))

        async def holders() -> int:
            return sum([await resident(one, version), await resident(two, version)])

        await eventually(lambda: _is(holders, count))
        await asyncio.sleep(1.5)
        assert await holders() == count


async def _is(holders, count: int) -> bool:
    return await holders() == count
