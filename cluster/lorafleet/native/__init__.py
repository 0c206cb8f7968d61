"""The native library's Python door: loads it once and wraps its objects.

`functions()` returns the loaded library's functions by name; the classes here are what the other
layers use. Compiled models find the operators by their global names once the library is loaded.
"""

from __future__ import annotations

from lorafleet.native.kv_cache import PagedKVCache
from lorafleet.native.library import functions, kernels_name, load
from lorafleet.native.pool import AdapterPool
from lorafleet.native.safetensors import SafetensorsFile

__all__ = [
    "AdapterPool",
    "PagedKVCache",
    "SafetensorsFile",
    "functions",
    "kernels_name",
    "load",
]
