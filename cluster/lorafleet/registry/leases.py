"""Leases: a replica's fenced claim to exist, with the address where it serves.

It owns epochs (each start of a replica gets a higher one; an older holder of the same id is refused
from then on) and deadlines by Redis's own clock. It knows nothing of what a replica holds. Replicas
register and renew; gateways read who is live.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from lorafleet.core.errors import Conflict, NotFound
from lorafleet.registry import lease_scripts as scripts
from lorafleet.registry.layout import key
from lorafleet.registry.link import RedisLink

_KEYS = (key("leases"), key("lease_deadlines"), key("lease_epochs"))

DEFAULT_TTL_S = 5.0
"""How long a lease lasts without renewal; renew at a third of it."""

_FORGET_AFTER_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLease:
    """A live replica, as registered."""

    replica_id: str
    epoch: int
    address: str
    base_digest: str


class Leases:
    """Replica leases in Redis; every method raises Unavailable while Redis is away.

    Notes
    -----
    After an outage longer than the TTL all leases have run out, and `live_replicas` is empty until
    the replicas have renewed. A reader that would stop serving for it should keep the replicas it
    knew for one TTL after Redis came back.
    """

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def register(
        self,
        replica_id: str,
        address: str,
        base_digest: str,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        after_epoch: int = 0,
    ) -> int:
        """Take the lease of a replica id and return its new epoch, fencing off any older holder.

        Parameters
        ----------
        replica_id : str
            Stable over restarts, or fresh at each.
        address : str
            `host:port` of its gRPC endpoint.
        base_digest : str
            The base model it serves.
        ttl_s : float
            Lifetime without renewal, in seconds.
        after_epoch : int
            The epoch this process held before; the new one is higher even if Redis lost its state.
        """
        lease = json.dumps({"address": address, "base_digest": base_digest})
        reply = await self._link.run(
            scripts.REGISTER, _KEYS, [replica_id, after_epoch + 1, lease, round(ttl_s * 1000)]
        )
        return int(reply.value)

    async def renew(self, replica_id: str, epoch: int, *, ttl_s: float = DEFAULT_TTL_S) -> None:
        """Extend a lease, also one that ran out unless somebody else took the id since.

        Raises
        ------
        Conflict
            A newer process holds the lease: this one must stop.
        NotFound
            Redis does not know the lease (released, forgotten, or Redis lost its state): register
            again.
        """
        reply = await self._link.run(scripts.RENEW, _KEYS, [replica_id, epoch, round(ttl_s * 1000)])
        outcome = reply.value.decode()
        if outcome == "absent":
            raise NotFound(
                f"replica {replica_id!r} has no lease; register again", replica=replica_id
            )
        if outcome != "renewed":
            raise Conflict(
                f"replica {replica_id!r} with epoch {epoch} was replaced by epoch {outcome}",
                replica=replica_id,
                epoch=epoch,
                newest=outcome,
            )

    async def release(self, replica_id: str, epoch: int) -> None:
        """Give a lease back; does nothing when it is gone or somebody newer holds it."""
        await self._link.run(scripts.RELEASE, _KEYS, [replica_id, epoch])

    async def live_replicas(self) -> list[ReplicaLease]:
        """Return the leases that have not run out, by replica id."""
        reply = await self._link.run(scripts.LIVE, _KEYS, [round(_FORGET_AFTER_S * 1000)])
        flat = [part.decode() for part in reply.value]
        live = []
        for replica_id, text in zip(flat[::2], flat[1::2], strict=True):
            epoch, _, lease = text.partition(" ")
            live.append(ReplicaLease(replica_id=replica_id, epoch=int(epoch), **json.loads(lease)))
        return sorted(live, key=lambda lease: lease.replica_id)
