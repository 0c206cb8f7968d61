"""The engine's promises: streams, waits, cancels, names, limits. All on the real model."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorafleet.core.errors import (
    Conflict,
    Exhausted,
    InvalidInput,
    NotFound,
    Unavailable,
)
from lorafleet.engine import (
    Delta,
    Engine,
    EngineOptions,
    Finished,
    FinishReason,
    Prompt,
    SamplingParams,
    Started,
)
from support.engine import Shelf, eventually, idle, many_adapters

SHORT = Prompt(token_ids=[5, 6, 7])
GREEDY8 = SamplingParams(max_tokens=8)


def test_a_stream_is_started_then_deltas_then_finished(engine: Engine) -> None:
    events = list(engine.stream(SHORT, GREEDY8))
    assert isinstance(events[0], Started)
    assert events[0].prompt_tokens == 3
    assert all(isinstance(event, Delta) for event in events[1:-1])
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.LENGTH
    assert last.completion_tokens == 8
    assert 0 <= last.queue_s <= last.ttft_s


async def test_async_streams_run_side_by_side(engine: Engine) -> None:
    async def tokens(adapter: str | None) -> list[int]:
        found: list[int] = []
        async for event in engine.generate(SHORT, GREEDY8, adapter=adapter):
            if isinstance(event, Delta):
                found += event.token_ids
        return found

    uses = [None, "small", "wide", "odd"] * 3
    together = await asyncio.gather(*(tokens(use) for use in uses))
    for use, found in zip(uses, together, strict=True):
        assert found == await tokens(use)


def test_set_lora_chooses_what_answers_by_default(engine: Engine) -> None:
    named = engine.complete(SHORT, GREEDY8, adapter="wide").token_ids
    engine.set_lora("wide")
    assert engine.complete(SHORT, GREEDY8).token_ids == named
    engine.set_lora([("wide", 1.0)])
    assert engine.complete(SHORT, GREEDY8).token_ids == named
    engine.set_lora(None)
    base = engine.complete(SHORT, GREEDY8, adapter=None).token_ids
    assert engine.complete(SHORT, GREEDY8).token_ids == base != named


def test_c41_an_unknown_adapter_is_never_answered_by_the_base(engine: Engine) -> None:
    for name in ("typo", "WIDE", "wide ", ""):
        with pytest.raises(NotFound, match="not known"):
            engine.complete(SHORT, GREEDY8, adapter=name)


@pytest.mark.parametrize(
    "prompt",
    [Prompt(text=""), Prompt(token_ids=[]), Prompt(token_ids=[256]), Prompt(token_ids=[-1])],
)
def test_bad_prompts_are_refused_before_they_reach_a_kernel(engine: Engine, prompt: Prompt) -> None:
    with pytest.raises(InvalidInput):
        engine.complete(prompt, GREEDY8)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(engine: Engine) -> None:
    with pytest.raises(InvalidInput, match=r"1024 tokens .* 1024"):
        engine.complete(Prompt(token_ids=[1] * 1024), GREEDY8)


def test_seeded_sampling_does_not_depend_on_neighbours(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=16, temperature=1.0, top_p=0.9, top_k=50, seed=7)
    alone = engine.complete(SHORT, sampling, adapter="odd").token_ids
    with ThreadPoolExecutor(6) as pool:
        noise = [pool.submit(engine.complete, SHORT, GREEDY8, adapter="wide") for _ in range(5)]
        beside = pool.submit(engine.complete, SHORT, sampling, adapter="odd").result().token_ids
        for job in noise:
            job.result()
    assert beside == alone
    other = SamplingParams(max_tokens=16, temperature=1.0, top_p=0.9, top_k=50, seed=8)
    assert engine.complete(SHORT, other, adapter="odd").token_ids != alone


def test_c44_a_dropped_stream_gives_everything_back_in_every_phase(engine: Engine) -> None:
    rng = random.Random(0)
    long_prompt = Prompt(token_ids=[rng.randrange(256) for _ in range(600)])

    async def drop(delay_s: float, adapter: str | None) -> None:
        stream = engine.generate(long_prompt, SamplingParams(max_tokens=200), adapter=adapter)
        try:
            async with asyncio.timeout(delay_s):
                async for _ in stream:
                    pass
        except TimeoutError:
            await stream.aclose()  # type: ignore[attr-defined]

    async def storm() -> None:
        uses = [None, "small", "wide", "odd"]
        await asyncio.gather(*(drop(rng.uniform(0, 0.3), uses[i % 4]) for i in range(40)))

    asyncio.run(storm())
    assert idle(engine)
    engine.check()
    assert engine.complete(SHORT, GREEDY8).token_ids


def test_storms_change_no_request(engine: Engine) -> None:
    """C35: arrivals, chunks, neighbours and cancels leave every greedy answer as it is alone."""
    uses = [None, "small", "wide", "odd"]
    rng = random.Random(1)
    prompts = [
        Prompt(token_ids=[rng.randrange(256) for _ in range(length)]) for length in (3, 40, 300)
    ]
    alone = {
        (i, use): engine.complete(prompt, GREEDY8, adapter=use).token_ids
        for i, prompt in enumerate(prompts)
        for use in uses
    }

    async def one(seed: int) -> None:
        chosen = random.Random(seed)
        await asyncio.sleep(chosen.uniform(0, 0.05))
        i, use = chosen.randrange(3), chosen.choice(uses)
        stream = engine.generate(prompts[i], GREEDY8, adapter=use)
        found: list[int] = []
        async for event in stream:
            if isinstance(event, Delta):
                found += event.token_ids
            if chosen.random() < 0.02:
                await stream.aclose()  # type: ignore[attr-defined]
                return
        assert tuple(found) == alone[i, use]

    async def storm(seed: int) -> None:
        await asyncio.gather(*(one(100 * seed + i) for i in range(16)))

    for seed in range(20):
        asyncio.run(storm(seed))
    assert idle(engine)


@pytest.fixture
def small_engine(tiny_model: Path) -> Iterator[Engine]:
    """One that holds a single rank-8 adapter at a time."""
    options = EngineOptions(kv_tokens=2048, num_adapter_pages=1, age_limit_s=0.3)
    with Engine(tiny_model, options=options) as engine:
        yield engine
        assert idle(engine)
        engine.check()
        assert all(map(engine.unload, engine.residency().resident)), "still pinned"


def test_c30_more_adapters_than_pages_rotate(small_engine: Engine, tmp_path: Path) -> None:
    shelf = Shelf(small_engine.base, many_adapters(tmp_path, 12))
    small_engine.set_source(shelf)
    first = [small_engine.complete(SHORT, GREEDY8, adapter=v).token_ids for v in shelf.versions]
    assert len(set(first)) == 12
    with ThreadPoolExecutor(12) as pool:
        again = list(
            pool.map(
                lambda v: small_engine.complete(SHORT, GREEDY8, adapter=v).token_ids,
                shelf.versions * 9,
            )
        )
    assert again == first * 9
    assert len(small_engine.residency().resident) == 1


def test_c30_an_adapter_larger_than_the_pool_is_refused_with_both_numbers(
    small_engine: Engine, tmp_path: Path
) -> None:
    big = many_adapters(tmp_path, 1, rank=16)
    with pytest.raises(InvalidInput, match=r"needs 2 rank pages; the engine has 1"):
        small_engine.upload_lora(big[0])
    shelf = Shelf(small_engine.base, big)
    small_engine.set_source(shelf)
    with pytest.raises(InvalidInput, match=r"needs 2 rank pages"):
        small_engine.complete(SHORT, GREEDY8, adapter=shelf.versions[0])


def test_c32_a_cold_load_holds_nobody_up(engine: Engine, tmp_path: Path) -> None:
    shelf = Shelf(engine.base, many_adapters(tmp_path, 3))
    shelf.delay_s = lambda version: 1.0
    engine.set_source(shelf)
    began_s = time.monotonic()
    with ThreadPoolExecutor(5) as pool:
        cold = [pool.submit(engine.complete, SHORT, GREEDY8, adapter=v) for v in shelf.versions]
        time.sleep(0.05)
        for warm in (None, "wide"):
            answer = pool.submit(engine.complete, SHORT, GREEDY8, adapter=warm).result()
            assert answer.finished.ttft_s < 0.5
        for job in cold:
            job.result()
    # Three loads of a second each ran side by side.
    assert time.monotonic() - began_s < 2.5


def test_c33_a_rare_adapter_waits_for_a_bounded_time(small_engine: Engine, tmp_path: Path) -> None:
    shelf = Shelf(small_engine.base, many_adapters(tmp_path, 2))
    small_engine.set_source(shelf)
    popular, rare = shelf.versions
    stop = threading.Event()

    def hammer() -> None:
        while not stop.is_set():
            small_engine.complete(SHORT, SamplingParams(max_tokens=50), adapter=popular)

    with ThreadPoolExecutor(9) as pool:
        jobs = [pool.submit(hammer) for _ in range(8)]
        time.sleep(0.3)
        answer = pool.submit(small_engine.complete, SHORT, GREEDY8, adapter=rare).result(30)
        stop.set()
        for job in jobs:
            job.result()
    assert answer.finished.ttft_s < 5.0


def test_c36_many_first_requests_make_one_load(engine: Engine, tmp_path: Path) -> None:
    shelf = Shelf(engine.base, many_adapters(tmp_path, 1))
    shelf.delay_s = lambda version: 0.3
    engine.set_source(shelf)
    (version,) = shelf.versions
    with ThreadPoolExecutor(20) as pool:
        answers = list(
            pool.map(lambda _: engine.complete(SHORT, GREEDY8, adapter=version), range(20))
        )
    assert len(shelf.reads) == 1
    assert len({answer.token_ids for answer in answers}) == 1


def test_c36_a_failed_load_wakes_all_and_can_be_tried_again(engine: Engine, tmp_path: Path) -> None:
    shelf = Shelf(engine.base, many_adapters(tmp_path, 1))
    shelf.delay_s = lambda version: 0.2
    shelf.error = Unavailable("the store is away")
    engine.set_source(shelf)
    (version,) = shelf.versions

    def attempt(_: int) -> str:
        with pytest.raises(Unavailable) as caught:
            engine.complete(SHORT, GREEDY8, adapter=version)
        return caught.value.message

    with ThreadPoolExecutor(10) as pool:
        assert set(pool.map(attempt, range(10))) == {"the store is away"}
    shelf.error = None
    assert engine.complete(SHORT, GREEDY8, adapter=version).token_ids


def test_c26_a_new_version_under_a_name_does_not_touch_running_streams(
    engine: Engine, tmp_path: Path
) -> None:
    old, new = many_adapters(tmp_path, 2)
    long = SamplingParams(max_tokens=100)
    engine.upload_lora(old, name="moving")
    expected_old = engine.complete(SHORT, long, adapter="moving").token_ids
    stream = engine.stream(SHORT, long, adapter="moving")
    next(stream)
    engine.upload_lora(new, name="moving")
    expected_new = engine.complete(SHORT, long, adapter="moving").token_ids
    rest = [token for event in stream if isinstance(event, Delta) for token in event.token_ids]
    assert tuple(rest) == expected_old != expected_new


def test_c29_unload_frees_the_pages(engine: Engine, tmp_path: Path) -> None:
    (directory,) = many_adapters(tmp_path, 1)
    free = engine.residency().free_pages
    for _ in range(20):
        version = engine.upload_lora(directory, name="passing")
        engine.ensure_resident("passing")
        assert engine.unload(version)
        assert not engine.unload(version)
        with pytest.raises(NotFound, match="passing"):
            engine.complete(SHORT, GREEDY8, adapter="passing")
        assert eventually(lambda: engine.residency().free_pages == free)
    assert version not in engine.residency().resident


def test_c29_unload_in_use_goes_with_its_last_user(engine: Engine, tmp_path: Path) -> None:
    (directory,) = many_adapters(tmp_path, 1)
    version = engine.upload_lora(directory, name="leaving")
    long = SamplingParams(max_tokens=200)
    expected = engine.complete(SHORT, long, adapter="leaving").token_ids
    stream = engine.stream(SHORT, long, adapter="leaving")
    next(stream)
    assert not engine.unload(version)
    with pytest.raises(NotFound, match="leaving"):
        engine.complete(SHORT, GREEDY8, adapter="leaving")
    found = [token for event in stream if isinstance(event, Delta) for token in event.token_ids]
    assert tuple(found) == expected
    assert eventually(lambda: version not in engine.residency().resident)


def test_c39_requests_and_unloads_race_without_harm(engine: Engine, tmp_path: Path) -> None:
    """Each request is answered by the version it asked for, or not found; nothing stays behind."""
    shelf = Shelf(engine.base, many_adapters(tmp_path, 2))
    engine.set_source(shelf)
    expected = {v: engine.complete(SHORT, GREEDY8, adapter=v).token_ids for v in shelf.versions}
    rng = random.Random(0)
    stop = threading.Event()

    def unload() -> None:
        while not stop.is_set():
            engine.unload(rng.choice(shelf.versions))
            time.sleep(rng.uniform(0, 0.003))

    with ThreadPoolExecutor(10) as pool:
        unloading = [pool.submit(unload) for _ in range(2)]
        jobs = [
            (v, pool.submit(engine.complete, SHORT, GREEDY8, adapter=v))
            for v in shelf.versions * 50
        ]
        for version, job in jobs:
            assert job.result(60).token_ids == expected[version]
        stop.set()
        for job in unloading:
            job.result()
    for version in shelf.versions:
        engine.unload(version)
    assert eventually(lambda: not set(shelf.versions) & set(engine.residency().resident))


def test_ensure_resident_raises_what_the_load_raised(engine: Engine, tmp_path: Path) -> None:
    shelf = Shelf(engine.base, many_adapters(tmp_path, 1))
    shelf.error = Unavailable("the store is away")
    engine.set_source(shelf)
    for _ in range(2):
        with pytest.raises(Unavailable, match="the store is away"):
            engine.ensure_resident(shelf.versions[0])
    assert len(shelf.reads) == 2
    shelf.error = None
    engine.ensure_resident(shelf.versions[0])
    shelf.delay_s = lambda version: 1.0
    engine.unload(shelf.versions[0])
    with pytest.raises(Exhausted, match=r"within 0\.1 s"):
        engine.ensure_resident(shelf.versions[0], timeout_s=0.1)


def test_a_mix_larger_than_the_pool_is_refused_and_blocks_nobody(
    small_engine: Engine, tmp_path: Path
) -> None:
    shelf = Shelf(small_engine.base, many_adapters(tmp_path, 2))
    small_engine.set_source(shelf)
    with pytest.raises(InvalidInput, match="need 2 rank pages together; the engine has 1"):
        small_engine.complete(SHORT, GREEDY8, adapter=[(v, 0.5) for v in shelf.versions])
    assert small_engine.complete(SHORT, GREEDY8, adapter=shelf.versions[1]).token_ids


def test_a_bad_scale_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidInput, match="finite scale"):
        engine.complete(SHORT, GREEDY8, adapter=[("wide", float("nan"))])


def test_too_many_waiting_requests_are_refused_with_the_numbers(tiny_model: Path) -> None:
    options = EngineOptions(kv_tokens=64, num_adapter_pages=1, max_waiting=2)
    with Engine(tiny_model, options=options) as engine, ThreadPoolExecutor(12) as pool:
        jobs = [
            pool.submit(engine.complete, SHORT, SamplingParams(max_tokens=50)) for _ in range(12)
        ]
        errors = [job.exception(30) for job in jobs]
        refused = [error for error in errors if isinstance(error, Exhausted)]
        assert 0 < len(refused) < 12
        assert "2 requests wait already, and at most 2 may" in refused[0].message
        # Refusing is no state: whoever comes later is served.
        assert idle(engine)
        assert engine.complete(SHORT, GREEDY8).token_ids


def test_an_engine_is_started_once(shared_engine: Engine) -> None:
    with pytest.raises(Conflict):
        shared_engine.start()


def test_an_engine_that_was_not_started_says_so(tiny_model: Path) -> None:
    engine = Engine(tiny_model)
    with pytest.raises(InvalidInput, match="not been started"):
        engine.complete(SHORT, GREEDY8)
    engine.stop()


def test_stopping_fails_what_is_running_and_refuses_more(tiny_model: Path) -> None:
    engine = Engine(tiny_model, options=EngineOptions(kv_tokens=2048))
    engine.start()
    stream = engine.stream(SHORT, SamplingParams(max_tokens=1000))
    next(stream)
    engine.stop()
    with pytest.raises(Unavailable):
        list(stream)
    with pytest.raises(Unavailable):
        engine.complete(SHORT, GREEDY8)
    engine.stop()
