"""The replicas this gateway can reach: found by their leases, known by their own reports.

It owns the connections and the view of the fleet that the policy decides on. A lease makes a
replica known, its first report makes it eligible, a broken or silent stream of reports makes it not
so. A lease that ran out does not: while Redis is away none can be renewed, yet the replicas serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from lorafleet.core.errors import Internal, LorafleetError, Unavailable
from lorafleet.core.log import get_logger
from lorafleet.gateway.convert import report_from_proto
from lorafleet.gateway.tasks import end
from lorafleet.registry.leases import Leases, ReplicaLease
from lorafleet.routing import FleetView, Report
from lorafleet.v1 import replica_pb2, replica_pb2_grpc
from lorafleet.wire.channel import open_channel
from lorafleet.wire.status import from_rpc_error

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How closely the replicas are followed.

    Parameters
    ----------
    poll_s : float
        Time between two looks at the leases.
    silence_s : float
        A replica reports at least every second; after this long without a report it is not
        eligible.
    first_pause_s, longest_pause_s : float
        Bounds of the doubling wait before a lost replica is tried again.
    """

    poll_s: float = 0.5
    silence_s: float = 5.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 2.0


class ReplicaPool:
    """Follows every replica of one base model.

    Parameters
    ----------
    leases : Leases
        Where replicas register.
    base_digest : str
        Replicas of another base model are left alone.
    options : PoolOptions
        Timing.
    """

    def __init__(
        self, leases: Leases, base_digest: str, *, options: PoolOptions | None = None
    ) -> None:
        self._leases = leases
        self._base_digest = base_digest
        self._options = options or PoolOptions()
        self._view = FleetView()
        self._links: dict[str, _Link] = {}
        self._retired: list[_Link] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def view(self) -> FleetView:
        """The fleet as of now; it never changes, the next look returns another."""
        return self._view

    async def start(self) -> None:
        """Begin to follow the leases."""
        self._task = asyncio.create_task(self._poll_forever(), name="replica-pool")

    async def stop(self) -> None:
        """Stop following and close every connection, with every request on it."""
        if self._task is not None:
            task, self._task = self._task, None
            await end(task)
        for id in list(self._links):
            await self._retire(id)
        for link in list(self._retired):
            await link.close()
        self._retired.clear()

    @contextlib.contextmanager
    def open(self, replica: str) -> Iterator[Any]:
        """Be at a replica for as long as the block runs: gives its client and counts the request.

        The connection stays until the block ends, even if the replica is replaced meanwhile.

        Raises
        ------
        Unavailable
            The replica is gone.
        """
        link = self._links.get(replica)
        if link is None:
            raise Unavailable(f"replica {replica!r} is gone", replica=replica)
        self._view = self._view.hold(replica)
        link.requests += 1
        try:
            yield link.stub
        finally:
            link.requests -= 1
            self._view = self._view.release(replica)

    # Leases.

    async def _poll_forever(self) -> None:
        reachable = True
        while True:
            try:
                await self._follow(await self._leases.live_replicas())
                reachable = True
            except LorafleetError as error:
                if reachable:
                    _log.warning("leases cannot be read; replicas stay known", error=error.message)
                reachable = False
            await asyncio.sleep(self._options.poll_s)

    async def _follow(self, leases: list[ReplicaLease]) -> None:
        """Make the links match the leases; a lease that ran out ends only a silent link."""
        live = {lease.replica_id: lease for lease in leases}
        for lease in leases:
            if lease.base_digest == self._base_digest:
                await self._meet(lease)
        for id in self._links.keys() - live.keys():
            if not self._view.replicas[id].connected:
                await self._retire(id)
        for id, state in list(self._view.replicas.items()):
            if id not in self._links and state.inflight == 0:
                self._view = self._view.forget(id)
        for link in [link for link in self._retired if link.requests == 0]:
            self._retired.remove(link)
            await link.close()

    async def _meet(self, lease: ReplicaLease) -> None:
        """Link to a replica that is new, has moved, or has taken a new epoch."""
        id = lease.replica_id
        link = self._links.get(id)
        if link is not None and link.lease.epoch >= lease.epoch:
            return
        self._view = self._view.announce(id, address=lease.address, epoch=lease.epoch)
        if link is not None and link.lease.address == lease.address:
            # It took its lease again, or restarted in place: the channel finds it by itself.
            link.lease = lease
            return
        if link is not None:
            await self._retire(id)
        link = self._links[id] = _Link(lease, self._options, self._take, self._lost)
        link.start()

    async def _retire(self, id: str) -> None:
        """Look no more at a replica; the channel is closed when its last request has ended."""
        self._view = self._view.disconnect(id)
        link = self._links.pop(id)
        await link.look_away()
        self._retired.append(link)

    def _take(self, report: Report) -> bool:
        self._view = self._view.apply(report)
        return self._view.replicas[report.replica].connected

    def _lost(self, id: str) -> None:
        self._view = self._view.disconnect(id)


class _Link:
    """One replica's channel, and the task that reads its reports from `start` to `look_away`.

    `requests` counts who uses the channel. `take` gets each report and says whether the replica is
    connected by it; `lost` is told when reports have ended.
    """

    def __init__(
        self,
        lease: ReplicaLease,
        options: PoolOptions,
        take: Callable[[Report], bool],
        lost: Callable[[str], None],
    ) -> None:
        self.lease = lease
        self._take = take
        self._lost = lost
        self._options = options
        self.requests = 0
        self._channel: Any = open_channel(lease.address)
        self.stub: Any = replica_pb2_grpc.ReplicaStub(self._channel)  # type: ignore[no-untyped-call]
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._watch_forever(), name=f"watch {self.lease.address}")

    async def look_away(self) -> None:
        """End the watch."""
        if self._task is not None:
            await end(self._task)

    async def close(self) -> None:
        """Close the channel, with every call on it."""
        await self._channel.close()

    async def _watch_forever(self) -> None:
        pause_s = self._options.first_pause_s
        while True:
            connected = False
            try:
                async for report in self._reports():
                    if self._take(report) and not connected:
                        connected = True
                        pause_s = self._options.first_pause_s
                        self._say("replica connected")
                cause = "the stream of reports ended"
            except TimeoutError:
                cause = f"no report for {self._options.silence_s:g} s"
            except LorafleetError as error:
                cause = error.message
            self._lost(self.lease.replica_id)
            if connected:
                self._say("replica lost", cause=cause)
            await asyncio.sleep(pause_s * (0.5 + random.random()))
            pause_s = min(2 * pause_s, self._options.longest_pause_s)

    async def _reports(self) -> AsyncIterator[Report]:
        call: Any = self.stub.WatchResidency(replica_pb2.WatchResidencyRequest())
        messages = aiter(call)
        try:
            while True:
                async with asyncio.timeout(self._options.silence_s):
                    message = await anext(messages, None)
                if message is None:
                    return
                report = report_from_proto(message)
                if report.replica != self.lease.replica_id:
                    raise Internal(
                        f"{self.lease.address} is replica {report.replica!r}, not "
                        f"{self.lease.replica_id!r}"
                    )
                yield report
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    def _say(self, event: str, **facts: str) -> None:
        _log.info(
            event,
            replica=self.lease.replica_id,
            address=self.lease.address,
            epoch=self.lease.epoch,
            **facts,
        )
