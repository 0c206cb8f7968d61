"""What the registry's benches share: small base models, manifests, and the real admin process."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from lorafleet.core.errors import Internal
from lorafleet.core.manifest import FileEntry, VersionManifest
from lorafleet.core.model import DESCRIPTION_FILE, BaseModel, KvLayout, Site, SitePart

_START_TIMEOUT_S = 30.0


def base_model(num_sites: int = 2, width: int = 16) -> BaseModel:
    """A description of square linear layers: what the registry needs to check adapters."""
    names = [f"model.layers.{index}.self_attn.q_proj" for index in range(num_sites)]
    return BaseModel(
        name="bench",
        digest="sha256:" + hashlib.sha256(f"{num_sites} {width}".encode()).hexdigest(),
        library="lib/none.so",
        target="llvm",
        vocab_size=256,
        context_window=128,
        max_batch_tokens=64,
        page_rows=8,
        kv=KvLayout(num_layers=1, num_qo_heads=1, num_kv_heads=1, head_dim=2, rope_inv_freq=(1.0,)),
        sites=tuple(
            Site(
                name=name,
                in_features=width,
                out_features=width,
                parts=(SitePart(source=name, out_start=0, out_end=width),),
            )
            for name in names
        ),
    )


def write_base(directory: Path, base: BaseModel) -> Path:
    """A directory that describes it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / DESCRIPTION_FILE).write_text(base.to_json())
    return directory


def manifest(name: str, number: int) -> VersionManifest:
    """A version whose id follows from a number; its files exist nowhere."""
    digest = hashlib.sha256(f"{name} {number}".encode()).hexdigest()
    files = [
        FileEntry(name="adapter_config.json", size_bytes=612, sha256=digest[::-1]),
        FileEntry(name="adapter_model.safetensors", size_bytes=1 << 20, sha256=digest),
    ]
    return VersionManifest(
        id=f"sha256:{digest}",
        adapter=name,
        base_digest="sha256:" + "0" * 64,
        max_rank=16,
        num_modules=210,
        target_modules=tuple(f"{kind}_proj" for kind in ("down", "gate", "k", "o", "q", "up", "v")),
        weights_bytes=1 << 20,
        dtype="bfloat16",
        files=tuple(files),
        created_at_s=1.0,
    )


class AdminProcess:
    """`python -m lorafleet.registry` on one port, started again at will."""

    def __init__(self, redis_url: str, model_dir: Path, blobs_dir: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._ready = blobs_dir.parent / "admin.address"
        self._log = blobs_dir.parent / "admin.log"
        self._command = [
            *(sys.executable, "-m", "lorafleet.registry"),
            *(f"--redis={redis_url}", f"--model-dir={model_dir}", f"--blobs={blobs_dir}"),
            *(f"--listen={self.address}", f"--address-file={self._ready}"),
            *(f"--log-file={self._log}", *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and return when it listens."""
        self._ready.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise Internal(f"the registry does not start; see {self._log}")
            time.sleep(0.02)

    def kill(self) -> None:
        """End it without a warning."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """The running process."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> AdminProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def percentile(values: list[float], percent: float) -> float:
    """The value that so many percent do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def resident_bytes() -> int:
    """This process's resident memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
