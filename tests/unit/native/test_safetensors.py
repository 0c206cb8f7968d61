"""The safetensors reader against the official package, and against files that are none."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lorafleet.core.errors import InvalidAdapter, NotFound
from lorafleet.native import SafetensorsFile

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def test_every_tensor_reads_as_torch_widens_it(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {
        f"{name}.{shape}": torch.randn(shape).to(dtype)
        for name, dtype in DTYPES.items()
        for shape in [(3, 5), (7,), (), (0, 4), (1, 1, 2)]
    }
    every_half = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    tensors |= {
        "every.f16": every_half.view(torch.float16),
        "every.bf16": every_half.clone().view(torch.bfloat16),
    }
    save_file(tensors, path, metadata={"format": "pt", "ключ": "значение"})
    file = SafetensorsFile(path)
    assert file.metadata() == {"format": "pt", "ключ": "значение"}
    assert set(file.names()) == set(tensors)
    for name, tensor in tensors.items():
        dtype, shape = file.info(name)
        assert DTYPES[dtype] == tensor.dtype
        assert shape == tuple(tensor.shape)
        expected = tensor.to(torch.float32).numpy()
        read = file.read_f32(name)
        assert read.shape == expected.shape
        not_nan = ~np.isnan(expected)
        bits = read.view(np.uint32)[not_nan] == expected.view(np.uint32)[not_nan]
        assert bits.all(), name
        assert np.isnan(read[~not_nan]).all()
        assert file.raw(name).tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_raw_bytes_are_read_only_and_keep_the_file_open(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.arange(4, dtype=torch.uint8)}, path)
    raw = SafetensorsFile(path).raw("x")
    path.unlink()
    assert raw.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        raw[0] = 1


def test_only_floats_are_read_as_floats(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.arange(4)}, path)
    with pytest.raises(InvalidAdapter, match="tensor 'x': dtype: is I64") as error:
        SafetensorsFile(path).read_f32("x")
    assert error.value.facts == {"file": "a.safetensors", "tensor": "x"}


def test_absent_files_and_tensors_are_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="No such file"):
        SafetensorsFile(tmp_path / "absent")
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    for call in (SafetensorsFile(path).info, SafetensorsFile(path).raw):
        with pytest.raises(NotFound) as error:
            call("y")
        assert error.value.facts["tensor"] == "y"


def make(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message", "tensor"),
    [
        (b"", "at least 8 bytes, got 0", None),
        (b"\xff" * 8 + b"{}", "header claims", None),
        (struct.pack("<Q", 10 * 2**30) + b"{}", "header claims 10737418240 bytes", None),
        (make({"x": ENTRY}, bytes(8))[:-4], "outside the file's 4 bytes", "x"),
        (make({"x": ENTRY}, bytes(9)), "end at byte 8 of 9", None),
        (make({"x": ENTRY | {"shape": [3]}}, bytes(8)), "shape: needs 12 bytes", "x"),
        (make({"x": ENTRY | {"dtype": "Q4"}}, bytes(8)), "dtype: unknown 'Q4'", "x"),
        (make({"x": ENTRY, "y": ENTRY}, bytes(8)), "must tile the data", "y"),
        (make(b'{"x":' + b"[" * 100_000, b""), "tensor 'x'", "x"),
        (make(b"\x80\x04\x95."), "header: expected '{'", None),
    ],
)
def test_broken_files_are_refused_by_rule_and_name(
    tmp_path: Path, content: bytes, message: str, tensor: str | None
) -> None:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(content)
    with pytest.raises(InvalidAdapter) as error:
        SafetensorsFile(path)
    assert message in error.value.message
    assert error.value.facts["file"] == "adapter_model.safetensors"
    assert error.value.facts.get("tensor") == tensor


VALID = make({"x": ENTRY, "y": ENTRY | {"data_offsets": [8, 16]}, "__metadata__": {"k": "v"}})


def open_everything(path: Path) -> SafetensorsFile | None:
    """The file with all of its tensors read, or None if it was refused as it should be."""
    try:
        file = SafetensorsFile(path)
    except InvalidAdapter:
        return None
    for name in file.names():
        assert file.raw(name).size >= 0
        try:
            file.read_f32(name)
        except InvalidAdapter:
            assert file.info(name)[0] not in DTYPES
    return file


relaxed = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300
)


@given(
    edits=st.lists(st.tuples(st.integers(0, len(VALID) + 15), st.integers(0, 255)), max_size=4),
    length=st.integers(0, len(VALID) + 16),
)
@relaxed
def test_no_damage_does_more_than_refuse(
    tmp_path: Path, edits: list[tuple[int, int]], length: int
) -> None:
    content = bytearray(VALID + bytes(16))
    for at, value in edits:
        content[at] = value
    path = tmp_path / "a.safetensors"
    path.write_bytes(content[:length] if length % 3 else content)
    open_everything(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
sizes = st.integers(0, 12) | st.sampled_from([2**31, 2**62, 2**63 - 1, 2**63, 2**64])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "U8", "I64", "F8_E4M3", "x"]),
        "shape": st.lists(sizes, max_size=3) | st.just([1] * 40),
        "data_offsets": st.lists(sizes, min_size=2, max_size=2),
    }
)
headers = st.dictionaries(st.text(max_size=3), entries | json_values, max_size=3)


@given(header=headers, size=st.integers(0, 24))
@relaxed
def test_what_the_official_reader_refuses_we_refuse(
    tmp_path: Path, header: dict[str, object], size: int
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(make(header, bytes(size)))
    ours = open_everything(path)
    try:
        with safe_open(path, "numpy") as official:
            names = set(official.keys())
    except SafetensorError:
        assert ours is None
    else:
        # Stricter than the official reader, never more lenient.
        assert ours is None or set(ours.names()) == names
