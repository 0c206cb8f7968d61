"""Redis restarted, failed over, paused and flushed, under inference on known adapters."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lorafleet.bench.examples import example_adapters
from lorafleet.bench.figure import Measurement
from lorafleet.bench.registry.lab import AdminProcess
from lorafleet.bench.registry.servers import Watched
from lorafleet.compiler import ensure_compiled
from lorafleet.core.errors import LorafleetError, Unavailable
from lorafleet.engine import EngineOptions
from lorafleet.fleet.replica import Replica, ReplicaOptions
from lorafleet.gateway import Gateway, GatewayOptions
from lorafleet.sdk import AsyncClient, Sampling

PAUSE_S = 60.0
_DOWN_S = 5.0
_BACK_S = 10.0
_AFTER_S = 3.0
_WRITE_EVERY_S = 0.25
_KNOWN = "known"


@dataclass
class _Seen:
    """What happened during one fault; times in seconds since it began."""

    answers: int = 0
    errors: list[str] = field(default_factory=list)
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    writes_ok_at_s: list[float] = field(default_factory=list)


def measure_faults(report: Callable[[str], None], pause_s: float = PAUSE_S) -> Measurement:
    """Serve one adapter without a break while Redis fails in four ways."""
    return asyncio.run(_measure(report, pause_s))


async def _measure(report: Callable[[str], None], pause_s: float) -> Measurement:
    details: dict[str, object] = {}
    holds = True
    errors = 0
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as name:
        report("starting Redis with sentinels, the registry, a replica and a gateway")
        redis = await asyncio.to_thread(Watched, Path(name) / "redis")
        try:
            async with _fleet(redis.url, Path(name)) as client:
                for fault, back in (
                    ("restarted", _restart),
                    ("failed over", _fail_over),
                    (f"paused {pause_s:g} s", _pausing(pause_s)),
                    ("flushed", _flush),
                ):
                    report(f"Redis is {fault}")
                    seen, back_at_s = await _under(client, lambda: back(redis))  # noqa: B023
                    first_s = min((t for t in seen.writes_ok_at_s if t >= back_at_s), default=None)
                    recovered_s = None if first_s is None else round(first_s - back_at_s, 2)
                    ok = not seen.errors and not seen.wrong
                    ok &= recovered_s is not None and recovered_s <= _BACK_S
                    holds &= ok
                    errors += len(seen.errors)
                    details[fault] = {
                        "holds": ok,
                        "answers": seen.answers,
                        "errors of inference": seen.errors[:3],
                        "writes refused with UNAVAILABLE": seen.refused,
                        "writes refused otherwise": seen.wrong[:3],
                        "first write after its return, s": recovered_s,
                    }
                names = [record.name for record in await client.list_adapters()]
                rebuilt = _KNOWN in names and "write" in names
                details["registered after the flush"] = names
        finally:
            await asyncio.to_thread(redis.stop)
    return Measurement(value=float(errors), holds=holds and rebuilt, details=details)


@asynccontextmanager
async def _fleet(url: str, folder: Path) -> AsyncIterator[AsyncClient]:
    model_dir = ensure_compiled()
    replica = Replica(
        ReplicaOptions(
            replica_id="one",
            model_dir=model_dir,
            blobs_dir=folder / "blobs",
            redis_url=url,
            engine=EngineOptions(kv_tokens=2048, num_adapter_pages=32, num_threads=1),
        )
    )
    gateway = Gateway(GatewayOptions(redis_url=url, model_dir=model_dir, listen="127.0.0.1:0"))
    with AdminProcess(url, model_dir, folder / "blobs") as admin:
        async with AsyncExitStack() as stack:
            await replica.start()
            stack.push_async_callback(replica.stop, 1.0)
            address = await gateway.start()
            stack.push_async_callback(gateway.stop, 1.0)
            client = AsyncClient(gateway=address, admin=admin.address)
            await stack.enter_async_context(client)
            await client.push_adapter(example_adapters()["json"], name=_KNOWN)
            await client.push_adapter(example_adapters()["json"], name="write")
            async with asyncio.timeout(60):
                while not await _answers(client):
                    await asyncio.sleep(0.1)
            yield client


async def _answers(client: AsyncClient) -> bool:
    try:
        await client.complete("Hello", adapter=_KNOWN, sampling=Sampling(max_tokens=2))
    except LorafleetError:
        return False
    return True


async def _under(client: AsyncClient, fault: Callable[[], Awaitable[float]]) -> tuple[_Seen, float]:
    """Ask and write without a break while a fault happens; when Redis was back, in seconds."""
    seen, began_s = _Seen(), time.monotonic()

    async def ask() -> None:
        while True:
            try:
                await client.complete("Hello", adapter=_KNOWN, sampling=Sampling(max_tokens=2))
                seen.answers += 1
            except LorafleetError as error:
                seen.errors.append(f"{error.code}: {error.message}")

    async def write() -> None:
        number = 0
        while True:
            number += 1
            try:
                record = await client.get_adapter("write")
                await client.set_alias("write", f"alias-{number % 20}", record.latest.id)
                seen.writes_ok_at_s.append(time.monotonic() - began_s)
            except Unavailable:
                seen.refused += 1
            except LorafleetError as error:
                seen.wrong.append(f"{error.code}: {error.message}")
            await asyncio.sleep(_WRITE_EVERY_S)

    tasks = [asyncio.create_task(ask()), asyncio.create_task(write())]
    back_at_s = await fault() - began_s
    deadline_s = time.monotonic() + _BACK_S
    while time.monotonic() < deadline_s and not any(t >= back_at_s for t in seen.writes_ok_at_s):
        await asyncio.sleep(0.05)
    await asyncio.sleep(_AFTER_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return seen, back_at_s


async def _restart(redis: Watched) -> float:
    """The primary is down for some seconds, and back before the sentinels act or after."""
    primary = redis.primary()
    await asyncio.to_thread(primary.kill)
    await asyncio.sleep(0.2)
    await asyncio.to_thread(primary.start)
    return time.monotonic()


async def _fail_over(redis: Watched) -> float:
    """The primary dies; the sentinels agree on the other one."""
    dying = redis.primary()
    await asyncio.to_thread(dying.kill)
    while redis.primary() is dying:
        await asyncio.sleep(0.05)
    back_at_s = time.monotonic()
    await asyncio.sleep(_DOWN_S)
    await asyncio.to_thread(dying.start)
    return back_at_s


def _pausing(pause_s: float) -> Callable[[Watched], Awaitable[float]]:
    async def pause(redis: Watched) -> float:
        """All servers and sentinels stand still, so that nobody fails over."""
        stopped = [server.process.pid for server in (*redis.sentinels, *redis.servers)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(pause_s)
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGCONT)
        return time.monotonic()

    return pause


async def _flush(redis: Watched) -> float:
    await asyncio.to_thread(redis.primary().client().flushall)
    return time.monotonic()
