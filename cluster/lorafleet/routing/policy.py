"""Which replica gets a request: a pure function of the view, the version and a random generator.

It decides between affinity (a replica that holds the version serves it without a load) and balance
(no replica takes much more than its share). It knows no clock, no connection and no name of an
adapter. Below the gateway, which acts on its decisions.

    base model      the less loaded of two random replicas
    held            the less loaded of two random holders, while it is under the bound
    all over        the next replica in the version's rendezvous order that is under the bound
    held by none    the first replica in that order that is under the bound

The bound is `factor` times the mean load plus `slack`. The order is the same in every gateway, so
two of them that place a version at the same time agree.

References
----------
Mitzenmacher, "The Power of Two Choices" (2001). Mirrokni, Thorup and Zadimoghaddam, "Consistent
Hashing with Bounded Loads" (2018).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from random import Random

from lorafleet.core.errors import Unavailable
from lorafleet.routing.view import FleetView, ReplicaState

# How far down its order a version is placed. At most 4 of 5 replicas can have 1.25 times the mean,
# so even then 16 in a row are over the bound with probability 0.03; the least loaded then serves.
_MAX_WALK = 16

_NOBODY: frozenset[str] = frozenset()


class Reason(enum.Enum):
    """Why a replica was chosen."""

    BASE = "base"
    """The base model: any replica will do, this one is less loaded."""
    HOLDER = "holder"
    """It holds or loads the version and is under the bound."""
    SPREAD = "spread"
    """All holders are over the bound: the version gets one more replica."""
    PLACED = "placed"
    """No replica holds the version: the first in its order under the bound."""
    SATURATED = "saturated"
    """Nobody looked at is under the bound: the least loaded of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBound:
    """How much load a replica may have before requests for its versions go elsewhere.

    A lower `factor` balances better and loads versions in more places; `slack` keeps an adapter
    with a few concurrent requests together on an idle fleet, where they share one batch.
    """

    factor: float = 1.25
    slack: float = 4.0

    def limit(self, view: FleetView) -> float:
        """Return the load from which a replica takes no more."""
        return self.factor * view.mean_load + self.slack


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    rng: Random
    exclude: AbstractSet[str]
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The chosen replica; `expected_resident` says whether it reported the version in its pages."""

    replica: str
    address: str
    reason: Reason
    expected_resident: bool


def choose(
    view: FleetView,
    version: str | None,
    *,
    rng: Random,
    exclude: AbstractSet[str] = _NOBODY,
    bound: LoadBound = LoadBound(),
) -> Decision:
    """Choose the replica for one request.

    Parameters
    ----------
    view : FleetView
    version : str or None
        The version's id; None is the base model.
    rng : Random
        Breaks ties and draws the candidates; the same state gives the same choice.
    exclude : set of str
        Replicas that already failed this request.
    bound : LoadBound

    Returns
    -------
    Decision
        Always an eligible replica outside `exclude`.

    Raises
    ------
    Unavailable
        There is none.

    Notes
    -----
    Independent of the number of replicas, but for a scan of the holders when the two drawn are both
    over the bound, and for a scan of `eligible` when something is excluded.
    """
    if version is None:
        ids = _without(view.eligible, exclude)
        return _decision(_less_loaded(view, ids, rng, None), Reason.BASE, None)
    limit = bound.limit(view)
    holder: ReplicaState | None = None
    ids = _without(view.holders.get(version, ()), exclude)
    if ids:
        holder = _less_loaded(view, ids, rng, version)
        if holder.load >= limit:
            holder = min((view.replicas[id] for id in ids), key=lambda state: state.load)
        if holder.load < limit:
            return _decision(holder, Reason.HOLDER, version)
    placed = _place(view, version, _Ask(rng=rng, exclude=exclude, limit=limit))
    if placed is not None and placed.load < limit:
        return _decision(placed, Reason.SPREAD if holder else Reason.PLACED, version)
    fallback = holder or placed or _less_loaded(view, _without(view.eligible, exclude), rng, None)
    return _decision(fallback, Reason.SATURATED, version)


def _without(ids: tuple[str, ...], exclude: AbstractSet[str]) -> Sequence[str]:
    return [id for id in ids if id not in exclude] if exclude else ids


def _less_loaded(
    view: FleetView, ids: Sequence[str], rng: Random, version: str | None
) -> ReplicaState:
    """Return the better of two random ones: in pages beats on its way, then load counts."""
    count = len(ids)
    if count == 0:
        raise Unavailable("no replica can take the request now; wait for one to become ready")
    first = int(rng.random() * count)
    one = view.replicas[ids[first]]
    if count == 1:
        return one
    second = int(rng.random() * (count - 1))
    other = view.replicas[ids[second + (second >= first)]]
    if version is not None and one.is_resident(version) != other.is_resident(version):
        return one if one.is_resident(version) else other
    return other if other.load < one.load else one


def _place(view: FleetView, version: str, ask: _Ask) -> ReplicaState | None:
    """Find the first non-holder in order under the limit, else the least loaded one seen."""
    least: ReplicaState | None = None
    for id in _candidates(view, version, ask):
        state = view.replicas[id]
        if id in ask.exclude or state.holds(version):
            continue
        if state.load < ask.limit:
            return state
        if least is None or state.load < least.load:
            least = state
    return least


def _candidates(view: FleetView, version: str, ask: _Ask) -> Iterator[str]:
    num_skipped = len(view.holders.get(version, ())) + len(ask.exclude)
    if num_skipped <= _MAX_WALK:
        return islice(view.rendezvous.order(version), _MAX_WALK + num_skipped)
    # Held by many already: where one more goes needs no agreement, and the walk would be long.
    count = len(view.eligible)
    return (view.eligible[int(ask.rng.random() * count)] for _ in range(_MAX_WALK))


def _decision(state: ReplicaState, reason: Reason, version: str | None) -> Decision:
    return Decision(
        replica=state.id,
        address=state.address,
        reason=reason,
        expected_resident=version is None or state.is_resident(version),
    )
