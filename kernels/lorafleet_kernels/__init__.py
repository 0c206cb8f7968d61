"""The LoRA operator in TVMScript, and its definition in NumPy.

Stands alone: it imports nothing of lorafleet. `reference.lora_add` is the truth; `lora_add` builds
the same operator for a TVM target.
"""

from __future__ import annotations

from lorafleet_kernels.lora import PoolShape, column_parts, lora_add, plan_segments
from lorafleet_kernels.reference import AFFINE
from lorafleet_kernels.reference import lora_add as reference_lora_add

__all__ = ["AFFINE", "PoolShape", "column_parts", "lora_add", "plan_segments", "reference_lora_add"]
