"""What a figure is, and how one is run: measured, or said to be not measurable here.

It decides what `holds` means; it does not know any particular bench.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class NotMeasured(Exception):
    """The bench cannot run on this machine; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The outcome of one bench.

    `value` is in the figure's unit; `baseline` is what it was compared with in the same run, or
    None; `holds` is the goal's verdict; `details` are numbers and sentences worth reading.
    """

    value: float
    holds: bool
    baseline: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A named figure: what is measured, in which unit, and the goal in words."""

    name: str
    unit: str
    goal: str
    about: str
    measure: Callable[[Callable[[str], None]], Measurement]


def machine() -> dict[str, Any]:
    """The machine a figure was taken on."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(
                (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
                model,
            )
    except OSError:
        pass
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "system": platform.system()}


def run(figure: Figure, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure one figure; `report` receives a line for each stage.

    Returns
    -------
    dict
        `name, value, unit, baseline, goal, holds, seconds, details`, JSON-ready. A bench that
        cannot run here has `value` null, `holds` false and `not_measured` saying why.
    """
    started_s = time.monotonic()
    result: dict[str, Any] = {"name": figure.name, "unit": figure.unit, "goal": figure.goal}
    try:
        outcome = figure.measure(report)
    except NotMeasured as reason:
        result |= {"value": None, "baseline": None, "holds": False, "not_measured": str(reason)}
    else:
        result |= {
            "value": outcome.value,
            "baseline": outcome.baseline,
            "holds": outcome.holds,
            "details": outcome.details,
        }
    result["seconds"] = round(time.monotonic() - started_s, 2)
    return result
