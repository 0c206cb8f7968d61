"""One replica's engine: scheduling, KV blocks, residency, sampling, text. No Ray, no Redis."""

from __future__ import annotations

from lorafleet.engine.book import AdapterUse
from lorafleet.engine.engine import Engine
from lorafleet.engine.options import EngineOptions
from lorafleet.engine.request import (
    Completion,
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    Prompt,
    SamplingParams,
    Started,
)
from lorafleet.engine.snapshot import ResidencySnapshot

__all__ = [
    "AdapterUse",
    "Completion",
    "Delta",
    "Engine",
    "EngineOptions",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "Prompt",
    "ResidencySnapshot",
    "SamplingParams",
    "Started",
]
