"""The pool of rank pages from Python: a plain model of its rules against the native structure."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lorafleet.core.errors import Conflict, Exhausted, Internal, InvalidInput
from lorafleet.core.model import Site, SitePart
from lorafleet.native import AdapterPool

PAGES, ROWS = 6, 4


def site(in_features: int, *widths: int) -> Site:
    ends = np.cumsum(widths).tolist()
    parts = tuple(
        SitePart(source=f"m{i}", out_start=end - width, out_end=end)
        for i, (end, width) in enumerate(zip(ends, widths, strict=True))
    )
    return Site(name="s", in_features=in_features, out_features=ends[-1], parts=parts)


SITES = (site(3, 2, 3), site(2, 4))


def make_pool() -> AdapterPool:
    return AdapterPool(SITES, PAGES, ROWS)


class PoolRules(RuleBasedStateMachine):
    """Random operations on the native pool and on a dictionary that follows the rules."""

    versions = st.sampled_from([f"v{i}" for i in range(5)])

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.sizes: dict[str, int] = {}
        self.pins: dict[str, int] = {}
        self.lru: list[str] = []  # residents, least recently used first

    @property
    def free(self) -> int:
        return PAGES - sum(self.sizes.values())

    @rule(version=versions, pages=st.integers(1, PAGES + 1))
    def reserve(self, version: str, pages: int) -> None:
        if version in self.sizes:
            with pytest.raises(Conflict):
                self.pool.reserve(version, pages)
            return
        victims, room = [], self.free
        for name in self.lru:
            if room >= pages:
                break
            if not self.pins[name]:
                victims.append(name)
                room += self.sizes[name]
        if room < pages:
            with pytest.raises(Exhausted):
                self.pool.reserve(version, pages)
            return
        assert self.pool.reserve(version, pages) == victims
        for name in victims:
            self.forget(name)
        self.sizes[version] = pages

    @rule(version=versions)
    def commit(self, version: str) -> None:
        if version in self.sizes and version not in self.lru:
            self.pool.commit(version)
            self.lru.append(version)
            self.pins[version] = 0
        else:
            with pytest.raises(Conflict):
                self.pool.commit(version)

    @rule(version=versions)
    def abort(self, version: str) -> None:
        self.pool.abort(version)
        if version not in self.lru:
            self.sizes.pop(version, None)

    @rule(version=versions)
    def pin(self, version: str) -> None:
        pages = self.pool.pin(version)
        if version not in self.lru:
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == self.sizes[version]
        self.pins[version] += 1
        self.lru.remove(version)
        self.lru.append(version)

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(v for v, n in self.pins.items() if n)))
        self.pool.unpin(version)
        self.pins[version] -= 1

    @rule(version=versions)
    def evict(self, version: str) -> None:
        possible = version in self.lru and not self.pins[version]
        assert self.pool.evict(version) == possible
        if possible:
            self.forget(version)

    def forget(self, version: str) -> None:
        self.lru.remove(version)
        del self.sizes[version], self.pins[version]

    @invariant()
    def agree(self) -> None:
        self.pool.check()
        assert self.pool.residents() == self.lru
        assert self.pool.loading() == sorted(set(self.sizes) - set(self.lru))
        assert self.pool.free_pages() == self.free


TestPoolRules = PoolRules.TestCase
TestPoolRules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_rank_rows_land_in_the_versions_pages() -> None:
    pool = make_pool()
    pool.reserve("v", 2)
    a, b_t = np.arange(18, dtype=np.float32).reshape(6, 3), np.ones((6, 2), np.float32)
    pool.write("v", 0, 0, a, b_t)
    pool.commit("v")
    first, second = pool.pin("v") or []
    pages_a, pages_b, used = (np.from_dlpack(tensor) for tensor in pool.tensors()[:3])
    assert np.array_equal(pages_a[first, 0], a[:4])
    assert np.array_equal(pages_a[second, 0, :2], a[4:])
    assert np.array_equal(pages_b[first, :, :2], b_t[:4])
    assert used[first].tolist() == [4, 0]
    assert used[second].tolist() == [2, 0]


def test_tensors_have_the_shapes_that_models_are_compiled_for() -> None:
    shapes = [tuple(tensor.shape) for tensor in make_pool().tensors()]
    assert shapes == [(6, 2, 4, 3), (6, 4, 5), (6, 2), (6, 1, 4, 2), (6, 4, 4), (6, 1)]
    assert make_pool().bytes_per_page == 4 * 4 * (2 * 3 + 5 + 2 + 4)


def test_tensors_outlive_the_pool() -> None:
    tensor = np.from_dlpack(make_pool().tensors()[0])
    tensor[:] = 1  # the memory is still there
    assert tensor.sum() == tensor.size


@pytest.mark.parametrize(
    ("site", "part", "a", "b_t", "message"),
    [
        (0, 0, (9, 3), (9, 2), "rank 9 does not fit into 2 pages of 4 rows"),
        (0, 0, (2, 4), (2, 2), "a: dimension 1 is 4, expected 3"),
        (0, 0, (2, 3), (3, 2), "b_t: dimension 0 is 3, expected 2"),
        (0, 1, (2, 3), (2, 2), "b_t: dimension 1 is 2, expected 3"),
        (2, 0, (2, 3), (2, 2), "site: no such site"),
        (1, 1, (2, 3), (2, 2), "part: no such part"),
    ],
)
def test_write_refuses_what_does_not_fit(
    site: int, part: int, a: tuple[int, ...], b_t: tuple[int, ...], message: str
) -> None:
    pool = make_pool()
    pool.reserve("v", 2)
    with pytest.raises(InvalidInput, match=message):
        pool.write("v", site, part, np.ones(a, np.float32), np.ones(b_t, np.float32))


def test_write_takes_only_float32_but_read_only_arrays_too() -> None:
    pool = make_pool()
    pool.reserve("v", 1)
    with pytest.raises(InvalidInput, match="a: expected float32"):
        pool.write("v", 0, 0, np.ones((1, 3)), np.ones((1, 2), np.float32))
    frozen = np.frombuffer(bytes(12), np.float32).reshape(1, 3)
    pool.write("v", 0, 0, frozen, np.ones((1, 2), np.float32))


def test_an_unpin_too_many_is_a_bug() -> None:
    pool = make_pool()
    with pytest.raises(Internal, match="unpin of v, which is not pinned"):
        pool.unpin("v")


@pytest.mark.parametrize(("pages", "rows"), [(0, 4), (-1, 4), (4, 0), (2**40, 4)])
def test_a_pool_without_room_is_refused(pages: int, rows: int) -> None:
    with pytest.raises(InvalidInput, match="must be in"):
        AdapterPool(SITES, pages, rows)


def test_threads_share_the_pool() -> None:
    pool = make_pool()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        version = f"v{number}"
        rows = np.full((ROWS, 3), number, np.float32)
        values = np.from_dlpack(pool.tensors()[0])
        try:
            for _ in range(300):
                try:
                    pool.reserve(version, 1)
                except Exhausted:
                    continue
                except Conflict:
                    pass
                else:
                    pool.write(version, 0, 1, rows, rows)
                    pool.commit(version)
                pages = pool.pin(version)
                if pages is not None:
                    assert (values[pages[0], 1] == number).all()
                    pool.unpin(version)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    pool.check()
