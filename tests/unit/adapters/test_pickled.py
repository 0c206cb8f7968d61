"""C51: pickles are read as tensors or not at all; nothing in them is ever run."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorafleet.adapters.pickled import read_pickle
from lorafleet.core.errors import InvalidAdapter, LorafleetError, Unsupported
from support.adapters import factors

torch = pytest.importorskip("torch")


class _Runs:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def archive(path: Path, content: Any) -> Path:
    """A file in PyTorch's form with any object as its pickle."""
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
        out.writestr("archive/version", "3\n")
    return path


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_that_torch_saved_are_read(tmp_path: Path, dtype: str) -> None:
    saved = {
        name: torch.tensor(value).to(getattr(torch, dtype)) for name, value in factors().items()
    }
    torch.save(saved, tmp_path / "adapter_model.bin")
    found = read_pickle(tmp_path / "adapter_model.bin")
    assert set(found) == set(saved)
    wanted = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}.get(dtype) or np.dtype(dtype)
    for name, value in found.items():
        assert value.dtype == wanted
        assert (value.astype(np.float32) == saved[name].float().numpy()).all()


def test_views_and_parameters_are_read(tmp_path: Path) -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    saved = OrderedDict(
        rows=whole[1:3], transposed=whole.T, empty=whole[:0], trained=torch.nn.Parameter(whole)
    )
    torch.save(saved, tmp_path / "a.bin")
    found = read_pickle(tmp_path / "a.bin")
    for name, value in saved.items():
        assert np.array_equal(found[name], value.detach().numpy())


def test_c51_a_call_is_not_made(tmp_path: Path) -> None:
    proof = tmp_path / "pwned"
    for function in (os.system, eval, exec, io.open):
        path = archive(tmp_path / "bad.bin", {"x": _Runs(function, f"touch {proof}")})
        with pytest.raises(Unsupported, match="not run"):
            read_pickle(path)
    assert not proof.exists()


@pytest.mark.parametrize("content", [[1, 2], {"x": 1}, {1: 2}, "text", None])
def test_what_is_no_dictionary_of_tensors_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(InvalidAdapter):
        read_pickle(archive(tmp_path / "a.bin", content))


def test_integers_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"x": torch.arange(3)}, tmp_path / "a.bin")
    with pytest.raises(Unsupported, match="LongStorage"):
        read_pickle(tmp_path / "a.bin")


def test_a_compressed_file_cannot_grow_in_memory(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.bin", "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("archive/data.pkl", pickle.dumps({}))
        out.writestr("archive/data/0", b"\0" * 10_000_000)
    with pytest.raises(InvalidAdapter, match="compressed"):
        read_pickle(tmp_path / "a.bin")


@pytest.mark.parametrize("content", [b"", b"PK", b"no zip", pickle.dumps({})])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(InvalidAdapter):
        read_pickle(tmp_path / "a.bin")


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_and_never_anything_else(
    tmp_path: Path, data: st.DataObject
) -> None:
    torch.save({"x": torch.ones(3, 2)}, tmp_path / "a.bin")
    content = bytearray((tmp_path / "a.bin").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "b.bin").write_bytes(content[: data.draw(st.integers(0, len(content)))] or content)
    try:
        found = read_pickle(tmp_path / "b.bin")
    except LorafleetError:
        return
    assert all(isinstance(value, np.ndarray) for value in found.values())
