"""`lorafleet.v1.Replica` over an engine: requests in, streams out, reports of what is resident."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from lorafleet.core.errors import InvalidInput, Unavailable
from lorafleet.engine import (
    Delta,
    Engine,
    Event,
    Finished,
    FinishReason,
    Prompt,
    ResidencySnapshot,
    SamplingParams,
    Started,
)
from lorafleet.v1 import inference_pb2, replica_pb2, replica_pb2_grpc

REPLICA = replica_pb2.DESCRIPTOR.services_by_name["Replica"].full_name

_REPORT_EVERY_S = 1.0
_REPORT_GAP_S = 0.02
"""Between two reports: changes within it are one report."""

_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


class ReplicaService(replica_pb2_grpc.ReplicaServicer):
    """Serves one engine. Errors are raised as ours; the server's interceptor sends them."""

    def __init__(self, engine: Engine, replica_id: str) -> None:
        self._engine = engine
        self._replica_id = replica_id
        self._epoch = 0
        self._sequence = 0
        self._draining = False
        self._closed = False
        self._streams = 0
        self._watchers: set[asyncio.Event] = set()

    def set_epoch(self, epoch: int) -> None:
        """Begin a new epoch of reports."""
        self._epoch = epoch
        self._wake()

    def drain(self) -> None:
        """Take no new requests, and say so to all watchers."""
        self._draining = True
        self._wake()

    async def finish(self, grace_s: float) -> None:
        """Wait up to `grace_s` for running streams, then end the watches."""
        deadline_s = asyncio.get_running_loop().time() + grace_s
        while self._streams and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_REPORT_GAP_S)
        self._closed = True
        self._wake()

    async def Generate(
        self, request: replica_pb2.ReplicaGenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Stream one answer; a client that goes away ends the request in the engine."""
        del context
        if self._draining:
            raise Unavailable(f"replica {self._replica_id} is draining", replica=self._replica_id)
        events = self._engine.generate(
            _prompt(request), _sampling(request.sampling), adapter=request.version or None
        )
        self._streams += 1
        try:
            async for event in events:
                yield self._response(request, event)
        finally:
            self._streams -= 1
            await events.aclose()  # type: ignore[attr-defined]

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text or a rendered conversation."""
        del context
        messages = [{"role": m.role, "content": m.content} for m in request.messages]
        prompt = Prompt(messages=messages) if messages else Prompt(text=request.text)
        return inference_pb2.TokenizeResponse(token_ids=self._engine.tokenize(prompt))

    async def WatchResidency(
        self, request: replica_pb2.WatchResidencyRequest, context: Any
    ) -> AsyncIterator[replica_pb2.ResidencyReport]:
        """Report at once, at every change, and at least every second."""
        del request, context
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        unsubscribe = self._engine.subscribe(lambda _: loop.call_soon_threadsafe(changed.set))
        self._watchers.add(changed)
        try:
            while not self._closed:
                changed.clear()
                if self._epoch:  # before the lease there is nothing to fence reports with
                    yield self._report(self._engine.residency())
                await asyncio.sleep(_REPORT_GAP_S)
                try:
                    async with asyncio.timeout(_REPORT_EVERY_S - _REPORT_GAP_S):
                        await changed.wait()
                except TimeoutError:
                    pass
        finally:
            self._watchers.discard(changed)
            unsubscribe()

    def _wake(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    def _report(self, snapshot: ResidencySnapshot) -> replica_pb2.ResidencyReport:
        self._sequence += 1
        return replica_pb2.ResidencyReport(
            replica=self._replica_id,
            epoch=self._epoch,
            sequence=self._sequence,
            resident=snapshot.resident,
            loading=snapshot.loading,
            free_pages=snapshot.free_pages,
            num_pages=snapshot.num_pages,
            running=snapshot.running,
            waiting=snapshot.waiting,
            draining=self._draining,
        )

    def _response(
        self, request: replica_pb2.ReplicaGenerateRequest, event: Event
    ) -> inference_pb2.GenerateResponse:
        match event:
            case Started():
                return inference_pb2.GenerateResponse(
                    started=inference_pb2.Started(
                        request_id=request.request_id,
                        version=request.version,
                        replica=self._replica_id,
                        resident=event.resident,
                        prompt_tokens=event.prompt_tokens,
                    )
                )
            case Delta():
                return inference_pb2.GenerateResponse(
                    delta=inference_pb2.Delta(token_ids=event.token_ids, text=event.text)
                )
            case Finished():
                return inference_pb2.GenerateResponse(
                    finished=inference_pb2.Finished(
                        reason=_REASONS[event.reason],
                        completion_tokens=event.completion_tokens,
                        queue_s=event.queue_s,
                        ttft_s=event.ttft_s,
                        decode_s=event.decode_s,
                    )
                )
            case _:
                raise event.error


def _prompt(request: replica_pb2.ReplicaGenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return Prompt(text=request.text)
        case "token_ids":
            return Prompt(token_ids=request.token_ids.ids)
        case "conversation":
            messages = request.conversation.messages
            return Prompt(messages=[{"role": m.role, "content": m.content} for m in messages])
        case _:
            raise InvalidInput("prompt: expected text, token_ids or conversation", field="prompt")


def _sampling(message: inference_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens or 128,
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
        ignore_eos=message.ignore_eos,
    )
