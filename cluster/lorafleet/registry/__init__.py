"""The truth about adapters: names and versions in Redis, weights in a content-addressed store.

Followers (gateways, replicas) need what is exported here, which imports neither gRPC nor numpy. The
admin process is `python -m lorafleet.registry`; clients make a push with `registry.push`.
"""

from __future__ import annotations

from lorafleet.registry.blobs import BlobStore
from lorafleet.registry.catalogue import Catalogue
from lorafleet.registry.embedded import EmbeddedRedis
from lorafleet.registry.garbage import collect_garbage
from lorafleet.registry.leases import Leases, ReplicaLease
from lorafleet.registry.link import LinkOptions
from lorafleet.registry.store import RegistryStore

__all__ = [
    "BlobStore",
    "Catalogue",
    "EmbeddedRedis",
    "Leases",
    "LinkOptions",
    "RegistryStore",
    "ReplicaLease",
    "collect_garbage",
]
