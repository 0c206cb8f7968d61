"""The client's values as messages, and messages as the client's values.

It owns the mapping between `sdk.values` and `lorafleet.v1`, and refuses what no message can carry
(a negative count, a prompt of floats). Ranges are for the gateway to check, which knows the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lorafleet.core.errors import InvalidInput
from lorafleet.sdk.values import (
    Change,
    Delta,
    Event,
    Finished,
    FleetStatus,
    Model,
    ReplicaStatus,
    Sampling,
    Started,
)
from lorafleet.v1 import fleet_pb2, inference_pb2
from lorafleet.wire.messages import adapter_from_proto

Prompt = str | Sequence[int]
"""A text, or token ids."""

Turns = Sequence[tuple[str, str]]
"""(role, content) of each turn, oldest first."""

_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}


def generate_request(
    prompt: Prompt, adapter: str, sampling: Sampling | None, sticky_key: str = ""
) -> inference_pb2.GenerateRequest:
    """Make a Generate request.

    Raises
    ------
    InvalidInput
        The prompt or a sampling field is of a wrong type or sign.
    """
    request = inference_pb2.GenerateRequest(
        adapter=adapter, sampling=_sampling(sampling), sticky_key=sticky_key
    )
    if isinstance(prompt, str):
        request.text = prompt
        return request
    try:
        request.token_ids.ids.extend(prompt)
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"prompt: expected a text or token ids of 0 and more ({error})", field="prompt"
        ) from error
    request.token_ids.SetInParent()
    return request


def chat_request(
    turns: Turns, adapter: str, sampling: Sampling | None, sticky_key: str = ""
) -> inference_pb2.ChatRequest:
    """Make a Chat request; errors as in `generate_request`."""
    return inference_pb2.ChatRequest(
        adapter=adapter,
        sampling=_sampling(sampling),
        messages=_messages(turns),
        sticky_key=sticky_key,
    )


def tokenize_request(prompt: str | Turns) -> inference_pb2.TokenizeRequest:
    """Make a Tokenize request of a text or of a conversation."""
    if isinstance(prompt, str):
        return inference_pb2.TokenizeRequest(text=prompt)
    return inference_pb2.TokenizeRequest(messages=_messages(prompt))


def change_from_proto(message: Any, cursor: str) -> Change | None:
    """Decode an event of a Watch stream; None for a sign of life."""
    match message.WhichOneof("event"):
        case "changed":
            return Change(adapter=adapter_from_proto(message.changed), cursor=cursor)
        case "deleted":
            return Change(deleted=message.deleted, cursor=cursor)
        case "restart":
            return Change(restart=True, cursor=cursor)
        case _:
            return None


def event_from_proto(message: Any) -> Event:
    """Decode an event of a Generate or Chat stream."""
    match message.WhichOneof("event"):
        case "started":
            started = message.started
            return Started(
                request_id=started.request_id,
                version=started.version,
                replica=started.replica,
                resident=started.resident,
                prompt_tokens=started.prompt_tokens,
            )
        case "delta":
            return Delta(token_ids=tuple(message.delta.token_ids), text=message.delta.text)
        case _:
            finished = message.finished
            return Finished(
                reason=_REASONS.get(finished.reason, "unknown"),
                completion_tokens=finished.completion_tokens,
                queue_s=finished.queue_s,
                ttft_s=finished.ttft_s,
                decode_s=finished.decode_s,
            )


def models_from_proto(message: inference_pb2.ListModelsResponse) -> list[Model]:
    """Decode the list of models."""
    return [
        Model(name=model.name, base=model.base, version=model.version) for model in message.models
    ]


def status_from_proto(message: fleet_pb2.GetStatusResponse) -> FleetStatus:
    """Decode the fleet's status."""
    return FleetStatus(
        base_model=message.base_model,
        base_digest=message.base_digest,
        num_adapters=message.num_adapters,
        registry_connected=message.registry_connected,
        replicas=tuple(_replica(replica) for replica in message.replicas),
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


def _messages(turns: Turns) -> list[inference_pb2.Message]:
    try:
        return [inference_pb2.Message(role=role, content=content) for role, content in turns]
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"messages: expected pairs of role and content, both texts ({error})", field="messages"
        ) from error


def _sampling(sampling: Sampling | None) -> inference_pb2.SamplingParams:
    chosen = sampling or Sampling()
    message = inference_pb2.SamplingParams()
    for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos"):
        value = getattr(chosen, name)
        try:
            if value is not None:
                setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                f"{name} {value!r} is not possible: {error}", field=f"sampling.{name}"
            ) from error
    if isinstance(chosen.stop, str) or not all(isinstance(text, str) for text in chosen.stop):
        raise InvalidInput(
            f"stop {chosen.stop!r} is not possible: expected a tuple of texts",
            field="sampling.stop",
        )
    message.stop.extend(chosen.stop)
    return message
