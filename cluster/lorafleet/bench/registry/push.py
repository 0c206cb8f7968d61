"""How fast a push is, against copying and hashing the same file."""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from lorafleet.bench.figure import Measurement
from lorafleet.bench.random_adapter import write_random_adapter
from lorafleet.bench.registry.lab import AdminProcess, base_model, write_base
from lorafleet.registry import EmbeddedRedis
from lorafleet.sdk import Client

_GOAL = 0.5
_TIMES = 7
_SITES = 64
_WIDTH = 2048
_RANK = 64
"""Two factors of 2,048 x 64 floats at each of 64 sites: 64 MiB."""


def measure_push(report: Callable[[str], None]) -> Measurement:
    """Push a 64 MiB adapter, each time with other bytes, and copy it to the same disk."""
    base = base_model(_SITES, _WIDTH)
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as name:
        folder = Path(name)
        adapter = write_random_adapter(folder / "adapter", base, rank=_RANK, seed=0)
        weights = adapter / "adapter_model.safetensors"
        model_dir = write_base(folder / "model", base)
        with (
            EmbeddedRedis(folder / "redis") as redis,
            AdminProcess(redis.url, model_dir, folder / "blobs") as admin,
            Client(admin=admin.address) as client,
        ):
            pushes, copies, ratios = [], [], []
            for number in range(_TIMES + 1):
                report(f"push {number} of {_TIMES}")
                _change(weights, number)
                copy_s = _copy_and_hash(weights, folder / "copy")
                began_s = time.perf_counter()
                client.push_adapter(adapter, name="x")
                push_s = time.perf_counter() - began_s
                if number:  # the first warms up
                    pushes.append(push_s)
                    copies.append(copy_s)
                    ratios.append(copy_s / push_s)
        size = weights.stat().st_size
    value = statistics.median(ratios)
    return Measurement(
        value=value,
        holds=value >= _GOAL,
        baseline=1.0,
        details={
            "MiB": round(size / 2**20, 1),
            "push, median s": round(statistics.median(pushes), 3),
            "copy and hash, median s": round(statistics.median(copies), 3),
            "largest gRPC message": "4 MiB, gRPC's default",
        },
    )


def _change(weights: Path, number: int) -> None:
    tensors = load_file(weights)
    first = next(iter(tensors))
    tensors[first] = np.full_like(tensors[first], number * 1e-3)
    save_file(tensors, weights)


def _copy_and_hash(source: Path, target: Path) -> float:
    """Copy a file to the disk for good, and hash it: the least that storing it by digest takes."""
    began_s = time.perf_counter()
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())
        hashlib.file_digest(file, "sha256")
    return time.perf_counter() - began_s
