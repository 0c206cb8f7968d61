"""Finding and loading `liblorafleet.so`, passing arrays to it, and mapping its errors to ours.

The library registers global TVM-FFI functions named `lorafleet.*` as it is loaded. It works without
TVM; when TVM's runtime is in the process, kernels run on TVM's thread pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from lorafleet.core import errors

_LIBRARY = "liblorafleet.so"

ERROR_KINDS = (
    "InvalidInput",
    "InvalidAdapter",
    "NotFound",
    "Conflict",
    "Exhausted",
    "Internal",
)
"""The classes of `core.errors` that the library raises; `status.h` lists the same."""


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

    for name in ERROR_KINDS:
        tvm_ffi.register_error(f"lorafleet.{name}", getattr(errors, name))
    ctypes.CDLL(str(_find()))


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


def as_tensor(array: np.ndarray) -> Any:
    """The array as a TVM tensor: the same memory, unless it is read-only or has gaps (a copy)."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(np.require(array, requirements=("C", "A", "W")))


def as_shape(dims: Sequence[int]) -> Any:
    """The numbers as a TVM shape."""
    import tvm_ffi

    return tvm_ffi.Shape(tuple(dims))


@contextlib.contextmanager
def facts_of_errors(**known: object) -> Iterator[None]:
    """Give errors of the library that pass through their facts, and the ones `known` here."""
    try:
        yield
    except errors.LorafleetError as error:
        context = error.__dict__.get("__tvm_ffi_error__")
        found = {} if context is None else context.extra_context
        error.facts |= {key: str(value) for key, value in known.items()}
        error.facts |= {str(key): str(value) for key, value in (found or {}).items()}
        raise
