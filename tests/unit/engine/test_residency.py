"""Loads: one for all who wait, none of them in the way, nothing left of those that failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lorafleet.adapters import load_adapter
from lorafleet.core.errors import Exhausted, Internal, InvalidInput, LorafleetError, Unavailable
from lorafleet.engine.request import Mix
from lorafleet.engine.residency import Residency
from lorafleet.native import AdapterPool
from support.adapters import tiny_base
from support.engine import Shelf, many_adapters

BASE = tiny_base()


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Six adapters of one page, two of two pages."""
    folder = tmp_path_factory.mktemp("residency")
    return [*many_adapters(folder / "one", 6), *many_adapters(folder / "two", 2, rank=16)]


@pytest.fixture
def shelf(directories: list[Path]) -> Shelf:
    return Shelf(BASE, directories)


@pytest.fixture
def make(shelf: Shelf) -> Iterator[Callable[..., Residency]]:
    made: list[Residency] = []

    def build(num_pages: int, max_loads: int = 4) -> Residency:
        pool = AdapterPool(BASE.sites, num_pages, BASE.page_rows)
        made.append(Residency(pool, shelf, lambda: None, max_loads))
        return made[-1]

    yield build
    for gate in shelf.gates.values():
        gate.set()
    for residency in made:
        residency.stop()


def of(*versions: str) -> Mix:
    return tuple((version, 1.0) for version in versions)


def turn(residency: Residency, *waiting: Mix) -> dict[str, LorafleetError]:
    """What the scheduler does between two steps."""
    failed = residency.collect()
    for mix in waiting:
        for version, _ in mix:
            residency.ensure(version)
    residency.place(waiting, others=True)
    residency.check()
    return failed


def turns(
    residency: Residency, *waiting: Mix, until: Callable[[], bool]
) -> dict[str, LorafleetError]:
    failed: dict[str, LorafleetError] = {}
    deadline_s = time.monotonic() + 10
    while not until():
        assert time.monotonic() < deadline_s
        failed.update(turn(residency, *waiting))
        time.sleep(0.001)
    return failed


def load(residency: Residency, *versions: str) -> None:
    for version in versions:
        residency.ensure(version)
    turns(residency, until=lambda: all(map(residency.is_resident, versions)))


def test_a_version_is_read_once_however_often_it_is_wanted(
    make: Callable[..., Residency], shelf: Shelf
) -> None:
    residency, version = make(4), shelf.versions[0]
    shelf.gates[version] = threading.Event()
    waits = [residency.wait(version) for _ in range(5)]
    assert residency.loading() == (version,)
    assert not residency.can_pin(of(version))
    shelf.gates[version].set()
    load(residency, version)
    assert all(wait.done() for wait in waits)
    assert shelf.reads == [version]
    assert residency.wait(version).done()


def test_a_failure_reaches_all_is_named_and_forgotten(
    make: Callable[..., Residency], shelf: Shelf
) -> None:
    residency, version = make(4), shelf.versions[0]
    shelf.error = Unavailable("the store is away")
    waits = [residency.wait(version) for _ in range(3)]
    failed = turns(residency, until=lambda: not residency.loading())
    assert failed == {version: shelf.error}
    assert [wait.exception() for wait in waits] == [shelf.error] * 3
    shelf.error = None
    load(residency, version)
    assert len(shelf.reads) == 2


def test_a_source_that_crashes_is_an_error_of_ours(make: Callable[..., Residency]) -> None:
    residency = make(4)
    residency.ensure("sha256:unknown")  # the shelf raises KeyError
    failed = turns(residency, until=lambda: not residency.loading())
    assert isinstance(failed["sha256:unknown"], Internal)


def test_a_source_that_gives_another_version_is_refused(
    make: Callable[..., Residency], shelf: Shelf
) -> None:
    one, other = shelf.versions[:2]
    shelf.adapters[one] = shelf.adapters[other]
    residency = make(4)
    residency.ensure(one)
    failed = turns(residency, until=lambda: not residency.loading())
    assert "got " + other in failed[one].message
    assert residency.resident() == ()


def test_an_adapter_that_can_never_fit_is_refused_with_both_numbers(
    make: Callable[..., Residency], shelf: Shelf
) -> None:
    residency = make(1)
    residency.ensure(shelf.versions[6])
    failed = turns(residency, until=lambda: not residency.loading())
    assert isinstance(failed[shelf.versions[6]], InvalidInput)
    assert "needs 2 rank pages; the engine has 1" in failed[shelf.versions[6]].message


def test_a_mix_that_can_never_fit_is_refused_once_its_size_is_known(
    make: Callable[..., Residency], shelf: Shelf
) -> None:
    residency, mix = make(3), of(*shelf.versions[6:])
    assert residency.refusal(mix) is None
    turns(residency, mix, until=lambda: residency.refusal(mix) is not None)
    assert "need 4 rank pages together; the engine has 3" in str(residency.refusal(mix))
    assert residency.refusal(of(shelf.versions[6])) is None
    # The same adapter twice needs its pages once.
    assert residency.refusal(of(shelf.versions[6], shelf.versions[6])) is None


def test_pinned_adapters_are_never_evicted(make: Callable[..., Residency], shelf: Shelf) -> None:
    a, b = shelf.versions[:2]
    residency = make(1)
    load(residency, a)
    pages = residency.pin(of(a))
    assert [scale for _, scale in pages] == [1.0]
    turns(residency, of(b), until=lambda: residency.is_placing(b))
    for _ in range(5):
        turn(residency, of(b))
    assert residency.is_resident(a)
    residency.unpin(of(a))
    turns(residency, of(b), until=lambda: residency.is_resident(b))
    assert residency.resident() == (b,)


def test_what_an_older_request_waits_for_is_not_evicted_for_a_younger(
    make: Callable[..., Residency], shelf: Shelf
) -> None:
    a, b, c = shelf.versions[:3]
    residency = make(1)
    load(residency, a)
    residency.ensure(b)
    turns(residency, of(a), of(b), until=lambda: residency.is_placing(b))
    for _ in range(5):
        turn(residency, of(a), of(b))  # a's request is older: b waits
    assert residency.resident() == (a,)
    turns(residency, of(b), of(a), until=lambda: residency.is_resident(b))  # and the reverse
    assert residency.resident() == (b,)
    turns(residency, of(c), until=lambda: residency.is_resident(c))


def test_two_mixes_that_hold_half_each_do_not_wait_for_each_other_for_ever(
    make: Callable[..., Residency], shelf: Shelf
) -> None:
    a, b, c, d = shelf.versions[:4]
    residency = make(2)
    load(residency, a, c)
    older, younger = of(a, b), of(c, d)
    turns(residency, older, younger, until=lambda: residency.can_pin(older))
    turns(residency, younger, until=lambda: residency.can_pin(younger))


def test_slow_reads_do_not_hold_up_what_has_been_read(
    make: Callable[..., Residency], shelf: Shelf
) -> None:
    quick, *slow = shelf.versions[:3]
    shelf.gates.update({version: threading.Event() for version in slow})
    residency = make(4, max_loads=2)
    shelf.gates[quick] = threading.Event()
    residency.ensure(quick)
    residency.ensure(slow[0])
    residency.ensure(slow[1])  # both readers will be stuck
    shelf.gates[quick].set()
    turns(residency, until=lambda: residency.is_resident(quick))
    assert set(residency.loading()) == set(slow)


def test_unload_is_at_once_when_idle_and_happens_once(
    make: Callable[..., Residency], shelf: Shelf
) -> None:
    version = shelf.versions[0]
    residency = make(4)
    assert not residency.unload(version)
    load(residency, version)
    assert residency.unload(version)
    assert not residency.unload(version)
    assert (residency.resident(), residency.pool.free_pages()) == ((), 4)
    residency.check()


def test_c39_unload_waits_for_users_and_admits_no_more(
    make: Callable[..., Residency], shelf: Shelf
) -> None:
    version = shelf.versions[0]
    residency = make(4)
    load(residency, version)
    residency.pin(of(version))
    residency.pin(of(version))
    assert not residency.unload(version)
    assert not residency.can_pin(of(version))
    residency.unpin(of(version))
    assert residency.is_resident(version)
    residency.unpin(of(version))
    assert not residency.is_resident(version)
    residency.check()
    load(residency, version)  # and it may come back
    assert residency.can_pin(of(version))


def test_unload_of_a_load_leaves_no_ghost(make: Callable[..., Residency], shelf: Shelf) -> None:
    version = shelf.versions[0]
    shelf.gates[version] = threading.Event()
    residency = make(4)
    wait = residency.wait(version)
    assert not residency.unload(version)
    shelf.gates[version].set()
    turns(residency, until=lambda: not residency.loading())
    assert residency.resident() == ()
    with pytest.raises(Exhausted, match="unloaded"):
        wait.result(0)
    residency.check()


def test_abandoning_tells_who_waits(make: Callable[..., Residency], shelf: Shelf) -> None:
    shelf.gates[shelf.versions[0]] = threading.Event()
    residency = make(4)
    wait = residency.wait(shelf.versions[0])
    residency.abandon(Unavailable("the engine was stopped"))
    assert isinstance(wait.exception(0), Unavailable)
    assert residency.loading() == ()


def test_what_is_resident_is_the_adapter_itself(
    make: Callable[..., Residency], directories: list[Path]
) -> None:
    adapter = load_adapter(directories[7], BASE)
    residency = make(3)
    load(residency, adapter.version)
    assert residency.pages_by_version() == {adapter.version: 2}
    assert len(residency.pin(of(adapter.version))) == 2
    assert residency.pool.free_pages() == 1
    residency.unpin(of(adapter.version))


def test_the_check_finds_a_pool_that_disagrees(
    make: Callable[..., Residency], shelf: Shelf
) -> None:
    residency = make(2)
    load(residency, shelf.versions[0])
    residency.pool.evict(shelf.versions[0])
    with pytest.raises(Internal, match="differ"):
        residency.check()
