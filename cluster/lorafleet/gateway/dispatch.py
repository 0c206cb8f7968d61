"""One request's way: resolve, choose, stream, and try elsewhere while nothing was said yet.

It owns the retry rule: a failure that another replica may not share is tried there, up to three
tries, but only before the first token has reached the client. Whoever stops reading (a cancelled
call, a deadline) stops the replica. It knows no servicer and checks no field of the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import grpc

from lorafleet.core.errors import Internal, LorafleetError, Retry, Unavailable
from lorafleet.core.log import get_logger
from lorafleet.core.manifest import VersionManifest
from lorafleet.gateway.limits import Meter
from lorafleet.gateway.replicas import ReplicaPool
from lorafleet.gateway.resolve import Asked
from lorafleet.routing import Decision, LoadBound, choose
from lorafleet.v1 import inference_pb2, replica_pb2
from lorafleet.wire.status import from_rpc_error

MAX_TRIES = 3

TimeLeft = Callable[[], float | None]
"""Seconds until the client's deadline; None without one."""

_log = get_logger("lorafleet.access")


class AdapterResolver(Protocol):
    """What dispatching needs to know of the registry."""

    async def resolve(self, asked: Asked) -> VersionManifest | None:
        """Return a version, or None for the base model."""


@dataclass(slots=True, kw_only=True)
class _Trace:
    """What the access log says of a request."""

    request_id: str
    asked: Asked
    began_s: float = field(default_factory=time.monotonic)
    version: str | None = None
    decision: Decision | None = None
    resident: bool | None = None
    tries: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    first_token_s: float | None = None

    def write(self, code: str, error: str | None) -> None:
        """Write the request's line."""
        facts = {
            "request_id": self.request_id,
            "tenant": self.asked.caller.tenant,
            "adapter": self.asked.adapter,
            "version": self.version,
            "replica": self.decision.replica if self.decision else None,
            "reason": self.decision.reason.value if self.decision else None,
            "resident": self.resident,
            "tries": self.tries,
            "tokens": self.tokens,
            "ttft_s": _since(self.began_s, self.first_token_s),
            "duration_s": _since(self.began_s, time.monotonic()),
            "code": code,
        }
        _log.info("request", **facts, **({"error": error} if error else {}))


def _since(began_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else round(at_s - began_s, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatcher:
    """Sends requests to replicas.

    Parameters
    ----------
    resolver : AdapterResolver
    pool : ReplicaPool
    meter : Meter
        Counts what tenants use.
    rng : Random
        Breaks the policy's ties.
    bound : LoadBound
        The policy's load bound.
    """

    resolver: AdapterResolver
    pool: ReplicaPool
    meter: Meter
    rng: Random = field(default_factory=Random)
    bound: LoadBound = field(default_factory=LoadBound)

    async def generate(
        self, asked: Asked, request: replica_pb2.ReplicaGenerateRequest, time_left: TimeLeft
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Stream an answer: one Started, any number of Deltas, one Finished.

        Parameters
        ----------
        asked : Asked
            Who asks for which adapter.
        request : ReplicaGenerateRequest
            Without its version, which is filled in.
        time_left : callable
            The client's deadline; passed on to the replica.

        Raises
        ------
        LorafleetError
            What resolving raised, or the last replica's error; Exhausted when the tenant has used
            up its minute.

        Notes
        -----
        Started is held back until the first token, so that a client never hears of a replica that
        then did not serve it. Leaving the iteration, however, cancels the replica's work.
        """
        trace = _Trace(request_id=request.request_id, asked=asked)
        code, told = "OK", None
        try:
            manifest = await self.resolver.resolve(asked)
            self.meter.admit(asked.caller.tenant)
            if manifest is not None:
                request.version = trace.version = manifest.id
            async with aclosing(self._tries(request, time_left, trace)) as responses:
                async for response in responses:
                    yield response
        except LorafleetError as error:
            code, told = error.code, error.message
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except BaseException:
            code = "INTERNAL"
            raise
        finally:
            self.meter.spend(asked.caller.tenant, trace.prompt_tokens + trace.tokens)
            trace.write(code, told)

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, time_left: TimeLeft
    ) -> inference_pb2.TokenizeResponse:
        """Ask any replica for token ids; errors as in `generate`."""
        failed: set[str] = set()
        while True:
            decision = choose(self.pool.view, None, rng=self.rng, exclude=failed)
            try:
                with self.pool.open(decision.replica) as stub:
                    call = stub.Tokenize(request, timeout=time_left())
                    response: inference_pb2.TokenizeResponse = await _unary(call)
                    return response
            except LorafleetError as error:
                failed.add(decision.replica)
                if not self._may_retry(error, failed, time_left):
                    raise

    async def _tries(
        self, request: replica_pb2.ReplicaGenerateRequest, time_left: TimeLeft, trace: _Trace
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Try replicas until one has said something."""
        failed: set[str] = set()
        while True:
            decision = choose(
                self.pool.view,
                request.version or None,
                rng=self.rng,
                exclude=failed,
                bound=self.bound,
            )
            trace.decision = decision
            trace.tries += 1
            try:
                with self.pool.open(decision.replica) as stub:
                    async with aclosing(_answer(stub, request, time_left(), trace)) as answer:
                        async for response in answer:
                            yield response
                return
            except LorafleetError as error:
                failed.add(decision.replica)
                if trace.tokens:
                    raise _cut_short(error, decision.replica, trace.tokens) from error
                if not self._may_retry(error, failed, time_left):
                    raise

    def _may_retry(self, error: LorafleetError, failed: set[str], time_left: TimeLeft) -> bool:
        left_s = time_left()
        return (
            error.retry is Retry.OTHER_REPLICA
            and error.facts.get("grpc_code") != "DEADLINE_EXCEEDED"
            and (left_s is None or left_s > 0)
            and len(failed) < MAX_TRIES
            and any(id not in failed for id in self.pool.view.eligible)
        )


async def _answer(
    stub: Any,
    request: replica_pb2.ReplicaGenerateRequest,
    timeout_s: float | None,
    trace: _Trace,
) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
    """Stream one replica's answer, Started just before what follows it."""
    call = stub.Generate(request, timeout=timeout_s)
    started: inference_pb2.GenerateResponse | None = None
    finished = False
    try:
        async for response in _responses(call):
            match response.WhichOneof("event"):
                case "started":
                    started = response
                    trace.resident = response.started.resident
                    trace.prompt_tokens = response.started.prompt_tokens
                    continue
                case "delta":
                    trace.tokens += len(response.delta.token_ids)
                    trace.first_token_s = trace.first_token_s or time.monotonic()
                case "finished":
                    finished = True
            if started is not None:
                yield started
                started = None
            yield response
    finally:
        call.cancel()
    if not finished:
        raise Internal("the replica ended its answer without a Finished event")


async def _responses(call: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
    try:
        async for response in call:
            yield response
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


async def _unary(call: Any) -> Any:
    try:
        return await call
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()


def _cut_short(error: LorafleetError, replica: str, tokens: int) -> LorafleetError:
    """Say how far an answer came; a retry is the client's to decide, as it would start over."""
    message = f"replica {replica!r} failed after {tokens} tokens: {error.message}"
    kind = type(error) if error.retry is not Retry.OTHER_REPLICA else Unavailable
    return kind(message, **{**error.facts, "replica": replica, "tokens": tokens})
