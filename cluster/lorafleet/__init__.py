"""lorafleet: one base model, thousands of LoRA adapters, a fleet of replicas."""

from __future__ import annotations

import os

# tvm_ffi imports torch whenever it is installed, to exchange tensors with it quickly: four seconds
# at every start, for something that lorafleet never does.
os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")

__version__ = "0.1.0"
