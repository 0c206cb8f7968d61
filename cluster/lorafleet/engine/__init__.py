"""One replica's engine: scheduling, KV blocks, adapter residency, sampling, text. No Ray, no Redis."""

from __future__ import annotations

from lorafleet.engine.engine import AdapterUse, Completion, Engine, Prompt, ResidencySnapshot
from lorafleet.engine.options import EngineOptions
from lorafleet.engine.request import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    SamplingParams,
    Started,
)

__all__ = [
    "AdapterUse",
    "Completion",
    "Delta",
    "Engine",
    "EngineOptions",
    "Event",
    "Failed",
    "Finished",
    "FinishReason",
    "Prompt",
    "ResidencySnapshot",
    "SamplingParams",
    "Started",
]
