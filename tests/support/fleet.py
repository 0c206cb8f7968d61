"""A running fleet, as tests see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lorafleet.fleet import FleetState, Supervisor
from lorafleet.sdk import Client


@dataclass(frozen=True)
class Fleet:
    supervisor: Supervisor
    state: FleetState
    client: Client
    home: Path
