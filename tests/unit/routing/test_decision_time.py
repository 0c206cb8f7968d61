"""A decision at 1,000 replicas and 100,000 versions takes less than 50 microseconds."""

from __future__ import annotations

import time
from random import Random

import pytest

from lorafleet.routing import FleetView, Report, choose

NUM_REPLICAS = 1000
NUM_VERSIONS = 100_000
GOAL_US = 50.0


@pytest.fixture(scope="module")
def large() -> tuple[FleetView, list[str]]:
    rng = Random(0)
    versions = [f"sha256:{index:064x}" for index in range(NUM_VERSIONS)]
    view = FleetView()
    for index in range(NUM_REPLICAS):
        id = f"replica-{index}"
        view = view.announce(id, address=f"{id}:1", epoch=1).apply(
            Report(
                replica=id,
                epoch=1,
                sequence=1,
                resident=frozenset(rng.sample(versions, 100)),
                num_pages=rng.choice([256, 512]),
                running=rng.randrange(8),
            )
        )
    return view, versions


@pytest.mark.parametrize("traffic", ["zipf", "cold", "base"])
def test_a_decision_is_fast_at_a_thousand_replicas(large, traffic: str) -> None:
    view, versions = large
    rng = Random(1)
    weights = [1 / (rank + 1) for rank in range(NUM_VERSIONS)]
    asked: list[str | None] = {
        "zipf": lambda: rng.choices(versions, weights, k=5000),
        "cold": lambda: [f"sha256:unknown{index}" for index in range(5000)],
        "base": lambda: [None] * 5000,
    }[traffic]()
    best_us = float("inf")
    for start in range(0, len(asked), 500):
        began = time.thread_time()
        for version in asked[start : start + 500]:
            choose(view, version, rng=rng)
        # Processor time, and the best of ten batches: not what else the machine is doing.
        best_us = min(best_us, (time.thread_time() - began) / 500 * 1e6)
    assert best_us < GOAL_US
