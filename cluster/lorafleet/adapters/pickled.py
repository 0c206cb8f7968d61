"""Reading `adapter_model.bin` without running it: a pickle of tensors, and nothing else.

A pickle names functions to be called as it is opened. This reader knows the few that PyTorch writes
for a dictionary of tensors, as values rather than as code; any other name ends it. Only the zip
form of PyTorch 1.6 and later is read. Served are safetensors alone: this is for converting.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lorafleet.adapters.faults import invalid, shown_name, unsupported
from lorafleet.core.errors import InvalidAdapter, LorafleetError

_DTYPES: dict[str, np.dtype[Any]] = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}

_MAX_PICKLE_BYTES = 16 << 20
"""The pickle itself has names and shapes only; the values lie beside it."""


def read_pickle(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a PyTorch file by name, in their own dtypes.

    Raises
    ------
    InvalidAdapter
        It is no PyTorch file, or is broken.
    Unsupported
        It holds anything but float tensors; what it is is named, and was not run.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(path.name, archive)
    except LorafleetError:
        raise
    except Exception as error:  # a pickle is a program: it can fail in any way
        raise invalid(path.name, f"is no readable PyTorch file: {error}") from None


def _read(file: str, archive: zipfile.ZipFile) -> dict[str, np.ndarray]:
    members = {info.filename: info for info in archive.infolist()}
    for name, info in members.items():
        if info.compress_type != zipfile.ZIP_STORED:
            raise invalid(file, f"its part {shown_name(name)} is compressed, as PyTorch never does")
    pickles = [name for name in members if name.endswith("data.pkl")]
    if len(pickles) != 1 or members[pickles[0]].file_size > _MAX_PICKLE_BYTES:
        raise invalid(file, "expected one data.pkl of a reasonable size")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}byteorder" in members and archive.read(f"{root}byteorder") != b"little":
        raise unsupported(file, "its numbers are big-endian")
    with archive.open(pickles[0]) as text:
        found = _Reader(text, file, archive, root).load()
    if not isinstance(found, dict):
        raise invalid(file, f"holds a {type(found).__name__}, expected a dictionary of tensors")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray):
            raise invalid(file, f"holds more than tensors: {shown_name(str(name))}")
    return dict(found)


@dataclass(frozen=True, slots=True)
class _Storage:
    values: np.ndarray


# The pure Python class: the C one makes room for any index that a hostile file names.
class _Reader(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """An unpickler that can make tensors and dictionaries, and call nothing else."""

    def __init__(self, text: Any, file: str, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(text, encoding="utf-8")
        self._file = file
        self._archive = archive
        self._root = root

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _parameter
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise unsupported(
            self._file, f"asks for {shown_name(f'{module}.{name}')}, which is not run"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise invalid(self._file, "refers to something that is no storage")
        content = self._archive.read(f"{self._root}data/{key}")
        values = np.frombuffer(content, dtype)
        if len(values) != count:
            raise invalid(self._file, f"a storage has {len(values)} numbers, expected {count}")
        return _Storage(values)


def _tensor(
    storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> np.ndarray:
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min((offset, *size, *stride)) < 0 or (0 not in size and last >= len(storage.values)):
        raise InvalidAdapter("a tensor reaches out of its storage")
    if 0 in size:
        return np.zeros(size, storage.values.dtype)
    item = storage.values.dtype.itemsize
    view = np.lib.stride_tricks.as_strided(
        storage.values[offset:], size, [step * item for step in stride], writeable=False
    )
    return np.ascontiguousarray(view)


def _parameter(data: np.ndarray, *_: object) -> np.ndarray:
    return data
