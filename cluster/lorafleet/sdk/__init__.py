"""The client library: requests to a gateway, adapters to the registry. Needs no TVM and no Ray."""

from __future__ import annotations

from lorafleet.sdk.aio import AsyncClient
from lorafleet.sdk.client import Client
from lorafleet.sdk.values import (
    Change,
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

__all__ = [
    "AsyncClient",
    "Change",
    "Client",
    "Completion",
    "Delta",
    "Event",
    "Finished",
    "FleetStatus",
    "Model",
    "ReplicaStatus",
    "Sampling",
    "Started",
]
