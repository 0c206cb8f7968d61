"""The package's promises: its names, and a light import."""

from __future__ import annotations

import subprocess
import sys

import lorafleet.sdk


def test_every_exported_name_is_there() -> None:
    assert sorted(lorafleet.sdk.__all__) == lorafleet.sdk.__all__
    for name in lorafleet.sdk.__all__:
        assert hasattr(lorafleet.sdk, name)


def test_importing_it_needs_no_numpy_no_tvm_and_no_ray() -> None:
    code = (
        "import sys, lorafleet.sdk\n"
        "heavy = {'numpy', 'tvm', 'tvm_ffi', 'ray', 'torch', 'redis', 'lorafleet.native'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
