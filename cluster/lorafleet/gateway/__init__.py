"""The front door: resolves a request's adapter, chooses a replica, streams its answer.

Run it with `python -m lorafleet.gateway`. It needs neither Ray nor TVM nor numpy; what it knows of
the fleet comes from Redis (adapters, leases) and from the replicas' own reports.
"""

from lorafleet.gateway.server import Gateway, GatewayOptions

__all__ = ["Gateway", "GatewayOptions"]
