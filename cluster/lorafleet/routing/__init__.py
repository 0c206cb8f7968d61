"""Which replica serves a request: an immutable view of the fleet and a pure policy over it.

It opens no connection and reads no clock; the gateway feeds it reports and asks it. A simulator
may drive the very same objects. Stands on `core` alone.
"""

from lorafleet.routing.policy import Decision, LoadBound, Reason, choose
from lorafleet.routing.view import FleetView, ReplicaState, Report

__all__ = ["Decision", "FleetView", "LoadBound", "Reason", "ReplicaState", "Report", "choose"]
