"""All figures by name; a new bench is one entry here."""

from __future__ import annotations

from lorafleet.bench.affinity import measure_affinity
from lorafleet.bench.figure import Figure
from lorafleet.bench.logits import measure_logits
from lorafleet.bench.registry.crash import measure_crashes
from lorafleet.bench.registry.faults import measure_faults
from lorafleet.bench.registry.histories import measure_histories
from lorafleet.bench.registry.push import measure_push
from lorafleet.bench.registry.size import measure_size

FIGURES = {
    figure.name: figure
    for figure in (
        Figure(
            name="first_light_logits_vs_peft",
            unit="max relative error",
            goal="<= 1e-4, 64 greedy tokens identical, base rows bit-equal to a stock library",
            about="example and random adapters, alone and mixed in one batch, against PEFT in "
            "float32",
            measure=measure_logits,
        ),
        Figure(
            name="first_light_affinity",
            unit="share of requests on a holder",
            goal=">= 0.95 after warm-up, every answer from the right adapter",
            about="60 mixed requests to two replicas with three adapters",
            measure=measure_affinity,
        ),
        Figure(
            name="registry_histories",
            unit="share of histories that are linearizable",
            goal="all; 20 concurrent registrations of one name have one winner",
            about="push, alias, rollback, delete and read from 4 processes over a real Redis",
            measure=measure_histories,
        ),
        Figure(
            name="registry_crash",
            unit="problems after 200 kills",
            goal="none: no half-visible version, no lost acknowledged write, no orphan blob",
            about="kill -9 of the client, the admin process or redis-server during changes",
            measure=measure_crashes,
        ),
        Figure(
            name="registry_redis_faults",
            unit="failed requests",
            goal="0; writes fail with UNAVAILABLE and succeed within 10 s of Redis's return",
            about="Redis restarted, failed over by sentinels, paused 60 s and flushed, while one "
            "adapter is served and another changed",
            measure=measure_faults,
        ),
        Figure(
            name="registry_100k",
            unit="p99 ms of a page",
            goal="< 20 ms; resolve p99 < 20 us; a change visible p99 < 1 s",
            about="100,000 versions of 100,000 adapters of 100 tenants",
            measure=measure_size,
        ),
        Figure(
            name="push_vs_copy",
            unit="times the speed of copying and hashing",
            goal=">= 0.5",
            about="a 64 MiB adapter over loopback against copying its file to the disk and hashing "
            "it",
            measure=measure_push,
        ),
    )
}
