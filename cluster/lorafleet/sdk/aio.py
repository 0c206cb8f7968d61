"""The asyncio client: the methods of `Client`, awaited.

    async with AsyncClient() as client:
        async for event in client.generate("Once upon a time", adapter="pirate"):
            ...

Addresses are found as `endpoints` says. Errors are those of `lorafleet.core.errors`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from lorafleet.core.manifest import VersionManifest
from lorafleet.core.record import AdapterRecord
from lorafleet.sdk import convert
from lorafleet.sdk.collecting import collect_async
from lorafleet.sdk.convert import Prompt, Turns
from lorafleet.sdk.endpoints import call_error, find_address
from lorafleet.sdk.uploading import Upload
from lorafleet.sdk.values import Completion, Event, FleetStatus, Model, Sampling
from lorafleet.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)
from lorafleet.wire.channel import open_channel
from lorafleet.wire.messages import adapter_from_proto, version_from_proto

_PAGE = 1000


class AsyncClient:
    """A client of one fleet, for one event loop.

    Parameters
    ----------
    gateway, admin : str, optional
        `host:port` of the two planes; looked up when first needed if not given.
    timeout_s : float, optional
        Deadline of every call; none if not given. When it passes, the call ends with Unavailable
        and the replica stops.
    """

    def __init__(
        self,
        *,
        gateway: str | None = None,
        admin: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._given = {"gateway": gateway, "admin": admin}
        self._timeout_s = timeout_s
        self._planes: dict[str, _Plane] = {}

    async def close(self) -> None:
        """Close the connections; a later call opens them again."""
        planes, self._planes = self._planes, {}
        for plane in planes.values():
            await plane.channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # Inference.

    def generate(
        self, prompt: Prompt, *, adapter: str = "", sampling: Sampling | None = None
    ) -> AsyncIterator[Event]:
        """Continue a text or token ids; as `Client.generate`.

        Closing the iterator, or cancelling the task that reads it, ends the request on the replica.
        """
        plane = self._plane("gateway")
        return plane.stream(
            plane.inference.Generate, convert.generate_request(prompt, adapter, sampling)
        )

    def chat_stream(
        self, messages: Turns, *, adapter: str = "", sampling: Sampling | None = None
    ) -> AsyncIterator[Event]:
        """Answer a conversation of (role, content) turns; as `generate`."""
        plane = self._plane("gateway")
        return plane.stream(plane.inference.Chat, convert.chat_request(messages, adapter, sampling))

    async def complete(
        self, prompt: Prompt, *, adapter: str = "", sampling: Sampling | None = None
    ) -> Completion:
        """`generate`, whole."""
        return await collect_async(self.generate(prompt, adapter=adapter, sampling=sampling))

    async def chat(
        self, messages: Turns, *, adapter: str = "", sampling: Sampling | None = None
    ) -> Completion:
        """`chat_stream`, whole."""
        return await collect_async(self.chat_stream(messages, adapter=adapter, sampling=sampling))

    async def list_models(self) -> list[Model]:
        """The base model, then adapters by name."""
        plane = self._plane("gateway")
        reply = await plane.call(plane.inference.ListModels, inference_pb2.ListModelsRequest())
        return convert.models_from_proto(reply)

    async def tokenize(self, prompt: str | Turns) -> list[int]:
        """Token ids of a text, or of a conversation as the chat template renders it."""
        plane = self._plane("gateway")
        reply = await plane.call(plane.inference.Tokenize, convert.tokenize_request(prompt))
        return list(reply.token_ids)

    async def status(self) -> FleetStatus:
        """The fleet as the gateway sees it."""
        plane = self._plane("gateway")
        reply = await plane.call(plane.fleet.GetStatus, fleet_pb2.GetStatusRequest())
        return convert.status_from_proto(reply)

    # Adapters.

    async def push_adapter(
        self,
        directory: Path | str,
        *,
        name: str,
        if_new: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[VersionManifest, bool]:
        """Upload a PEFT directory; as `Client.push_adapter`. Files are read in a thread."""
        plane = self._plane("admin")
        upload = await asyncio.to_thread(
            Upload.of, directory, name, if_new=if_new, progress=progress
        )
        with upload:
            reply = await plane.call(plane.registry.PushAdapter, _in_a_thread(upload))
        return version_from_proto(reply.version), reply.existed

    async def get_adapter(self, name: str) -> AdapterRecord:
        """One adapter with its aliases and versions; NotFound names it."""
        plane = self._plane("admin")
        request = registry_pb2.GetAdapterRequest(name=name)
        return adapter_from_proto((await plane.call(plane.registry.GetAdapter, request)).adapter)

    async def list_adapters(self) -> list[AdapterRecord]:
        """All adapters, by name."""
        plane = self._plane("admin")
        found: list[AdapterRecord] = []
        token = ""
        while True:
            request = registry_pb2.ListAdaptersRequest(page_size=_PAGE, page_token=token)
            reply = await plane.call(plane.registry.ListAdapters, request)
            found += [adapter_from_proto(adapter) for adapter in reply.adapters]
            token = reply.next_page_token
            if not token:
                return found

    async def set_alias(self, name: str, alias: str, version: str) -> AdapterRecord:
        """Point an alias at a version of the same adapter."""
        plane = self._plane("admin")
        request = registry_pb2.SetAliasRequest(name=name, alias=alias, version=version)
        return adapter_from_proto((await plane.call(plane.registry.SetAlias, request)).adapter)

    async def delete_adapter(self, name: str) -> None:
        """Remove an adapter; requests that run on it finish."""
        plane = self._plane("admin")
        request = registry_pb2.DeleteAdapterRequest(name=name)
        await plane.call(plane.registry.DeleteAdapter, request)

    def _plane(self, name: str) -> _Plane:
        if name not in self._planes:
            address = find_address(name, self._given[name])
            self._planes[name] = _Plane(name, address, self._timeout_s)
        return self._planes[name]


class _Plane:
    """One of the two servers, and how its calls are made."""

    def __init__(self, name: str, address: str, timeout_s: float | None) -> None:
        self._name = name
        self._address = address
        self._timeout_s = timeout_s
        self.channel: Any = open_channel(address)
        self.inference: Any = inference_pb2_grpc.InferenceStub(self.channel)  # type: ignore[no-untyped-call]
        self.fleet: Any = fleet_pb2_grpc.FleetStub(self.channel)  # type: ignore[no-untyped-call]
        self.registry: Any = registry_pb2_grpc.AdapterRegistryStub(self.channel)  # type: ignore[no-untyped-call]

    async def call(self, method: Any, request: Any) -> Any:
        """Make a call and return its reply."""
        try:
            return await method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise call_error(error, self._name, self._address) from None

    async def stream(self, method: Any, request: Any) -> AsyncIterator[Event]:
        """Make a call at the first step, yield its events, and end it when the caller stops."""
        call = method(request, timeout=self._timeout_s)
        try:
            async for message in call:
                yield convert.event_from_proto(message)
        except grpc.RpcError as error:
            raise call_error(error, self._name, self._address) from None
        finally:
            call.cancel()


async def _in_a_thread(upload: Upload) -> AsyncIterator[registry_pb2.PushAdapterRequest]:
    while (message := await asyncio.to_thread(next, upload, None)) is not None:
        yield message
