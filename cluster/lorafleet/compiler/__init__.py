"""Compiling base models: read a checkpoint, build the model, inject LoRA, package the result.

`compile_model` writes one model directory; `ensure_compiled` does so through a cache. Importing
this package does not import TVM: its modules do, where they need it.
"""

from __future__ import annotations

from lorafleet.compiler.cache import ensure_compiled
from lorafleet.compiler.package import CompileOptions, compile_model
from lorafleet.compiler.source import Checkpoint, default_source, open_checkpoint

__all__ = [
    "Checkpoint",
    "CompileOptions",
    "compile_model",
    "default_source",
    "ensure_compiled",
    "open_checkpoint",
]
