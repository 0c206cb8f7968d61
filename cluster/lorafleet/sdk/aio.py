"""The asyncio client: the methods of `Client`, awaited.

    async with AsyncClient() as client:
        async for event in client.generate("Once upon a time", adapter="pirate"):
            ...

Addresses are found as `endpoints` says. Errors are those of `lorafleet.core.errors`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc

from lorafleet.core.errors import Unavailable
from lorafleet.core.manifest import VersionManifest
from lorafleet.core.record import AdapterRecord
from lorafleet.sdk import admin, convert
from lorafleet.sdk.admin import Operation, T
from lorafleet.sdk.collecting import collect_async
from lorafleet.sdk.convert import Prompt, Turns, change_from_proto
from lorafleet.sdk.endpoints import Metadata, call_error, find_address, find_key
from lorafleet.sdk.uploading import TRIES, Push, Upload
from lorafleet.sdk.values import Change, Completion, Event, FleetStatus, Model, Sampling
from lorafleet.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    tenants_pb2_grpc,
)
from lorafleet.wire.auth import bearer
from lorafleet.wire.channel import open_channel
from lorafleet.wire.messages import adapter_from_proto, version_from_proto

_PAGE = 1000
_PAUSE_S = 0.5


class AsyncClient:
    """A client of one fleet, for one event loop.

    Parameters
    ----------
    gateway, admin : str, optional
        `host:port` of the two planes; looked up when first needed if not given.
    key : str, optional
        The API key; else LORAFLEET_KEY, else the operator's of a fleet on this machine.
    timeout_s : float, optional
        Deadline of every call; none if not given. When it passes, the call ends with Unavailable
        and the replica stops.
    """

    def __init__(
        self,
        *,
        gateway: str | None = None,
        admin: str | None = None,
        key: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._given = {"gateway": gateway, "admin": admin}
        self._key = key
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
        self,
        prompt: Prompt,
        *,
        adapter: str = "",
        sampling: Sampling | None = None,
        sticky_key: str = "",
    ) -> AsyncIterator[Event]:
        """Continue a text or token ids; as `Client.generate`.

        Closing the iterator, or cancelling the task that reads it, ends the request on the replica.
        """
        plane = self._plane("gateway")
        return plane.stream(
            plane.inference.Generate,
            convert.generate_request(prompt, adapter, sampling, sticky_key),
        )

    def chat_stream(
        self,
        messages: Turns,
        *,
        adapter: str = "",
        sampling: Sampling | None = None,
        sticky_key: str = "",
    ) -> AsyncIterator[Event]:
        """Answer a conversation of (role, content) turns; as `generate`."""
        plane = self._plane("gateway")
        return plane.stream(
            plane.inference.Chat, convert.chat_request(messages, adapter, sampling, sticky_key)
        )

    async def complete(
        self,
        prompt: Prompt,
        *,
        adapter: str = "",
        sampling: Sampling | None = None,
        sticky_key: str = "",
    ) -> Completion:
        """`generate`, whole."""
        return await collect_async(
            self.generate(prompt, adapter=adapter, sampling=sampling, sticky_key=sticky_key)
        )

    async def chat(
        self,
        messages: Turns,
        *,
        adapter: str = "",
        sampling: Sampling | None = None,
        sticky_key: str = "",
    ) -> Completion:
        """`chat_stream`, whole."""
        return await collect_async(
            self.chat_stream(messages, adapter=adapter, sampling=sampling, sticky_key=sticky_key)
        )

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
        labels: Mapping[str, str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[VersionManifest, bool]:
        """Upload a PEFT directory; as `Client.push_adapter`. Files are read in threads."""
        plane = self._plane("admin")
        options = {"if_new": if_new, "labels": labels or {}}
        push = await asyncio.to_thread(Push, directory, name, progress, **options)
        for tries_left in reversed(range(TRIES)):
            try:
                plan = await asyncio.to_thread(push.plan)
                held = (await plane.call(plane.registry.PlanPush, plan)).held_bytes if plan else ()
                with push.upload(held) as upload:
                    reply = await plane.call(plane.registry.PushAdapter, _in_a_thread(upload))
                break
            except Unavailable:
                if not tries_left or not push.begun:
                    raise
                await asyncio.sleep(_PAUSE_S)
        return version_from_proto(reply.version), reply.existed

    async def import_adapter(
        self,
        source: str,
        *,
        name: str,
        if_new: bool = False,
        labels: Mapping[str, str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[VersionManifest, bool]:
        """Let the registry fetch a PEFT directory from a URL; returns as `push_adapter`.

        InvalidInput when the registry's allow-list does not cover the URL.
        """
        plane = self._plane("admin")
        request = registry_pb2.ImportAdapterRequest(
            name=name, source=source, if_new=if_new, labels=labels or {}
        )
        last = registry_pb2.ImportAdapterResponse()
        async for last in plane.messages(plane.registry.ImportAdapter, request):
            if progress is not None:
                progress(last.fetched_bytes, last.total_bytes)
        return version_from_proto(last.version), last.existed

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation of `lorafleet.sdk.admin`; returns what it says."""
        plane = self._plane("admin")
        stub = plane.registry if hasattr(plane.registry, operation.method) else plane.tenants
        return operation.decode(
            await plane.call(getattr(stub, operation.method), operation.request)
        )

    async def get_adapter(self, name: str) -> AdapterRecord:
        """One adapter with its aliases and versions; NotFound names it."""
        return await self.run(admin.get_adapter(name))

    async def list_adapters(
        self,
        *,
        tenant: str = "",
        search: str = "",
        labels: Mapping[str, str] | None = None,
        deleted: bool = False,
    ) -> list[AdapterRecord]:
        """All adapters by name: of a tenant, with a text in their names, with labels.

        `deleted` lists those that can be restored instead.
        """
        plane = self._plane("admin")
        found: list[AdapterRecord] = []
        request = registry_pb2.ListAdaptersRequest(
            page_size=_PAGE, tenant=tenant, search=search, labels=labels or {}, deleted=deleted
        )
        while True:
            reply = await plane.call(plane.registry.ListAdapters, request)
            found += [adapter_from_proto(adapter) for adapter in reply.adapters]
            request.page_token = reply.next_page_token
            if not reply.next_page_token:
                return found

    async def watch(self, cursor: str = "") -> AsyncIterator[Change]:
        """Changes of adapters as they come, everything first; goes on over lost connections.

        Each has a cursor from which a later watch goes on.
        """
        plane = self._plane("admin")
        while True:
            request = registry_pb2.WatchRequest(cursor=cursor)
            try:
                async for message in plane.messages(plane.registry.Watch, request):
                    cursor = message.cursor or cursor
                    change = change_from_proto(message, cursor)
                    if change is not None:
                        yield change
            except Unavailable:
                await asyncio.sleep(_PAUSE_S)

    async def set_alias(self, name: str, alias: str, version: str) -> AdapterRecord:
        """Point an alias at a version of the same adapter."""
        return await self.run(admin.set_alias(name, alias, version))

    async def delete_adapter(self, name: str) -> None:
        """Remove an adapter; requests that run on it finish."""
        await self.run(admin.delete_adapter(name))

    def _metadata(self, plane: str) -> Metadata:
        return bearer(find_key(self._key, self._given[plane]))

    def _plane(self, name: str) -> _Plane:
        if name not in self._planes:
            address = find_address(name, self._given[name])
            self._planes[name] = _Plane(name, address, self._timeout_s, self._metadata(name))
        return self._planes[name]


class _Plane:
    """One of the two servers, and how its calls are made."""

    def __init__(
        self, name: str, address: str, timeout_s: float | None, metadata: Metadata
    ) -> None:
        self._name = name
        self._address = address
        self._timeout_s = timeout_s
        self._metadata = metadata
        self.channel: Any = open_channel(address)
        self.inference: Any = inference_pb2_grpc.InferenceStub(self.channel)  # type: ignore[no-untyped-call]
        self.fleet: Any = fleet_pb2_grpc.FleetStub(self.channel)  # type: ignore[no-untyped-call]
        self.registry: Any = registry_pb2_grpc.AdapterRegistryStub(self.channel)  # type: ignore[no-untyped-call]
        self.tenants: Any = tenants_pb2_grpc.TenantsStub(self.channel)  # type: ignore[no-untyped-call]

    async def call(self, method: Any, request: Any) -> Any:
        """Make a call and return its reply."""
        try:
            return await method(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise call_error(error, self._name, self._address) from None

    async def stream(self, method: Any, request: Any) -> AsyncIterator[Event]:
        """The events of a streamed answer; as `messages`."""
        async with contextlib.aclosing(self.messages(method, request)) as messages:
            async for message in messages:
                yield convert.event_from_proto(message)

    async def messages(self, method: Any, request: Any) -> AsyncGenerator[Any, None]:
        """Make a call at the first step, yield its replies, and end it when the caller stops."""
        call = method(request, timeout=self._timeout_s, metadata=self._metadata)
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise call_error(error, self._name, self._address) from None
        finally:
            call.cancel()


async def _in_a_thread(upload: Upload) -> AsyncIterator[registry_pb2.PushAdapterRequest]:
    while (message := await asyncio.to_thread(next, upload, None)) is not None:
        yield message
