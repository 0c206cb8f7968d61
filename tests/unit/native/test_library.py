"""The door itself: errors, arrays and what the library offers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lorafleet import native
from lorafleet.core import errors
from lorafleet.native.library import ERROR_KINDS, as_tensor, facts_of_errors

STATUS_CC = Path(__file__).parents[3] / "cpp" / "src" / "status.cc"


def test_both_sides_list_the_same_errors() -> None:
    in_cpp = set(re.findall(r'return "(\w+)";', STATUS_CC.read_text()))
    assert in_cpp == set(ERROR_KINDS)
    assert all(issubclass(getattr(errors, kind), errors.LorafleetError) for kind in ERROR_KINDS)


def test_errors_of_the_library_are_ours_and_say_which_argument() -> None:
    x = as_tensor(np.zeros((2, 8), np.float32))
    w = as_tensor(np.zeros((3, 9), np.float32))
    with (
        pytest.raises(errors.InvalidInput, match=r"linear: w: dimension 1 is 9, expected 8") as e,
        facts_of_errors(file="model"),
    ):
        native.functions().linear(x, w, as_tensor(np.zeros((2, 3), np.float32)))
    assert e.value.facts == {"field": "w", "file": "model"}


def test_arrays_are_shared_unless_they_cannot_be() -> None:
    array = np.zeros(4, np.float32)
    assert np.shares_memory(np.from_dlpack(as_tensor(array)), array)
    read_only = np.frombuffer(bytes(16), np.float32)
    assert np.from_dlpack(as_tensor(read_only)).tolist() == [0.0] * 4
    gaps = np.arange(8, dtype=np.float32)[::2]
    assert np.from_dlpack(as_tensor(gaps)).tolist() == [0.0, 2.0, 4.0, 6.0]


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, lorafleet.native;"
        "assert not {'tvm', 'tvm_ffi', 'torch'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernels_find_tvms_threads_even_if_tvm_comes_later() -> None:
    code = """
import os
os.environ["TVM_NUM_THREADS"] = "2"
import numpy as np
from lorafleet import native
from lorafleet.native.library import as_tensor
x, w = np.ones((64, 512), np.float32), np.ones((2048, 512), np.float32)
y = np.empty((64, 2048), np.float32)
run = lambda: native.functions().linear(as_tensor(x), as_tensor(w), as_tensor(y))
threads = lambda: len(os.listdir("/proc/self/task"))
run()
alone = threads()
os.environ["TVM_USE_RUNTIME_LIB"] = "1"
import tvm
before = threads()
run()
assert threads() > before, (alone, before, threads())
"""
    subprocess.run([sys.executable, "-c", code], check=True)
