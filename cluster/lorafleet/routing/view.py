"""What a gateway knows of the replicas: an immutable view, and events that lead to the next one.

It owns the fencing rule (reports are ordered by epoch, then sequence; an older one never wins) and
the indexes that keep a decision from looking at every replica. It does not know how reports arrive
nor how a replica is chosen. Below the gateway, beside the policy.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from lorafleet.core.errors import Internal
from lorafleet.routing.rendezvous import Rendezvous
from lorafleet.routing.sharded_map import ShardedMap

_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a replica says of itself; fields as in `ResidencyReport` of `replica.proto`."""

    replica: str
    epoch: int
    sequence: int
    resident: frozenset[str] = _NOTHING
    loading: frozenset[str] = _NOTHING
    free_pages: int = 0
    num_pages: int = 0
    running: int = 0
    waiting: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """One replica as this gateway sees it.

    `inflight` counts this gateway's own open requests there, `inflight_at_report` what it was when
    the newest report came. `connected` is true from the first report of a connection to its end.
    """

    id: str
    address: str
    epoch: int
    report: Report | None = None
    connected: bool = False
    inflight: int = 0
    inflight_at_report: int = 0

    @property
    def eligible(self) -> bool:
        """Whether new requests may go there."""
        return self.connected and self.report is not None and not self.report.draining

    @property
    def load(self) -> int:
        """Requests there: the report's, corrected by what this gateway did since.

        Never below this gateway's own count, which needs no report.
        """
        if self.report is None:
            return self.inflight
        reported = self.report.running + self.report.waiting
        return max(self.inflight, reported + self.inflight - self.inflight_at_report)

    @property
    def num_pages(self) -> int:
        """Its rank pages, as last reported."""
        return self.report.num_pages if self.report is not None else 0

    @property
    def held(self) -> frozenset[str]:
        """Versions that are resident or on their way."""
        if self.report is None:
            return _NOTHING
        return (
            self.report.resident | self.report.loading
            if self.report.loading
            else (self.report.resident)
        )

    def holds(self, version: str) -> bool:
        """Whether a version is resident or on its way."""
        return self.is_resident(version) or (
            self.report is not None and version in self.report.loading
        )

    def is_resident(self, version: str) -> bool:
        """Whether a version is in rank pages."""
        return self.report is not None and version in self.report.resident


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The replicas, and indexes over the eligible ones. Each event returns the next view.

    `holders` maps a version to the eligible replicas that have or load it; `eligible` is sorted;
    `total_load` sums the load of the eligible ones; `rendezvous` has the eligible ones weighted by
    rank pages. An event that changes nothing returns the same object.
    """

    replicas: Mapping[str, ReplicaState] = field(default_factory=lambda: MappingProxyType({}))
    holders: ShardedMap[tuple[str, ...]] = field(default_factory=ShardedMap)
    eligible: tuple[str, ...] = ()
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    total_load: int = 0

    @property
    def mean_load(self) -> float:
        """Mean load of the eligible replicas; 0 when there is none."""
        return self.total_load / len(self.eligible) if self.eligible else 0.0

    def announce(self, replica: str, *, address: str, epoch: int) -> FleetView:
        """Note that a replica claims to exist; it becomes eligible with its first report.

        A higher epoch replaces what was known of the id, but for this gateway's own open requests.
        """
        old = self.replicas.get(replica)
        if old is None:
            return self._with(None, ReplicaState(id=replica, address=address, epoch=epoch))
        if epoch < old.epoch or (epoch == old.epoch and address == old.address):
            return self
        if epoch == old.epoch:
            return self._with(old, replace(old, address=address))
        fresh = ReplicaState(id=replica, address=address, epoch=epoch, inflight=old.inflight)
        return self._with(old, fresh)

    def apply(self, report: Report) -> FleetView:
        """Take a replica's report; a stale or an unannounced replica's changes nothing."""
        old = self.replicas.get(report.replica)
        if old is None or report.epoch < old.epoch:
            return self
        last = old.report
        if last is not None and (report.epoch, report.sequence) < (last.epoch, last.sequence):
            return self
        if last == report and old.connected and old.inflight == old.inflight_at_report:
            return self
        new = replace(
            old,
            epoch=report.epoch,
            report=report,
            connected=True,
            inflight_at_report=old.inflight,
        )
        return self._with(old, new)

    def disconnect(self, replica: str) -> FleetView:
        """Note that reports stopped: the replica is not eligible until the next one."""
        old = self.replicas.get(replica)
        if old is None or not old.connected:
            return self
        return self._with(old, replace(old, connected=False))

    def forget(self, replica: str) -> FleetView:
        """Drop a replica that is gone for good."""
        old = self.replicas.get(replica)
        return self if old is None else self._with(old, None)

    def hold(self, replica: str) -> FleetView:
        """Count a request that this gateway opened there."""
        return self._count(replica, 1)

    def release(self, replica: str) -> FleetView:
        """Count one as ended."""
        return self._count(replica, -1)

    def check(self) -> None:
        """Recompute every index from the replicas.

        Raises
        ------
        Internal
            An index has drifted: a bug.
        """
        eligible = [state for _, state in sorted(self.replicas.items()) if state.eligible]
        rendezvous = Rendezvous()
        holders: dict[str, set[str]] = {}
        for state in eligible:
            rendezvous = rendezvous.added(state.id, state.num_pages)
            for version in state.held:
                holders.setdefault(version, set()).add(state.id)
        expected = (
            tuple(state.id for state in eligible),
            sum(state.load for state in eligible),
            rendezvous,
            holders,
        )
        got = (
            self.eligible,
            self.total_load,
            self.rendezvous,
            {version: set(ids) for version, ids in self.holders.items()},
        )
        if expected != got:
            raise Internal(f"fleet view: expected indexes {expected}, got {got}")

    def _count(self, replica: str, step: int) -> FleetView:
        old = self.replicas.get(replica)
        if old is None:
            return self
        return self._with(old, replace(old, inflight=old.inflight + step))

    def _with(self, old: ReplicaState | None, new: ReplicaState | None) -> FleetView:
        """Return the view in which `old` has become `new` (None: was or is not there)."""
        replicas = dict(self.replicas)
        if new is not None:
            replicas[new.id] = new
        elif old is not None:
            del replicas[old.id]
        was = old if old is not None and old.eligible else None
        now = new if new is not None and new.eligible else None
        load = (now.load if now else 0) - (was.load if was else 0)
        if was and now and was.report is now.report:
            return replace(self, replicas=replicas, total_load=self.total_load + load)
        return FleetView(
            replicas=replicas,
            holders=_next_holders(self.holders, was, now),
            eligible=_next_eligible(self.eligible, was, now),
            rendezvous=_next_rendezvous(self.rendezvous, was, now),
            total_load=self.total_load + load,
        )


def _next_holders(
    holders: ShardedMap[tuple[str, ...]], was: ReplicaState | None, now: ReplicaState | None
) -> ShardedMap[tuple[str, ...]]:
    before = was.held if was else _NOTHING
    after = now.held if now else _NOTHING
    changes: dict[str, tuple[str, ...] | None] = {}
    if was:
        for version in before - after:
            rest = tuple(id for id in holders.get(version, ()) if id != was.id)
            changes[version] = rest or None
    if now:
        for version in after - before:
            changes[version] = (*holders.get(version, ()), now.id)
    return holders.updated(changes)


def _next_eligible(
    eligible: tuple[str, ...], was: ReplicaState | None, now: ReplicaState | None
) -> tuple[str, ...]:
    if (was is None) == (now is None):
        return eligible
    ids = list(eligible)
    if now:
        insort(ids, now.id)
    elif was:
        del ids[bisect_left(ids, was.id)]
    return tuple(ids)


def _next_rendezvous(
    members: Rendezvous, was: ReplicaState | None, now: ReplicaState | None
) -> Rendezvous:
    if was and now and was.num_pages == now.num_pages:
        return members
    if was:
        members = members.removed(was.id, was.num_pages)
    if now:
        members = members.added(now.id, now.num_pages)
    return members
