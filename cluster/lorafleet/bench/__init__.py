"""Named benches: every figure lorafleet is held to, measured beside its baseline in one run.

A bench is a function returning a `Measurement`; `figures` knows them all by name and goal. The
command `lorafleet bench` is built on `run`; nothing else imports this package.
"""

from __future__ import annotations

from lorafleet.bench.figure import Figure, Measurement, NotMeasured, run
from lorafleet.bench.figures import FIGURES

__all__ = ["FIGURES", "Figure", "Measurement", "NotMeasured", "run"]
