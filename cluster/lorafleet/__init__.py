"""lorafleet: one base model, thousands of LoRA adapters, a fleet of replicas."""

from __future__ import annotations

__version__ = "0.1.0"
