"""Kept versions stay through any traffic, use half the pool at most, and never starve a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lorafleet.core.errors import Unavailable
from lorafleet.engine.keeping import Keeper
from lorafleet.engine.residency import Residency
from lorafleet.native import AdapterPool
from support.adapters import tiny_base
from support.engine import Shelf, many_adapters

BASE = tiny_base()
PAGES = 4


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("keeping")
    return [*many_adapters(folder / "one", 8), *many_adapters(folder / "three", 1, rank=24)]


@pytest.fixture
def shelf(directories: list[Path]) -> Shelf:
    return Shelf(BASE, directories)


@pytest.fixture
def residency(shelf: Shelf) -> Iterator[Residency]:
    made = Residency(AdapterPool(BASE.sites, PAGES, BASE.page_rows), shelf, lambda: None, 4)
    yield made
    made.stop()


@pytest.fixture
def keeper(residency: Residency) -> Keeper:
    return Keeper(residency)


def until(
    residency: Residency,
    keeper: Keeper,
    true: Callable[[], bool],
    *wanted: str,
    starve: bool = False,
) -> None:
    deadline_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline_s
        residency.collect()
        for version in wanted:
            residency.ensure(version)
        keeper.tend(others_starve=starve)
        residency.place([((version, 1.0),) for version in wanted], others=not starve)
        residency.check()
        time.sleep(0.001)


def test_kept_versions_stay_while_others_come_and_go(
    residency: Residency, keeper: Keeper, shelf: Shelf
) -> None:
    kept, others = shelf.versions[:2], shelf.versions[2:8]
    keeper.want(kept)
    until(residency, keeper, lambda: set(keeper.held) == set(kept))
    for version in others:
        until(residency, keeper, lambda: residency.is_resident(version), version)  # noqa: B023
        assert all(residency.is_resident(one) for one in kept)


def test_at_most_half_the_pages_are_held_and_the_first_come_first(
    residency: Residency, keeper: Keeper, shelf: Shelf
) -> None:
    keeper.want(shelf.versions[:4])
    until(residency, keeper, lambda: set(keeper.held) == set(shelf.versions[:2]))
    for _ in range(20):
        keeper.tend(others_starve=False)
    assert set(keeper.held) == set(shelf.versions[:2])


def test_a_request_that_needs_more_than_the_rest_gets_it_when_it_starves(
    residency: Residency, keeper: Keeper, shelf: Shelf
) -> None:
    big = shelf.versions[8]
    keeper.want(shelf.versions[:2])
    until(residency, keeper, lambda: len(keeper.held) == 2)
    until(residency, keeper, lambda: residency.is_placing(big), big)
    for _ in range(20):
        until(residency, keeper, lambda: True, big)
        assert not residency.is_resident(big)
    until(residency, keeper, lambda: residency.is_resident(big), big, starve=True)
    assert keeper.held == ()
    keeper.want([])
    residency.check()


def test_what_is_no_longer_wanted_can_be_evicted_and_unloaded(
    residency: Residency, keeper: Keeper, shelf: Shelf
) -> None:
    one, two = shelf.versions[:2]
    keeper.want([one, two])
    until(residency, keeper, lambda: len(keeper.held) == 2)
    assert residency.unload(one) is False
    keeper.forget(one)
    assert not residency.is_resident(one)
    assert keeper.held == (two,)
    keeper.want([])
    assert residency.unload(two) is True


def test_a_load_that_fails_is_not_tried_at_every_step(
    residency: Residency, keeper: Keeper, shelf: Shelf
) -> None:
    version = shelf.versions[0]
    shelf.error = Unavailable("the blob store is away")
    keeper.want([version])
    deadline_s = time.monotonic() + 0.5
    while time.monotonic() < deadline_s:
        residency.collect()
        keeper.tend(others_starve=False)
        time.sleep(0.001)
    assert shelf.reads.count(version) == 1
