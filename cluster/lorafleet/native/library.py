"""Finding and loading `liblorafleet.so`, and mapping its errors to ours.

The library registers global TVM-FFI functions named `lorafleet.*` as it is loaded. It works without
TVM; when TVM's runtime is in the process, kernels run on TVM's thread pool.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lorafleet.core import errors

_LIBRARY = "liblorafleet.so"


def _find() -> Path:
    import lorafleet.native

    searched = [Path(folder) / _LIBRARY for folder in lorafleet.native.__path__]
    for path in searched:
        if path.is_file():
            return path
    raise errors.Internal(
        f"the native library is not built: {_LIBRARY} is in none of "
        f"{', '.join(str(path.parent) for path in searched)}; reinstall lorafleet"
    )


@functools.cache
def load() -> None:
    """Load the library into this process; later calls do nothing.

    Raises
    ------
    Internal
        The library was not built.
    """
    import tvm_ffi  # its own library must be in the process first

    for name in ("InvalidInput", "InvalidAdapter", "NotFound", "Conflict", "Exhausted", "Internal"):
        tvm_ffi.register_error(f"lorafleet.{name}", getattr(errors, name))
    # Global, so that the weak reference to TVM's thread pool is resolved when TVM is there.
    ctypes.CDLL(str(_find()), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def functions() -> Any:
    """All `lorafleet.*` functions as attributes, without the prefix; loads the library."""
    import tvm_ffi

    load()
    names = tvm_ffi.registry.list_global_func_names()
    prefix = "lorafleet."
    return SimpleNamespace(
        **{
            name.removeprefix(prefix): tvm_ffi.get_global_func(name)
            for name in names
            if name.startswith(prefix) and name.count(".") == 1
        }
    )


def kernels_name() -> str:
    """The instruction set that the kernels use on this machine: `avx2` or `portable`."""
    return str(functions().kernels_name())
