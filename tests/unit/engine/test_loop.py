"""The step thread outlives whatever one request, one client or one watcher does to it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lorafleet.core.errors import Exhausted, InvalidAdapter, LorafleetError, Unavailable
from lorafleet.engine import Engine, EngineOptions, Prompt, SamplingParams
from support.adapters import ALL_LINEARS, factors, write_adapter
from support.engine import Shelf, eventually, idle, many_adapters

SHORT = Prompt(token_ids=[5, 6, 7])
GREEDY8 = SamplingParams(max_tokens=8)


@pytest.fixture
def small(tiny_model: Path) -> Iterator[Engine]:
    options = EngineOptions(kv_tokens=512, num_adapter_pages=8, max_batch=4, max_waiting=4)
    with Engine(tiny_model, options=options) as engine:
        yield engine
        assert idle(engine)
        engine.check()


def test_a_watcher_that_fails_does_not_stop_it(engine: Engine) -> None:
    def fails(snapshot: object) -> None:
        raise RuntimeError("Event loop is closed")

    leave = engine.subscribe(fails)
    try:
        assert engine.complete(SHORT, GREEDY8).token_ids
    finally:
        leave()
    assert engine.is_alive


def test_c44_a_client_whose_event_loop_closes_is_gone(engine: Engine) -> None:
    async def begin() -> object:
        stream = engine.generate(SHORT, SamplingParams(max_tokens=900, ignore_eos=True))
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(begin())
    loop.close()
    assert idle(engine), "it goes on although nobody can hear it"
    assert engine.complete(SHORT, GREEDY8).token_ids
    del stream


def test_c22_weights_that_overflow_end_their_own_request_only(
    engine: Engine, tmp_path: Path
) -> None:
    """Finite numbers whose products are not; neighbours and later users of its KV do not notice."""
    loud = {key: value * 1e20 for key, value in factors(targets=ALL_LINEARS, seed=9).items()}
    directory = write_adapter(tmp_path / "loud", loud, {"target_modules": list(ALL_LINEARS)})
    engine.upload_lora(directory, name="loud")
    engine.ensure_resident("loud")
    alone = {use: engine.complete(SHORT, GREEDY8, adapter=use).token_ids for use in (None, "wide")}
    for _ in range(3):
        with ThreadPoolExecutor(6) as pool:
            bad = [pool.submit(engine.complete, SHORT, GREEDY8, adapter="loud") for _ in range(2)]
            good = [
                (use, pool.submit(engine.complete, SHORT, GREEDY8, adapter=use))
                for use in (None, "wide", None, "wide")
            ]
            for job in bad:
                with pytest.raises(InvalidAdapter, match="not finite"):
                    job.result(10)
            for use, job in good:
                assert job.result(10).token_ids == alone[use]
    rows = engine.logits([([5, 6, 7], None), ([5, 6, 7], "loud"), ([5, 6], "wide")])
    assert (rows[0] == engine.logits([([5, 6, 7], None)])[0]).all()
    assert (rows[2] == engine.logits([([5, 6], "wide")])[0]).all()
    assert not np.isfinite(rows[1]).all()
    engine.unload(engine._resolve("loud")[0][0])


def test_a_burst_between_two_steps_is_bounded_too(small: Engine) -> None:
    gate = threading.Event()
    assert small._loop is not None
    held = small._loop.call(lambda: gate.wait(30))  # a long step
    with ThreadPoolExecutor(20) as pool:
        jobs = [pool.submit(small.complete, SHORT, GREEDY8) for _ in range(20)]
        assert eventually(lambda: sum(job.done() for job in jobs) == 16)
        gate.set()
        errors = [job.exception(30) for job in jobs]
    held.result()
    assert sum(isinstance(error, Exhausted) for error in errors) == 16
    assert errors.count(None) == 4


def test_stopping_leaves_nobody_waiting(tiny_model: Path) -> None:
    """Whoever comes just as it stops gets an answer or an error, and never silence."""
    for delay_s in (0.0, 0.01, 0.03):
        engine = Engine(tiny_model, options=EngineOptions(kv_tokens=512, num_adapter_pages=2))
        engine.start()

        def ask(engine: Engine = engine) -> int:
            served = 0
            try:
                while True:
                    engine.complete(SHORT, SamplingParams(max_tokens=2))
                    served += 1
            except Unavailable:
                return served

        with ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(ask) for _ in range(8)]
            time.sleep(delay_s)
            engine.stop()
            for job in jobs:
                job.result(10)


def test_stopping_ends_waits_for_loads(tiny_model: Path, tmp_path: Path) -> None:
    engine = Engine(tiny_model, options=EngineOptions(kv_tokens=512, num_adapter_pages=2))
    engine.start()
    shelf = Shelf(engine.base, many_adapters(tmp_path, 1))
    shelf.delay_s = lambda version: 0.5
    engine.set_source(shelf)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(engine.ensure_resident, shelf.versions[0])
        asking = pool.submit(engine.complete, SHORT, GREEDY8, adapter=shelf.versions[0])
        assert eventually(lambda: bool(shelf.reads))
        time.sleep(0.05)
        engine.stop()
        for job in (waiting, asking):
            with pytest.raises(Unavailable):
                job.result(10)


def test_a_broken_model_fails_all_and_says_so(tiny_model: Path) -> None:
    engine = Engine(tiny_model, options=EngineOptions(kv_tokens=512, num_adapter_pages=2))
    engine.start()
    stream = engine.stream(SHORT, SamplingParams(max_tokens=400))
    next(stream)

    def breaks(plan: object) -> None:
        raise RuntimeError("no such kernel")

    assert engine._runner is not None
    engine._runner.step = breaks  # type: ignore[method-assign, assignment]
    with pytest.raises(LorafleetError, match="no such kernel"):
        list(stream)
    assert not engine.is_alive
    with pytest.raises(Unavailable):
        engine.complete(SHORT, GREEDY8)
    engine.stop()


def test_an_idle_engine_shows_that_it_lives(engine: Engine) -> None:
    assert idle(engine)
    assert engine._loop is not None
    before_s = engine._loop.alive_at_s
    assert eventually(lambda: engine._loop.alive_at_s > before_s)  # type: ignore[union-attr]
    assert engine.is_alive
