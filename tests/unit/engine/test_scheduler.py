"""Who runs, in which order, with how many tokens; over a real pool, without a model."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lorafleet.core.errors import InvalidInput
from lorafleet.engine.blocks import BlockTable
from lorafleet.engine.request import Event, Failed, Request, SamplingParams
from lorafleet.engine.residency import Residency
from lorafleet.engine.scheduler import Limits, Scheduler
from lorafleet.native import AdapterPool
from support.adapters import tiny_base
from support.engine import Shelf, many_adapters

BASE = tiny_base()


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return many_adapters(tmp_path_factory.mktemp("scheduler"), 8)


class Bench:
    """A scheduler whose model answers at once, and a clock that moves by hand."""

    def __init__(self, shelf: Shelf, *, pages: int, blocks: int, limits: Limits) -> None:
        pool = AdapterPool(BASE.sites, pages, BASE.page_rows)
        self.shelf = shelf
        self.residency = Residency(pool, shelf, lambda: None, 4)
        self.scheduler = Scheduler(BlockTable(blocks), self.residency, limits)
        self.now_s = 0.0
        self.events: dict[Request, list[Event]] = {}
        self.first: list[Request] = []  # in the order of their first tokens
        self.done: set[Request] = set()

    def request(self, *adapters: int, prompt: int = 4, tokens: int = 2) -> Request:
        events: list[Event] = []
        made = Request(
            prompt_length=prompt,
            tokens=[1] * prompt,
            mix=tuple((self.shelf.versions[i], 1.0) for i in adapters),
            sampling=SamplingParams(max_tokens=tokens),
            emit=events.append,
            arrived_s=self.now_s,
        )
        self.events[made] = events
        self.scheduler.add(made)
        return made

    def step(self) -> int:
        """One step; the number of its tokens."""
        plan = self.scheduler.schedule(self.now_s)
        self.scheduler.check()
        if plan is None:
            return 0
        for chunk in plan.chunks:
            chunk.request.num_cached += chunk.num_tokens
        for request in plan.sampled:
            if not request.num_generated:
                self.first.append(request)
            request.tokens.append(1)
            if request.num_generated == request.sampling.max_tokens:
                self.scheduler.finish(request)
                self.done.add(request)
        assert len(self.scheduler.running) <= self.scheduler.limits.max_batch
        assert len(plan.tokens) <= self.scheduler.limits.max_step_tokens
        return len(plan.tokens)

    def run(self, until: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 20
        while not until():
            assert time.monotonic() < deadline_s, "it goes on for ever"
            # Loader threads are at work: let them, even while the model answers at once.
            time.sleep(0.0003 if self.step() else 0.001)

    def finish(self, *requests: Request) -> None:
        self.run(lambda: self.done.issuperset(requests))

    def read(self, adapter: int) -> None:
        """Step until an adapter has been read and waits for pages."""
        self.run(lambda: self.residency.is_placing(self.shelf.versions[adapter]))


@pytest.fixture
def bench(directories: list[Path]) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def build(
        *, pages: int = 8, blocks: int = 64, batch: int = 8, step: int = 64, age_s: float = 2.0
    ) -> Bench:
        limits = Limits(max_batch=batch, max_step_tokens=step, age_limit_s=age_s)
        made.append(Bench(Shelf(BASE, directories), pages=pages, blocks=blocks, limits=limits))
        return made[-1]

    yield build
    for one in made:
        for gate in one.shelf.gates.values():
            gate.set()
        one.residency.stop()


def test_requests_run_in_order_of_arrival(bench: Callable[..., Bench]) -> None:
    one = bench(batch=2)
    requests = [one.request() for _ in range(6)]
    one.finish(*requests)
    assert one.first == requests


def test_a_large_request_is_not_overtaken_for_want_of_blocks(bench: Callable[..., Bench]) -> None:
    one = bench(blocks=4)
    running = one.request(prompt=16, tokens=16)  # 2 blocks
    one.step()
    large = one.request(prompt=40, tokens=8)  # 3 blocks
    small = one.request()
    one.finish(small)
    assert one.first == [running, large, small]


def test_c32_a_cold_request_is_overtaken_and_keeps_its_place(bench: Callable[..., Bench]) -> None:
    one = bench(batch=1)
    version = one.shelf.versions[0]
    one.shelf.gates[version] = threading.Event()
    cold, base, later = one.request(0), one.request(tokens=4), one.request(tokens=4)
    one.finish(base)
    assert one.first == [base]
    one.shelf.gates[version].set()
    one.run(lambda: one.residency.is_resident(version))
    one.finish(cold, later)
    assert one.first.index(cold) <= 2


def test_loads_begin_while_there_is_no_room_to_run(bench: Callable[..., Bench]) -> None:
    one = bench(batch=1, blocks=64)
    one.request(prompt=8, tokens=900)
    one.step()
    one.request(0)
    one.run(lambda: one.residency.is_resident(one.shelf.versions[0]))
    assert len(one.scheduler.waiting) == 1


def test_a_mix_larger_than_the_pool_fails_and_blocks_nobody(bench: Callable[..., Bench]) -> None:
    one = bench(pages=2)
    impossible, possible = one.request(0, 1, 2), one.request(3)
    one.finish(possible)
    one.run(lambda: impossible not in one.scheduler.waiting)
    (event,) = one.events[impossible]
    assert isinstance(event, Failed)
    assert isinstance(event.error, InvalidInput)
    assert "need 3 rank pages together; the engine has 2" in event.error.message


def test_c36_a_failed_load_fails_its_waiters_only(bench: Callable[..., Bench]) -> None:
    one = bench()
    del one.shelf.adapters[one.shelf.versions[0]]  # KeyError in the source
    waiters = [one.request(0), one.request(1, 0), one.request(0)]
    fine = [one.request(1), one.request()]
    one.finish(*fine)
    one.run(lambda: not one.scheduler.waiting)
    assert all(isinstance(one.events[request][-1], Failed) for request in waiters)


@pytest.mark.parametrize("phase", ["queued", "loading", "prefill", "decode"])
def test_c44_a_cancelled_request_gives_everything_back(
    bench: Callable[..., Bench], phase: str
) -> None:
    one = bench(batch=1, step=8)
    request = one.request(0, prompt=40, tokens=50)
    if phase == "loading":
        one.shelf.gates[one.shelf.versions[0]] = threading.Event()
        one.step()
    elif phase != "queued":
        one.run(lambda: request.num_cached > (0 if phase == "prefill" else 40))
    request.cancelled.set()
    one.step()
    assert not one.scheduler.waiting
    assert not one.scheduler.running
    assert one.scheduler.blocks.num_free == one.scheduler.blocks.num_blocks
    for gate in one.shelf.gates.values():
        gate.set()
    one.run(lambda: not one.residency.loading())
    for version in one.residency.resident():
        assert one.residency.unload(version), "still pinned"


def test_decodes_come_before_prompts(bench: Callable[..., Bench]) -> None:
    one = bench(step=8)
    decoding = [one.request(tokens=10) for _ in range(2)]
    one.step()
    one.step()
    assert all(request.num_generated for request in decoding)
    one.request(prompt=100)
    before = [request.num_generated for request in decoding]
    assert one.step() == 8
    assert [request.num_generated for request in decoding] == [n + 1 for n in before]


def test_a_long_prompt_ends_under_a_stream_of_short_ones(bench: Callable[..., Bench]) -> None:
    one = bench(batch=4, step=32, blocks=256)
    long = one.request(prompt=320, tokens=1)
    steps = 0
    while long not in one.done:
        while len(one.scheduler.waiting) < 4:
            one.request(prompt=30, tokens=1)
        one.step()
        steps += 1
    # Half of every step at least.
    assert steps <= 320 / (32 / 2) + 1


def test_a_short_prompt_need_not_wait_for_the_end_of_a_long_one(
    bench: Callable[..., Bench],
) -> None:
    one = bench(step=32, blocks=256)
    long = one.request(prompt=1000, tokens=1)
    one.step()
    short = one.request(prompt=10, tokens=1)
    one.step()
    assert short in one.done
    assert long not in one.done


def hammer(one: Bench, adapter: int, count: int) -> None:
    """Keep so many requests for an adapter in the queues, which do not all end at once."""
    version = one.shelf.versions[adapter]
    queued = [*one.scheduler.waiting, *one.scheduler.running]
    for _ in range(count - sum(version in dict(r.mix) for r in queued)):
        one.request(adapter, tokens=2 + len(one.events) % 5)


def test_c33_a_rare_adapter_gets_pages_after_the_age_limit(bench: Callable[..., Bench]) -> None:
    one = bench(pages=1, age_s=2.0)
    one.finish(one.request(0))
    for _ in range(20):
        hammer(one, 0, 4)
        one.step()
    rare = one.request(1)
    while not one.residency.is_placing(one.shelf.versions[1]):
        hammer(one, 0, 4)
        one.step()
    for _ in range(50):
        hammer(one, 0, 4)
        one.step()
    assert rare in one.scheduler.waiting, "younger than the limit it is overtaken"
    one.now_s += 2.1
    steps = 0
    while rare not in one.done:
        hammer(one, 0, 4)
        if one.step():
            steps += 1
        else:
            time.sleep(0.001)
    assert steps <= 8  # the longest that ran, and the request itself


def test_c33_only_as_many_adapters_are_drained_as_are_needed(bench: Callable[..., Bench]) -> None:
    one = bench(pages=3, batch=16, blocks=512, age_s=1.0)
    running = {i: [one.request(i, tokens=900) for _ in range(4 - i)] for i in (1, 2, 3)}
    one.run(lambda: len(one.scheduler.running) == 6)
    rare = one.request(0)
    one.read(0)
    one.now_s += 1.1
    one.step()
    later = {i: one.request(i, tokens=900) for i in (1, 2, 3)}
    one.step()
    # Of the three, the one with the fewest users makes room; the others go on.
    assert list(one.scheduler.waiting) == [rare, later[3]]
    (last,) = running[3]
    last.cancelled.set()
    one.finish(rare)
    one.run(lambda: later[3] in one.scheduler.running)
    assert set(one.residency.resident()) == {one.shelf.versions[i] for i in (1, 2, 3)}


def test_c33_many_rare_adapters_each_get_their_turn(bench: Callable[..., Bench]) -> None:
    """No two throw out each other's pages before they were used, however small the age limit."""
    one = bench(pages=1, age_s=0.0)
    hammer(one, 0, 2)
    one.step()
    rare = [one.request(i) for i in range(1, 8)]
    while not one.done.issuperset(rare):
        hammer(one, 0, 2)
        one.now_s += 0.1
        if not one.step():
            time.sleep(0.001)
    assert [r for r in one.first if r in rare] == rare, "in order of arrival"
    assert len([v for v in one.shelf.reads if v != one.shelf.versions[0]]) == 7, "one load each"


def test_c33_mixes_that_need_each_others_pages_all_run(bench: Callable[..., Bench]) -> None:
    one = bench(pages=3, age_s=0.0)
    requests = [one.request(i, (i + 1) % 6, (i + 2) % 6) for i in range(6)]
    while not one.done.issuperset(requests):
        one.now_s += 0.1
        if not one.step():
            time.sleep(0.001)


def test_a_starving_request_that_leaves_drains_nobody(bench: Callable[..., Bench]) -> None:
    one = bench(pages=1, age_s=0.0)
    one.finish(one.request(0))
    running = one.request(0, tokens=900)
    one.step()
    rare = one.request(1)
    one.read(1)
    one.now_s += 1
    one.step()
    other = one.request(0)
    one.step()
    assert other in one.scheduler.waiting
    rare.cancelled.set()
    one.finish(other)
    assert running not in one.done


def arrivals(rng: random.Random) -> Iterator[tuple[Sequence[int], int, int]]:
    for _ in range(60):
        adapters = rng.sample(range(6), rng.choice([0, 0, 1, 1, 1, 2, 3]))
        yield adapters, rng.randint(1, 60), rng.randint(1, 12)


@pytest.mark.parametrize("seed", range(8))
def test_any_load_ends_with_all_served_and_nothing_lost(
    bench: Callable[..., Bench], seed: int
) -> None:
    rng = random.Random(seed)
    one = bench(pages=3, blocks=12, batch=4, step=16, age_s=rng.choice([0.0, 0.5, 100.0]))
    coming = list(arrivals(rng))
    made: list[Request] = []
    cancelled: set[Request] = set()
    deadline_s = time.monotonic() + 20
    while coming or one.scheduler.waiting or one.scheduler.running:
        assert time.monotonic() < deadline_s, "it goes on for ever"
        if coming and rng.random() < 0.3:
            adapters, prompt, tokens = coming.pop()
            made.append(one.request(*adapters, prompt=prompt, tokens=tokens))
        if made and rng.random() < 0.05:
            victim = rng.choice(made)
            if victim not in one.done:
                victim.cancelled.set()
                cancelled.add(victim)
        if rng.random() < 0.02:
            one.residency.unload(rng.choice(one.shelf.versions[:6]))
        one.now_s += 0.05
        if not one.step():
            time.sleep(0.0005)
    assert one.done | cancelled == set(made)
    assert not any(one.events.values()), "nothing failed"
    one.run(lambda: not one.residency.loading())
    for version in one.residency.resident():
        assert one.residency.unload(version), "still pinned"
    assert one.residency.pool.free_pages() == 3
    assert one.scheduler.blocks.num_free == 12
