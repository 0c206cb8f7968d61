"""The public servicers: Inference and Fleet.

They own the shape of requests and answers, nothing more: a request is checked, handed on, and its
events are given back as they come. They know no replica.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from lorafleet.core.errors import Unavailable
from lorafleet.core.model import BaseModel
from lorafleet.core.names import BASE, tenant_of
from lorafleet.gateway import convert, validate
from lorafleet.gateway.dispatch import Dispatcher
from lorafleet.gateway.door import Door
from lorafleet.gateway.replicas import ReplicaPool
from lorafleet.gateway.resolve import Asked
from lorafleet.registry.catalogue import Catalogue
from lorafleet.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    replica_pb2,
)
from lorafleet.wire.auth import caller

INFERENCE = "lorafleet.v1.Inference"
FLEET = "lorafleet.v1.Fleet"

REQUEST_ID_KEY = "x-request-id"
"""Metadata by which a client names its request; otherwise the gateway does."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves `lorafleet.v1.Inference`."""

    def __init__(
        self, dispatcher: Dispatcher, catalogue: Catalogue, base: BaseModel, door: Door
    ) -> None:
        self._door = door
        self._dispatcher = dispatcher
        self._catalogue = catalogue
        self._base = base

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Continue a prompt."""
        validate.check_generate(request, self._base)
        inner = convert.from_generate(request)
        async with aclosing(self._answer(request, inner, context)) as responses:
            async for response in responses:
                yield response

    async def Chat(
        self, request: inference_pb2.ChatRequest, context: _Context
    ) -> AsyncGenerator[inference_pb2.ChatResponse, None]:
        """Answer a conversation."""
        validate.check_chat(request, self._base)
        inner = convert.from_chat(request)
        async with aclosing(self._answer(request, inner, context)) as responses:
            async for response in responses:
                yield convert.to_chat(response)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: _Context
    ) -> inference_pb2.ListModelsResponse:
        """List the base model and every adapter registered for it that the caller sees."""
        if not self._catalogue.synced:
            raise Unavailable("the registry has not been read yet; it is being tried")
        models = [inference_pb2.Model(name=BASE, base=True)]
        who = caller()
        for name in self._catalogue.names():
            if not who.sees(tenant_of(name)):
                continue
            latest = self._catalogue.adapter(name).latest
            if latest.base_digest == self._base.digest:
                models.append(inference_pb2.Model(name=name, version=latest.id))
        return inference_pb2.ListModelsResponse(models=models)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: _Context
    ) -> inference_pb2.TokenizeResponse:
        """Turn a text or a conversation into token ids."""
        validate.check_tokenize(request)
        with self._door.passing():
            return await self._dispatcher.tokenize(request, context.time_remaining)

    async def _answer(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest,
        inner: replica_pb2.ReplicaGenerateRequest,
        context: _Context,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        inner.request_id = _request_id(context)
        asked = Asked(adapter=request.adapter, sticky_key=request.sticky_key, caller=caller())
        with self._door.passing():
            answer = self._dispatcher.generate(asked, inner, context.time_remaining)
            async with aclosing(answer) as responses:
                async for response in responses:
                    yield response


class FleetService(fleet_pb2_grpc.FleetServicer):
    """Serves `lorafleet.v1.Fleet`."""

    def __init__(self, pool: ReplicaPool, catalogue: Catalogue, base: BaseModel) -> None:
        self._pool = pool
        self._catalogue = catalogue
        self._base = base

    async def GetStatus(
        self, request: fleet_pb2.GetStatusRequest, context: _Context
    ) -> fleet_pb2.GetStatusResponse:
        """Return the fleet as this gateway sees it."""
        replicas = sorted(self._pool.view.replicas.items())
        return fleet_pb2.GetStatusResponse(
            base_model=self._base.name,
            base_digest=self._base.digest,
            replicas=[convert.state_to_proto(state) for _, state in replicas],
            num_adapters=len(self._catalogue),
            registry_connected=self._catalogue.connected,
        )


def _request_id(context: _Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex
