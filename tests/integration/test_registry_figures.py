"""The registry's figures, shortened: the whole ones are `lorafleet bench registry_...`."""

from __future__ import annotations

import pytest

from lorafleet.bench import FIGURES, run
from lorafleet.bench.registry.crash import measure_crashes
from lorafleet.bench.registry.faults import measure_faults
from lorafleet.bench.registry.size import measure_size


@pytest.mark.timeout(300)
def test_concurrent_histories_are_linearizable_and_races_have_one_winner() -> None:
    result = run(FIGURES["registry_histories"], print)
    assert result["holds"], result


@pytest.mark.timeout(300)
def test_kills_leave_nothing_half_done() -> None:
    result = measure_crashes(print, points=15)
    assert result.holds, result


@pytest.mark.timeout(300)
def test_c40_redis_fails_in_four_ways_and_no_request_does() -> None:
    result = measure_faults(print, pause_s=6.0)
    assert result.holds, result


@pytest.mark.timeout(300)
def test_ten_thousand_versions_are_seen_at_once() -> None:
    result = measure_size(print, versions=10_000)
    assert result.details["resolve in the local view, p50 and p99 us"]
    assert float(result.details["resolve in the local view, p50 and p99 us"].split(", ")[0]) < 20
    assert float(result.details["change visible in the view, p50 and p99 ms"].split(", ")[1]) < 1000
