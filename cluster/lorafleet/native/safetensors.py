"""Reading safetensors files through the native, bounds-checked reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lorafleet.native.library import as_tensor, facts_of_errors, functions


class SafetensorsFile:
    """A memory-mapped safetensors file. Immutable, hence thread-safe.

    The file must not shrink while it is open: publish files by renaming them into place.

    Parameters
    ----------
    path : Path
        The file.

    Raises
    ------
    InvalidAdapter
        The header breaks the format; the message names the rule, and `facts` the `file` and, when
        one is at fault, the `tensor`.
    NotFound
        There is no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._functions = functions()
        with facts_of_errors(file=self.path.name):
            self._handle: Any = self._functions.safetensors_open(str(path))

    def names(self) -> list[str]:
        """Tensor names in the order of their bytes."""
        return [str(name) for name in self._functions.safetensors_names(self._handle)]

    def metadata(self) -> dict[str, str]:
        """The header's `__metadata__`."""
        found = self._functions.safetensors_metadata(self._handle)
        return {str(key): str(value) for key, value in found.items()}

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The dtype as in the file (`F32`, `BF16`, ...) and the shape; NotFound for other names."""
        with facts_of_errors(file=self.path.name):
            dtype = str(self._functions.safetensors_dtype(self._handle, name))
        shape = self._functions.safetensors_shape(self._handle, name)
        return dtype, tuple(int(dim) for dim in shape)

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8, read-only, without a copy; keeps the file open."""
        with facts_of_errors(file=self.path.name):
            array = np.from_dlpack(self._functions.safetensors_raw(self._handle, name))
        array.flags.writeable = False  # the pages are mapped for reading
        return array

    def read_f32(self, name: str) -> np.ndarray:
        """The tensor as float32, widened exactly from F32, BF16 or F16.

        Raises
        ------
        InvalidAdapter
            The tensor has another dtype.
        """
        _, shape = self.info(name)
        out = np.empty(shape, dtype=np.float32)
        with facts_of_errors(file=self.path.name):
            self._functions.safetensors_read_f32(self._handle, name, as_tensor(out))
        return out
