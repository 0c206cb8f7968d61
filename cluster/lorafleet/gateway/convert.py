"""Replica messages as the routing layer's values, and requests as replicas take them.

It owns the field-by-field mapping between `lorafleet.v1` and our values on the data plane; it
checks and decides nothing. Used by the gateway's other modules.
"""

from __future__ import annotations

from lorafleet.routing import ReplicaState, Report
from lorafleet.v1 import fleet_pb2, inference_pb2, replica_pb2


def report_from_proto(message: replica_pb2.ResidencyReport) -> Report:
    """Decode a replica's report."""
    return Report(
        replica=message.replica,
        epoch=message.epoch,
        sequence=message.sequence,
        resident=frozenset(message.resident),
        loading=frozenset(message.loading),
        free_pages=message.free_pages,
        num_pages=message.num_pages,
        running=message.running,
        waiting=message.waiting,
        draining=message.draining,
    )


def report_to_proto(report: Report) -> replica_pb2.ResidencyReport:
    """Encode a replica's report; versions in sorted order."""
    return replica_pb2.ResidencyReport(
        replica=report.replica,
        epoch=report.epoch,
        sequence=report.sequence,
        resident=sorted(report.resident),
        loading=sorted(report.loading),
        free_pages=report.free_pages,
        num_pages=report.num_pages,
        running=report.running,
        waiting=report.waiting,
        draining=report.draining,
    )


def state_to_proto(state: ReplicaState) -> fleet_pb2.ReplicaStatus:
    """Encode a replica as the router sees it."""
    return fleet_pb2.ReplicaStatus(
        address=state.address,
        connected=state.connected,
        report=report_to_proto(state.report) if state.report is not None else None,
    )


def from_generate(request: inference_pb2.GenerateRequest) -> replica_pb2.ReplicaGenerateRequest:
    """Turn a public request into a replica's, without version and request id."""
    inner = replica_pb2.ReplicaGenerateRequest(sampling=request.sampling)
    if request.WhichOneof("prompt") == "text":
        inner.text = request.text
    else:
        inner.token_ids.CopyFrom(request.token_ids)
    return inner


def from_chat(request: inference_pb2.ChatRequest) -> replica_pb2.ReplicaGenerateRequest:
    """Turn a public chat request into a replica's, without version and request id."""
    return replica_pb2.ReplicaGenerateRequest(
        sampling=request.sampling,
        conversation=replica_pb2.Conversation(messages=request.messages),
    )


def to_chat(response: inference_pb2.GenerateResponse) -> inference_pb2.ChatResponse:
    """Turn an event of a replica's stream into one of a chat's."""
    match response.WhichOneof("event"):
        case "started":
            return inference_pb2.ChatResponse(started=response.started)
        case "delta":
            return inference_pb2.ChatResponse(delta=response.delta)
        case _:
            return inference_pb2.ChatResponse(finished=response.finished)
