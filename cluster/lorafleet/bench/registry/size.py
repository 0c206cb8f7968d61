"""A registry of 100,000 versions: pages, local resolution, news, memory."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lorafleet.bench.figure import Measurement
from lorafleet.bench.registry.lab import (
    AdminProcess,
    base_model,
    manifest,
    percentile,
    resident_bytes,
    write_base,
)
from lorafleet.core.names import parse_ref
from lorafleet.registry import Catalogue, EmbeddedRedis, RegistryStore
from lorafleet.registry.server import MIRROR
from lorafleet.v1 import registry_pb2, registry_pb2_grpc
from lorafleet.wire.channel import open_channel

VERSIONS = 100_000
_CONCURRENT = 32
_PAGES = 300
_PAGE = 50
_RESOLVES = 20_000
_CHANGES = 200


def measure_size(report: Callable[[str], None], versions: int = VERSIONS) -> Measurement:
    """Fill a registry through Redis and ask for the figures of the goal."""
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as name:
        folder = Path(name)
        model_dir = write_base(folder / "model", base_model())
        with EmbeddedRedis(folder / "redis") as redis:
            return asyncio.run(_measure(report, versions, redis.url, model_dir, folder / "blobs"))


async def _measure(
    report: Callable[[str], None], versions: int, url: str, model_dir: Path, blobs_dir: Path
) -> Measurement:
    store = RegistryStore(url)
    fill_s = await _fill(store, versions, report)
    report("reading the catalogue")
    before_bytes = resident_bytes()
    catalogue = Catalogue(store)
    began_s = time.perf_counter()
    await catalogue.start(wait_s=600.0)
    read_s = time.perf_counter() - began_s
    view_bytes = (resident_bytes() - before_bytes) / versions
    resolves_us = _resolve(catalogue, versions)
    report("asking for pages")
    with AdminProcess(url, model_dir, blobs_dir) as admin:
        mirror_s = await _until_mirrored(blobs_dir)
        pages_ms = await _pages(admin.address, versions)
    report("following changes")
    visible_ms = await _changes(store, catalogue, versions)
    redis_bytes = await _redis_bytes(store, versions)
    await catalogue.stop()
    await store.close()
    page_ms, resolve_us = percentile(pages_ms, 99), percentile(resolves_us, 99)
    visible_p99_ms = percentile(visible_ms, 99)
    return Measurement(
        value=page_ms,
        holds=page_ms < 20 and resolve_us < 20 and visible_p99_ms < 1000,
        details={
            "versions": versions,
            f"List, page of {_PAGE}, p50 and p99 ms": _two(pages_ms),
            "resolve in the local view, p50 and p99 us": _two(resolves_us),
            "change visible in the view, p50 and p99 ms": _two(visible_ms),
            "bytes a version in a view": round(view_bytes),
            "bytes a version in Redis": round(redis_bytes),
            "catalogue read in s": round(read_s, 1),
            "mirrored to files in s": round(mirror_s, 1),
            "registered a second": round(versions / fill_s),
        },
    )


def _two(values: list[float]) -> str:
    return f"{percentile(values, 50):.2f}, {percentile(values, 99):.2f}"


def _name(number: int) -> str:
    return f"tenant-{number % 100}/adapter-{number:06d}"


async def _fill(store: RegistryStore, versions: int, report: Callable[[str], None]) -> float:
    began_s = time.perf_counter()

    async def register(first: int) -> None:
        for number in range(first, versions, _CONCURRENT):
            await store.publish_version(manifest(_name(number), 0))
            if number % 20_000 == 0:
                report(f"{number} of {versions} registered")

    await asyncio.gather(*(register(first) for first in range(_CONCURRENT)))
    return time.perf_counter() - began_s


def _resolve(catalogue: Catalogue, versions: int) -> list[float]:
    rng = random.Random(0)
    times_us = []
    for _ in range(_RESOLVES):
        ref = parse_ref(_name(rng.randrange(versions)))
        assert ref is not None
        began_s = time.perf_counter()
        catalogue.resolve(ref)
        times_us.append((time.perf_counter() - began_s) * 1e6)
    return times_us


async def _until_mirrored(blobs_dir: Path) -> float:
    """Wait until a registry that finds this much has mirrored it, as it does once."""
    began_s = time.perf_counter()
    while not (blobs_dir / MIRROR / "state.json").exists():
        await asyncio.sleep(0.1)
    return time.perf_counter() - began_s


async def _pages(address: str, versions: int) -> list[float]:
    """Pages from random places on, over gRPC."""
    rng = random.Random(1)
    times_ms = []
    async with open_channel(address) as channel:
        stub: Any = registry_pb2_grpc.AdapterRegistryStub(channel)  # type: ignore[no-untyped-call]
        token = ""
        for number in range(_PAGES + 20):
            request = registry_pb2.ListAdaptersRequest(page_size=_PAGE, page_token=token)
            began_s = time.perf_counter()
            reply = await stub.ListAdapters(request)
            if number >= 20:
                times_ms.append((time.perf_counter() - began_s) * 1e3)
            assert len(reply.adapters) == _PAGE
            token = reply.next_page_token if rng.random() < 0.8 else ""
    return times_ms


async def _changes(store: RegistryStore, catalogue: Catalogue, versions: int) -> list[float]:
    rng = random.Random(2)
    times_ms = []
    for number in range(_CHANGES):
        name = _name(rng.randrange(versions))
        new = manifest(name, number + 1)
        await store.publish_version(new)
        began_s = time.perf_counter()
        while catalogue.adapter(name).latest.id != new.id:
            await asyncio.sleep(0.0005)
        times_ms.append((time.perf_counter() - began_s) * 1e3)
        await asyncio.sleep(rng.random() * 0.02)
    return times_ms


async def _redis_bytes(store: RegistryStore, versions: int) -> float:
    async def read(redis: Any) -> int:
        return int((await redis.info("memory"))["used_memory"])

    return (await store._link.call(read)).value / versions
