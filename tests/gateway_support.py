"""What tests of the gateway and of the SDK share: a scripted replica and a running gateway.

The replica speaks the real protocol of `lorafleet.v1.Replica` over a real socket; only its answers
are written down beforehand. It is the gateway's peer process, not a stand-in for our own code.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import grpc

from lorafleet.core.errors import LorafleetError
from lorafleet.core.manifest import FileEntry, VersionManifest
from lorafleet.core.model import DESCRIPTION_FILE, BaseModel, KvLayout, Site, SitePart
from lorafleet.gateway import Gateway, GatewayOptions
from lorafleet.gateway.replicas import PoolOptions
from lorafleet.registry.store import RegistryStore
from lorafleet.v1 import inference_pb2, inference_pb2_grpc, replica_pb2, replica_pb2_grpc
from lorafleet.wire.channel import GrpcServer, Service, open_channel

BASE = BaseModel(
    name="tiny4",
    digest="sha256:" + "0b" * 32,
    library="lib/llvm.so",
    target="llvm",
    vocab_size=256,
    context_window=128,
    max_batch_tokens=64,
    page_rows=8,
    kv=KvLayout(num_layers=1, num_qo_heads=1, num_kv_heads=1, head_dim=2, rope_inv_freq=(1.0,)),
    sites=(
        Site(
            name="model.layers.0.self_attn.q_proj",
            in_features=8,
            out_features=8,
            parts=(SitePart(source="model.layers.0.self_attn.q_proj", out_start=0, out_end=8),),
        ),
    ),
)

FAST = PoolOptions(poll_s=0.05, silence_s=1.5, first_pause_s=0.02, longest_pause_s=0.1)

Answer = Callable[
    [replica_pb2.ReplicaGenerateRequest], AsyncIterator[inference_pb2.GenerateResponse]
]


def write_model_dir(directory: Path) -> Path:
    (directory / DESCRIPTION_FILE).write_text(BASE.to_json())
    return directory


def version_id(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def manifest(name: str, *, content: str = "v1", base_digest: str = BASE.digest) -> VersionManifest:
    return VersionManifest(
        id=version_id(f"{name} {content}"),
        adapter=name,
        base_digest=base_digest,
        max_rank=8,
        num_modules=2,
        target_modules=("q_proj",),
        weights_bytes=1024,
        dtype="float32",
        files=(FileEntry(name="adapter_config.json", size_bytes=2, sha256="0" * 64),),
        created_at_s=1.0,
    )


class ScriptedReplica(replica_pb2_grpc.ReplicaServicer):
    """One replica; its report and its answers are attributes that a test sets.

    By default it answers `ID:VERSION` in two deltas and holds a version from its first request on.
    """

    def __init__(self, id: str, *, num_pages: int = 64) -> None:
        self.id = id
        self.epoch = 1
        self.sequence = 0
        self.resident: set[str] = set()
        self.num_pages = num_pages
        self.draining = False
        self.silent = False
        self.named = id
        self.answer: Answer = self.greet
        self.requests: list[replica_pb2.ReplicaGenerateRequest] = []
        self.running = 0
        self.cancelled = 0
        self.deadlines: list[float | None] = []
        self.server = GrpcServer(
            "127.0.0.1:0",
            [
                Service(
                    name="lorafleet.v1.Replica",
                    add=partial(replica_pb2_grpc.add_ReplicaServicer_to_server, self),
                )
            ],
        )
        self._changed = asyncio.Event()

    @property
    def address(self) -> str:
        return self.server.address

    async def start(self, store: RegistryStore, *, ttl_s: float = 60.0) -> ScriptedReplica:
        await self.server.start()
        self.epoch = await store.leases.register(
            self.id, self.address, BASE.digest, ttl_s=ttl_s, after_epoch=self.epoch
        )
        return self

    def changed(self) -> None:
        """Send a report now."""
        self._changed.set()
        self._changed = asyncio.Event()

    def report(self) -> replica_pb2.ResidencyReport:
        self.sequence += 1
        return replica_pb2.ResidencyReport(
            replica=self.named,
            epoch=self.epoch,
            sequence=self.sequence,
            resident=sorted(self.resident),
            num_pages=self.num_pages,
            running=self.running,
            draining=self.draining,
        )

    async def greet(self, request) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield self.started(request)
        yield delta(1, f"{self.id}:")
        yield delta(2, request.version or "base")
        yield finished(2)

    def started(self, request) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(
            started=inference_pb2.Started(
                request_id=request.request_id,
                version=request.version,
                replica=self.id,
                resident=not request.version or request.version in self.resident,
                prompt_tokens=3,
            )
        )

    async def slow(self, request) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """A token every 20 ms, for ever."""
        yield self.started(request)
        while True:
            yield delta(7, "x")
            await asyncio.sleep(0.02)

    async def stuck(self, request) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Never a token."""
        yield self.started(request)
        await asyncio.Event().wait()

    def failing(self, error: LorafleetError, *, after: int = 0) -> Answer:
        async def answer(request) -> AsyncIterator[inference_pb2.GenerateResponse]:
            yield self.started(request)
            for index in range(after):
                yield delta(index, f"{index} ")
            raise error

        return answer

    # The protocol.

    async def Generate(self, request, context):
        self.requests.append(request)
        self.deadlines.append(context.time_remaining())
        self.running += 1
        self.changed()
        try:
            async with contextlib.aclosing(self.answer(request)) as responses:
                async for response in responses:
                    yield response
            if request.version:
                self.resident.add(request.version)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            self.changed()

    async def Tokenize(self, request, context):
        text = request.text or "".join(message.content for message in request.messages)
        return inference_pb2.TokenizeResponse(token_ids=list(text.encode()))

    async def WatchResidency(self, request, context):
        while True:
            changed = self._changed
            if not self.silent:
                yield self.report()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), 0.5)


def delta(token: int, text: str) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(delta=inference_pb2.Delta(token_ids=[token], text=text))


def finished(tokens: int) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        finished=inference_pb2.Finished(
            reason=inference_pb2.FINISH_REASON_STOP, completion_tokens=tokens, ttft_s=0.001
        )
    )


class House:
    """A store, replicas and a gateway, started in one test and stopped after it."""

    def __init__(self, redis_url: str, model_dir: Path) -> None:
        self.redis_url = redis_url
        self.model_dir = model_dir
        self.exit = contextlib.AsyncExitStack()
        self.store = RegistryStore(redis_url)
        self.gateway: Gateway
        self.address: str
        self.stub: inference_pb2_grpc.InferenceStub
        self.channel: grpc.aio.Channel

    async def replica(self, id: str, **options) -> ScriptedReplica:
        replica = await ScriptedReplica(id, **options).start(self.store)
        self.exit.push_async_callback(replica.server.stop, 0.0)
        return replica

    async def open(self, **options) -> House:
        """Start the gateway, without waiting for it to be ready."""
        self.gateway = Gateway(
            GatewayOptions(
                redis_url=self.redis_url,
                model_dir=self.model_dir,
                listen="127.0.0.1:0",
                pool=options.pop("pool", FAST),
                **options,
            )
        )
        self.address = await self.gateway.start()
        self.exit.push_async_callback(self.gateway.stop, 0.0)
        self.channel = open_channel(self.address)
        self.exit.push_async_callback(self.channel.close)
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)
        return self

    async def ready(self, num_replicas: int) -> House:
        await eventually(lambda: self.gateway.ready and self.connected() == num_replicas)
        return self

    def connected(self) -> int:
        return len(self.gateway.view.eligible)

    async def publish(self, name: str, **options) -> str:
        """Register an adapter and return its version."""
        published = await self.store.publish_version(manifest(name, **options))
        return published.manifest.id

    async def ask(self, adapter: str = "", text: str = "hi", **options) -> list:
        """Events of one Generate call."""
        request = inference_pb2.GenerateRequest(adapter=adapter, text=text)
        return [event async for event in self.stub.Generate(request, **options)]

    async def close(self) -> None:
        await self.exit.aclose()
        await self.store.close()


async def eventually(true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.01)
