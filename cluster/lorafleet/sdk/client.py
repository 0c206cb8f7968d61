"""The blocking client.

    with Client() as client:
        client.push_adapter("adapters/pirate", name="pirate")
        print(client.chat([("user", "Hello")], adapter="pirate").text)

Addresses are found as `endpoints` says. Errors are those of `lorafleet.core.errors`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from lorafleet.core.manifest import VersionManifest
from lorafleet.core.record import AdapterRecord
from lorafleet.registry.push import push_messages
from lorafleet.sdk.endpoints import find_address
from lorafleet.sdk.values import (
    Completion,
    Delta,
    Event,
    Finished,
    FleetStatus,
    Model,
    ReplicaStatus,
    Sampling,
    Started,
)
from lorafleet.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)
from lorafleet.wire.channel import open_sync_channel
from lorafleet.wire.messages import adapter_from_proto, version_from_proto
from lorafleet.wire.status import from_rpc_error

_PAGE = 1000
_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}


class Client:
    """A client of one fleet; usable from several threads.

    Parameters
    ----------
    gateway, admin : str, optional
        `host:port` of the two planes; looked up when first needed if not given.
    timeout_s : float, optional
        Deadline of every call; none if not given.
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
        self._channels: dict[str, grpc.Channel] = {}

    def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Inference.

    def generate(
        self, prompt: str | Sequence[int], *, adapter: str = "", sampling: Sampling | None = None
    ) -> Iterator[Event]:
        """Continue a text or token ids; stream Started, Deltas, Finished.

        Closing the iterator ends the request on the replica.

        Raises
        ------
        NotFound
            The adapter is not registered.
        InvalidInput
            The request is malformed; the field is named.
        Unavailable, Exhausted
            Nobody can serve it now.
        """
        request = inference_pb2.GenerateRequest(adapter=adapter, sampling=_sampling(sampling))
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        return self._stream(self._inference().Generate, request)

    def chat_stream(
        self,
        messages: Sequence[tuple[str, str]],
        *,
        adapter: str = "",
        sampling: Sampling | None = None,
    ) -> Iterator[Event]:
        """Answer a conversation of (role, content) turns; as `generate`."""
        request = inference_pb2.ChatRequest(
            adapter=adapter,
            sampling=_sampling(sampling),
            messages=[inference_pb2.Message(role=role, content=text) for role, text in messages],
        )
        return self._stream(self._inference().Chat, request)

    def complete(
        self, prompt: str | Sequence[int], *, adapter: str = "", sampling: Sampling | None = None
    ) -> Completion:
        """`generate`, whole."""
        return collect(self.generate(prompt, adapter=adapter, sampling=sampling))

    def chat(
        self,
        messages: Sequence[tuple[str, str]],
        *,
        adapter: str = "",
        sampling: Sampling | None = None,
    ) -> Completion:
        """`chat_stream`, whole."""
        return collect(self.chat_stream(messages, adapter=adapter, sampling=sampling))

    def list_models(self) -> list[Model]:
        """The base model, then adapters by name."""
        reply = self._call(self._inference().ListModels, inference_pb2.ListModelsRequest())
        return [Model(name=m.name, base=m.base, version=m.version) for m in reply.models]

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        request = inference_pb2.TokenizeRequest(text=text)
        return list(self._call(self._inference().Tokenize, request).token_ids)

    def status(self) -> FleetStatus:
        """The fleet as the gateway sees it."""
        stub: Any = fleet_pb2_grpc.FleetStub(self._channel("gateway"))  # type: ignore[no-untyped-call]
        reply = self._call(stub.GetStatus, fleet_pb2.GetStatusRequest())
        return FleetStatus(
            base_model=reply.base_model,
            base_digest=reply.base_digest,
            num_adapters=reply.num_adapters,
            registry_connected=reply.registry_connected,
            replicas=tuple(_replica(replica) for replica in reply.replicas),
        )

    # Adapters.

    def push_adapter(
        self,
        directory: Path | str,
        *,
        name: str,
        if_new: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[VersionManifest, bool]:
        """Upload a PEFT directory; return its version and whether it had existed before.

        Parameters
        ----------
        directory : Path
            With adapter_config.json and safetensors.
        name : str
            `name` or `tenant/name`.
        if_new : bool
            Fail with AlreadyExists when the adapter has another version.
        progress : callable, optional
            Receives bytes sent and bytes in all.

        Raises
        ------
        InvalidAdapter, Unsupported
            The adapter is broken, or asks for what is not honoured; nothing was registered.
        """
        messages = push_messages(Path(directory), name, if_new=if_new, progress=progress)
        reply = self._call(self._registry().PushAdapter, messages)
        return version_from_proto(reply.version), reply.existed

    def get_adapter(self, name: str) -> AdapterRecord:
        """One adapter with its aliases and versions; NotFound names it."""
        request = registry_pb2.GetAdapterRequest(name=name)
        return adapter_from_proto(self._call(self._registry().GetAdapter, request).adapter)

    def list_adapters(self) -> list[AdapterRecord]:
        """All adapters, by name."""
        found: list[AdapterRecord] = []
        token = ""
        while True:
            request = registry_pb2.ListAdaptersRequest(page_size=_PAGE, page_token=token)
            reply = self._call(self._registry().ListAdapters, request)
            found += [adapter_from_proto(adapter) for adapter in reply.adapters]
            token = reply.next_page_token
            if not token:
                return found

    def set_alias(self, name: str, alias: str, version: str) -> AdapterRecord:
        """Point an alias at a version of the same adapter."""
        request = registry_pb2.SetAliasRequest(name=name, alias=alias, version=version)
        return adapter_from_proto(self._call(self._registry().SetAlias, request).adapter)

    def delete_adapter(self, name: str) -> None:
        """Remove an adapter; requests that run on it finish."""
        self._call(self._registry().DeleteAdapter, registry_pb2.DeleteAdapterRequest(name=name))

    # Calls.

    def _channel(self, plane: str) -> grpc.Channel:
        if plane not in self._channels:
            self._channels[plane] = open_sync_channel(find_address(plane, self._given[plane]))
        return self._channels[plane]

    def _inference(self) -> Any:
        return inference_pb2_grpc.InferenceStub(self._channel("gateway"))  # type: ignore[no-untyped-call]

    def _registry(self) -> Any:
        return registry_pb2_grpc.AdapterRegistryStub(self._channel("admin"))  # type: ignore[no-untyped-call]

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def _stream(self, method: Any, request: Any) -> Iterator[Event]:
        call = method(request, timeout=self._timeout_s)
        try:
            for message in call:
                yield _event(message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()


def collect(events: Iterator[Event]) -> Completion:
    """Read a stream to its end, and time it."""
    began_s = time.monotonic()
    first_s = last_s = began_s
    text = ""
    token_ids: list[int] = []
    started: Started | None = None
    finished: Finished | None = None
    for event in events:
        match event:
            case Started():
                started = event
            case Delta():
                last_s = time.monotonic()
                if not token_ids:
                    first_s = last_s
                text += event.text
                token_ids += event.token_ids
            case Finished():
                finished = event
    assert started is not None, "a stream begins with Started"
    assert finished is not None, "a stream ends with Finished or an error"
    later, decode_s = len(token_ids) - 1, last_s - first_s
    return Completion(
        text=text,
        token_ids=tuple(token_ids),
        finish_reason=finished.reason,
        version=started.version,
        replica=started.replica,
        resident=started.resident,
        ttft_s=first_s - began_s,
        tokens_per_s=later / decode_s if later > 0 and decode_s > 0 else 0.0,
    )


def _event(message: Any) -> Event:
    match message.WhichOneof("event"):
        case "started":
            event = message.started
            return Started(
                request_id=event.request_id,
                version=event.version,
                replica=event.replica,
                resident=event.resident,
                prompt_tokens=event.prompt_tokens,
            )
        case "delta":
            return Delta(token_ids=tuple(message.delta.token_ids), text=message.delta.text)
        case _:
            event = message.finished
            return Finished(
                reason=_REASONS.get(event.reason, "unknown"),
                completion_tokens=event.completion_tokens,
                queue_s=event.queue_s,
                ttft_s=event.ttft_s,
                decode_s=event.decode_s,
            )


def _sampling(sampling: Sampling | None) -> inference_pb2.SamplingParams:
    chosen = sampling or Sampling()
    return inference_pb2.SamplingParams(
        max_tokens=chosen.max_tokens,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        seed=chosen.seed,
        stop=chosen.stop,
        ignore_eos=chosen.ignore_eos,
    )


def _replica(message: fleet_pb2.ReplicaStatus) -> ReplicaStatus:
    report = message.report
    return ReplicaStatus(
        replica=report.replica,
        address=message.address,
        connected=message.connected,
        epoch=report.epoch,
        resident=tuple(report.resident),
        loading=tuple(report.loading),
        free_pages=report.free_pages,
        num_pages=report.num_pages,
        running=report.running,
        waiting=report.waiting,
        draining=report.draining,
    )
