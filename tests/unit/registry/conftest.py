"""A real redis-server, small base models and real PEFT directories for the registry's tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
from safetensors.numpy import save_file

from lorafleet.core.manifest import FileEntry, VersionManifest
from lorafleet.core.model import BaseModel, KvLayout, Site, SitePart
from lorafleet.registry import BlobStore, EmbeddedRedis, RegistryStore
from lorafleet.v1 import tenants_pb2
from support.admin import Admin, serving


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """One server for all tests that leave it running."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """An empty database."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RegistryStore]:
    store = RegistryStore(redis_url)
    yield store
    await store.close()


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def make_manifest() -> Callable[..., VersionManifest]:
    """Make manifests whose ids follow from a number."""

    def make(adapter: str, number: int = 0, **changes: object) -> VersionManifest:
        fields: dict[str, object] = {
            "id": f"sha256:{number:064x}",
            "adapter": adapter,
            "base_digest": "sha256:" + "b" * 64,
            "max_rank": 8,
            "num_modules": 4,
            "target_modules": ("q_proj", "v_proj"),
            "weights_bytes": 1234,
            "dtype": "float32",
            "files": (
                FileEntry(name="adapter_config.json", size_bytes=5, sha256="c" * 64),
                FileEntry(name="adapter_model.safetensors", size_bytes=7, sha256=f"{number:064x}"),
            ),
            "created_at_s": 1.8e9 + number,
        }
        return VersionManifest(**{**fields, **changes})

    return make


@pytest.fixture(scope="session")
def make_base() -> Callable[..., BaseModel]:
    """Describe a base model whose layers have one fused qkv site and one square o_proj site."""

    def make(*, layers: int = 2, width: int = 64) -> BaseModel:
        sites = []
        for layer in range(layers):
            prefix = f"model.layers.{layer}.self_attn"
            q = SitePart(source=f"{prefix}.q_proj", out_start=0, out_end=width)
            v = SitePart(source=f"{prefix}.v_proj", out_start=width, out_end=width + width // 2)
            o = SitePart(source=f"{prefix}.o_proj", out_start=0, out_end=width)
            sites += [
                Site(
                    name=f"{prefix}.qkv_proj",
                    in_features=width,
                    out_features=width + width // 2,
                    parts=(q, v),
                ),
                Site(name=f"{prefix}.o_proj", in_features=width, out_features=width, parts=(o,)),
            ]
        return BaseModel(
            name="tiny",
            digest="sha256:" + "b" * 64,
            library="lib/llvm.so",
            target="llvm",
            vocab_size=256,
            context_window=128,
            max_batch_tokens=128,
            page_rows=8,
            kv=KvLayout(
                num_layers=layers,
                num_qo_heads=4,
                num_kv_heads=2,
                head_dim=16,
                rope_inv_freq=(1.0,) * 8,
            ),
            sites=tuple(sites),
        )

    return make


@pytest.fixture(scope="session")
def make_adapter() -> Callable[..., Path]:
    """Write a PEFT directory for a base of `make_base`; `config` overrides keys."""

    def make(
        directory: Path,
        *,
        seed: int = 0,
        rank: int = 4,
        shape: tuple[int, int] = (2, 64),
        module: str = "o_proj",
        config: dict[str, object] | None = None,
    ) -> Path:
        layers, width = shape
        rng = np.random.default_rng(seed)
        tensors = {}
        for layer in range(layers):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for name, dims in (("lora_A", (rank, width)), ("lora_B", (width, rank))):
                values = rng.standard_normal(dims, dtype=np.float32)
                tensors[f"{prefix}.{name}.weight"] = values
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / "adapter_model.safetensors")
        options = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": 2 * rank,
            "bias": "none",
            "target_modules": [module],
        }
        (directory / "adapter_config.json").write_text(json.dumps({**options, **(config or {})}))
        return directory

    return make


class Proxy:
    """A TCP proxy to Redis: `target` is for new connections, `swallow` drops replies that have it.

    A swallowed reply closes the connection: the command took effect and nobody was told.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.swallow: bytes | None = None
        self.num_swallowed = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()
        await asyncio.sleep(0.01)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers |= {writer, far_writer}
        await asyncio.gather(
            self._pump(reader, far_writer, replies=False),
            self._pump(far_reader, writer, replies=True),
            return_exceptions=True,
        )

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool
    ) -> None:
        while data := await reader.read(65536):
            if replies and self.swallow is not None and self.swallow in data:
                self.num_swallowed += 1
                self.swallow = None
                break
            writer.write(data)
            await writer.drain()
        writer.close()


@pytest.fixture
async def make_proxy() -> AsyncIterator[Callable[[int], Proxy]]:
    proxies: list[Proxy] = []

    def make(target: int) -> Proxy:
        proxies.append(Proxy(target))
        return proxies[-1]

    yield make
    for proxy in proxies:
        await proxy.stop()


@pytest.fixture
async def admin(
    store: RegistryStore, blobs: BlobStore, make_base: Callable[..., BaseModel]
) -> AsyncIterator[Admin]:
    async with serving(store, blobs, make_base()) as admin:
        yield admin


@pytest.fixture
async def guarded(
    store: RegistryStore, blobs: BlobStore, make_base: Callable[..., BaseModel]
) -> AsyncIterator[Admin]:
    """The operator's view of a registry that asks for keys, with tenants t1 and t2."""
    async with serving(store, blobs, make_base(), auth=True) as admin:
        for tenant in ("t1", "t2"):
            await admin.call("CreateTenant", tenants_pb2.CreateTenantRequest(name=tenant))
        yield admin
