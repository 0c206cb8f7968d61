"""All figures by name; a new bench is one entry here."""

from __future__ import annotations

from lorafleet.bench.affinity import measure_affinity
from lorafleet.bench.figure import Figure
from lorafleet.bench.logits import measure_logits

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
    )
}
