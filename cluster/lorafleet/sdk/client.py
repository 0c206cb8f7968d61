"""The blocking client.

    with Client() as client:
        client.push_adapter("adapters/pirate", name="pirate")
        print(client.chat([("user", "Hello")], adapter="pirate").text)

Addresses are found as `endpoints` says. Errors are those of `lorafleet.core.errors`. `AsyncClient`
has the same methods.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from lorafleet.core.errors import Unavailable
from lorafleet.core.manifest import VersionManifest
from lorafleet.core.record import AdapterRecord
from lorafleet.sdk import admin, convert
from lorafleet.sdk.admin import Operation, T
from lorafleet.sdk.collecting import collect
from lorafleet.sdk.convert import Prompt, Turns, change_from_proto
from lorafleet.sdk.endpoints import Metadata, call_error, find_address, find_key
from lorafleet.sdk.uploading import TRIES, Push
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
from lorafleet.wire.channel import open_sync_channel
from lorafleet.wire.messages import adapter_from_proto, version_from_proto

__all__ = ["Client", "collect"]

_PAGE = 1000
_PAUSE_S = 0.5


class Client:
    """A client of one fleet; usable from several threads.

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
        self._lock = threading.Lock()
        self._planes: dict[str, _Plane] = {}

    def close(self) -> None:
        """Close the connections; a later call opens them again."""
        with self._lock:
            planes, self._planes = self._planes, {}
        for plane in planes.values():
            plane.channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Inference.

    def generate(
        self,
        prompt: Prompt,
        *,
        adapter: str = "",
        sampling: Sampling | None = None,
        sticky_key: str = "",
    ) -> Iterator[Event]:
        """Continue a text or token ids; stream Started, Deltas, Finished.

        Closing the iterator ends the request on the replica.

        Parameters
        ----------
        prompt : str or sequence of int
            A text, or token ids of the base model's vocabulary.
        adapter : str
            `name`, `tenant/name`, with an optional `@alias` or `@sha256:...`; empty and `base` are
            the base model.
        sampling : Sampling, optional
            Greedy decoding of up to 128 tokens if not given.

        Raises
        ------
        NotFound
            The adapter is not registered.
        InvalidInput
            The request is malformed; the field is named.
        Unavailable, Exhausted
            Nobody can serve it now.
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
    ) -> Iterator[Event]:
        """Answer a conversation of (role, content) turns; as `generate`."""
        plane = self._plane("gateway")
        return plane.stream(
            plane.inference.Chat, convert.chat_request(messages, adapter, sampling, sticky_key)
        )

    def complete(
        self,
        prompt: Prompt,
        *,
        adapter: str = "",
        sampling: Sampling | None = None,
        sticky_key: str = "",
    ) -> Completion:
        """`generate`, whole."""
        return collect(
            self.generate(prompt, adapter=adapter, sampling=sampling, sticky_key=sticky_key)
        )

    def chat(
        self,
        messages: Turns,
        *,
        adapter: str = "",
        sampling: Sampling | None = None,
        sticky_key: str = "",
    ) -> Completion:
        """`chat_stream`, whole."""
        return collect(
            self.chat_stream(messages, adapter=adapter, sampling=sampling, sticky_key=sticky_key)
        )

    def list_models(self) -> list[Model]:
        """The base model, then adapters by name."""
        plane = self._plane("gateway")
        reply = plane.call(plane.inference.ListModels, inference_pb2.ListModelsRequest())
        return convert.models_from_proto(reply)

    def tokenize(self, prompt: str | Turns) -> list[int]:
        """Token ids of a text, or of a conversation as the chat template renders it."""
        plane = self._plane("gateway")
        reply = plane.call(plane.inference.Tokenize, convert.tokenize_request(prompt))
        return list(reply.token_ids)

    def status(self) -> FleetStatus:
        """The fleet as the gateway sees it."""
        plane = self._plane("gateway")
        return convert.status_from_proto(
            plane.call(plane.fleet.GetStatus, fleet_pb2.GetStatusRequest())
        )

    # Adapters.

    def push_adapter(
        self,
        directory: Path | str,
        *,
        name: str,
        if_new: bool = False,
        labels: Mapping[str, str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[VersionManifest, bool]:
        """Upload a PEFT directory; return its version and whether it had existed before.

        A push that breaks off is taken up again. Of one of 256 MiB or more, what the registry holds
        already is not sent.

        Parameters
        ----------
        directory : Path
            With adapter_config.json and safetensors.
        name : str
            `name` or `tenant/name`.
        if_new : bool
            Fail with AlreadyExists when the adapter has another version.
        labels : mapping, optional
            Set on the adapter beside those it has.
        progress : callable, optional
            Receives bytes sent and bytes in all; called from another thread.

        Raises
        ------
        InvalidAdapter, Unsupported
            The adapter is broken, or asks for what is not honoured; nothing was registered.
        """
        plane = self._plane("admin")
        push = Push(directory, name, progress, if_new=if_new, labels=labels or {})
        for tries_left in reversed(range(TRIES)):
            try:
                plan = push.plan()
                held = plane.call(plane.registry.PlanPush, plan).held_bytes if plan else ()
                with push.upload(held) as upload:
                    reply = plane.call(plane.registry.PushAdapter, upload)
                break
            except Unavailable:
                if not tries_left or not push.begun:
                    raise
                time.sleep(_PAUSE_S)
        return version_from_proto(reply.version), reply.existed

    def import_adapter(
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
        for last in plane.messages(plane.registry.ImportAdapter, request):
            if progress is not None:
                progress(last.fetched_bytes, last.total_bytes)
        return version_from_proto(last.version), last.existed

    def run(self, operation: Operation[T]) -> T:
        """Run an operation of `lorafleet.sdk.admin`; returns what it says."""
        plane = self._plane("admin")
        stub = plane.registry if hasattr(plane.registry, operation.method) else plane.tenants
        reply = plane.call(getattr(stub, operation.method), operation.request)
        return operation.decode(reply)

    def get_adapter(self, name: str) -> AdapterRecord:
        """One adapter with its aliases and versions; NotFound names it."""
        return self.run(admin.get_adapter(name))

    def list_adapters(
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
            reply = plane.call(plane.registry.ListAdapters, request)
            found += [adapter_from_proto(adapter) for adapter in reply.adapters]
            request.page_token = reply.next_page_token
            if not reply.next_page_token:
                return found

    def watch(self, cursor: str = "") -> Iterator[Change]:
        """Changes of adapters as they come, everything first; goes on over lost connections.

        Each has a cursor from which a later watch goes on.
        """
        plane = self._plane("admin")
        while True:
            request = registry_pb2.WatchRequest(cursor=cursor)
            try:
                for message in plane.messages(plane.registry.Watch, request):
                    cursor = message.cursor or cursor
                    change = change_from_proto(message, cursor)
                    if change is not None:
                        yield change
            except Unavailable:
                time.sleep(_PAUSE_S)

    def set_alias(self, name: str, alias: str, version: str) -> AdapterRecord:
        """Point an alias at a version of the same adapter."""
        return self.run(admin.set_alias(name, alias, version))

    def delete_adapter(self, name: str) -> None:
        """Remove an adapter; requests that run on it finish."""
        self.run(admin.delete_adapter(name))

    def _metadata(self, plane: str) -> Metadata:
        return bearer(find_key(self._key, self._given[plane]))

    def _plane(self, name: str) -> _Plane:
        with self._lock:
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
        self.channel = open_sync_channel(address)
        self.inference: Any = inference_pb2_grpc.InferenceStub(self.channel)  # type: ignore[no-untyped-call]
        self.fleet: Any = fleet_pb2_grpc.FleetStub(self.channel)  # type: ignore[no-untyped-call]
        self.registry: Any = registry_pb2_grpc.AdapterRegistryStub(self.channel)  # type: ignore[no-untyped-call]
        self.tenants: Any = tenants_pb2_grpc.TenantsStub(self.channel)  # type: ignore[no-untyped-call]

    def call(self, method: Any, request: Any) -> Any:
        """Make a call and return its reply."""
        try:
            return method(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise call_error(error, self._name, self._address) from None

    def stream(self, method: Any, request: Any) -> Iterator[Event]:
        """The events of a streamed answer; as `messages`."""
        yield from map(convert.event_from_proto, self.messages(method, request))

    def messages(self, method: Any, request: Any) -> Iterator[Any]:
        """Make a call at the first step, yield its replies, and end it when the caller stops."""
        call = method(request, timeout=self._timeout_s, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise call_error(error, self._name, self._address) from None
        finally:
            call.cancel()
