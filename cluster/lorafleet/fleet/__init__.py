"""The fleet: replicas under Ray Serve, and the supervisor that runs a whole fleet on one machine.

Ray owns the replicas' lives; requests reach each replica's own gRPC port. Importing this package
imports neither Ray nor TVM.
"""

from __future__ import annotations

from lorafleet.fleet.state import FleetState
from lorafleet.fleet.supervisor import STOPPING, FleetOptions, Supervisor

__all__ = ["STOPPING", "FleetOptions", "FleetState", "Supervisor"]
