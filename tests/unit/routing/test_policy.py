"""The policy: a table of situations, and laws over random fleets."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lorafleet.core.errors import Unavailable
from lorafleet.routing import FleetView, LoadBound, Reason, Report, choose

VERSION = "sha256:" + "ab" * 32
BOUND = LoadBound(factor=1.25, slack=4.0)


def fleet(**replicas: dict) -> FleetView:
    """A view of connected replicas; each value has fields of a Report."""
    view = FleetView()
    for id, fields in replicas.items():
        view = view.announce(id, address=f"{id}:1", epoch=1)
        view = view.apply(
            Report(**{"replica": id, "epoch": 1, "sequence": 1, "num_pages": 64} | fields)
        )
    return view


HELD = {"resident": frozenset({VERSION})}
LOADING = {"loading": frozenset({VERSION})}


def choices(view: FleetView, version: str | None, **options) -> set[tuple[str, Reason, bool]]:
    """Every decision over many random states."""
    decisions = [choose(view, version, rng=Random(seed), **options) for seed in range(200)]
    return {(d.replica, d.reason, d.expected_resident) for d in decisions}


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        pytest.param(
            {"a": HELD, "b": {}, "c": {}}, {("a", Reason.HOLDER, True)}, id="the only holder"
        ),
        pytest.param(
            {"a": HELD | {"running": 7}, "b": {}, "c": {"running": 9}},
            {("a", Reason.HOLDER, True)},
            id="a busy holder under the bound",
        ),
        pytest.param(
            {"a": LOADING, "b": {}}, {("a", Reason.HOLDER, False)}, id="a loading one counts"
        ),
        pytest.param(
            {"a": LOADING, "b": HELD | {"running": 3}},
            {("b", Reason.HOLDER, True)},
            id="resident beats loading",
        ),
        pytest.param(
            {"a": LOADING, "b": HELD | {"running": 20}},
            {("a", Reason.HOLDER, False)},
            id="loading beats a resident one over the bound",
        ),
        pytest.param(
            {"a": HELD | {"running": 3}, "b": HELD | {"running": 1}},
            {("b", Reason.HOLDER, True)},
            id="the less loaded of two holders",
        ),
        pytest.param(
            {"a": HELD | {"running": 20}, "b": {"running": 2}},
            {("b", Reason.SPREAD, False)},
            id="a hot adapter spreads",
        ),
        pytest.param(
            {"a": HELD | {"running": 20}, "b": {"draining": True}},
            {("a", Reason.HOLDER, True)},
            id="nowhere to spread",
        ),
        pytest.param(
            {"a": HELD | {"draining": True}, "b": {}},
            {("b", Reason.PLACED, False)},
            id="a draining holder is none",
        ),
        pytest.param(
            {"a": {"num_pages": 0}}, {("a", Reason.SATURATED, False)}, id="no pages at all"
        ),
        pytest.param(
            {"a": {"num_pages": 0}, "b": {"running": 5}},
            {("b", Reason.PLACED, False)},
            id="a replica without pages is not chosen for an adapter",
        ),
    ],
)
def test_versions_go_where(replicas, expected) -> None:
    assert choices(fleet(**replicas), VERSION, bound=BOUND) == expected


def test_base_requests_go_to_the_less_loaded_of_two() -> None:
    view = fleet(a={"running": 5}, b={"running": 1})
    assert choices(view, None) == {("b", Reason.BASE, True)}


def test_ties_are_broken_at_random() -> None:
    assert {id for id, _, _ in choices(fleet(a={}, b={}, c={}), None)} == {"a", "b", "c"}
    assert {id for id, _, _ in choices(fleet(a=HELD, b=HELD), VERSION)} == {"a", "b"}


def test_a_version_held_by_none_goes_to_the_same_replica_in_every_gateway() -> None:
    view = fleet(a={}, b={}, c={}, d={})
    assert len(choices(view, VERSION)) == 1
    first = next(view.rendezvous.order(VERSION))
    assert choices(view, VERSION) == {(first, Reason.PLACED, False)}


def test_a_version_held_by_none_skips_replicas_over_the_bound() -> None:
    view = fleet(a={}, b={}, c={}, d={})
    first, second = islice(view.rendezvous.order(VERSION), 2)
    for _ in range(20):
        view = view.hold(first)
    assert choices(view, VERSION, bound=BOUND) == {(second, Reason.PLACED, False)}


def test_retries_leave_the_excluded_out() -> None:
    view = fleet(a=HELD, b={}, c=HELD)
    assert choices(view, VERSION, exclude={"a"}) == {("c", Reason.HOLDER, True)}
    assert choices(view, VERSION, exclude={"a", "c"}) == {("b", Reason.PLACED, False)}
    assert {id for id, _, _ in choices(view, None, exclude={"a"})} == {"b", "c"}


@pytest.mark.parametrize("version", [None, VERSION])
def test_nobody_to_ask_is_unavailable(version: str | None) -> None:
    for view, exclude in [
        (FleetView(), set()),
        (fleet(a=HELD), {"a"}),
        (fleet(a=HELD | {"draining": True}), set()),
        (fleet(a=HELD).disconnect("a"), set()),
    ]:
        with pytest.raises(Unavailable, match="no replica"):
            choose(view, version, rng=Random(0), exclude=exclude)


def test_a_version_that_very_many_hold_still_spreads() -> None:
    busy = {f"r{index}": HELD | {"running": 30} for index in range(40)}
    idle = {f"s{index}": {} for index in range(40)}
    found = choices(fleet(**busy, **idle), VERSION, bound=BOUND)
    assert {reason for _, reason, _ in found} == {Reason.SPREAD}
    assert {id[0] for id, _, _ in found} == {"s"}


@st.composite
def fleets(draw) -> FleetView:
    view = FleetView()
    for index in range(draw(st.integers(0, 8))):
        id = f"r{index}"
        view = view.announce(id, address=f"{id}:1", epoch=1)
        if draw(st.integers(0, 4)) == 0:
            continue
        held = draw(st.sampled_from(["no", "no", "resident", "loading"]))
        report = Report(
            replica=id,
            epoch=1,
            sequence=1,
            resident=frozenset({VERSION} if held == "resident" else ()),
            loading=frozenset({VERSION} if held == "loading" else ()),
            num_pages=draw(st.sampled_from([0, 16, 64])),
            running=draw(st.integers(0, 30)),
            draining=draw(st.integers(0, 5)) == 0,
        )
        view = view.apply(report)
        if draw(st.integers(0, 7)) == 0:
            view = view.disconnect(id)
        for _ in range(draw(st.integers(0, 5))):
            view = view.hold(id)
    return view


@given(fleets(), st.sampled_from([None, VERSION]), st.frozensets(st.integers(0, 8)), st.integers())
def test_the_choice_is_always_live_and_not_excluded(view, version, excluded, seed) -> None:
    exclude = {f"r{index}" for index in excluded}
    allowed = set(view.eligible) - exclude
    assume(allowed)
    decision = choose(view, version, rng=Random(seed), exclude=exclude)
    assert decision.replica in allowed
    assert decision.address == view.replicas[decision.replica].address
    held = version is None or view.replicas[decision.replica].is_resident(version)
    assert decision.expected_resident == held


@given(fleets(), st.integers())
def test_a_holder_under_the_bound_is_always_preferred(view, seed) -> None:
    limit = BOUND.limit(view)
    holders = [view.replicas[id] for id in view.holders.get(VERSION, ())]
    assume(any(holder.load < limit for holder in holders))
    decision = choose(view, VERSION, rng=Random(seed), bound=BOUND)
    assert decision.reason is Reason.HOLDER
    assert view.replicas[decision.replica].holds(VERSION)
    assert view.replicas[decision.replica].load < limit


@given(fleets(), st.integers())
def test_nobody_over_the_bound_is_chosen_while_somebody_with_pages_is_under(view, seed) -> None:
    limit = BOUND.limit(view)
    under = [id for id in view.eligible if view.replicas[id].load < limit]
    assume(any(view.replicas[id].num_pages for id in under))
    assert choose(view, VERSION, rng=Random(seed), bound=BOUND).replica in under


@given(fleets(), st.integers())
def test_the_same_random_state_gives_the_same_choice(view, seed) -> None:
    assume(view.eligible)
    first = choose(view, VERSION, rng=Random(seed))
    assert choose(view, VERSION, rng=Random(seed)) == first


def test_base_requests_balance_the_fleet() -> None:
    view = fleet(**{f"r{index}": {} for index in range(20)})
    rng = Random(7)
    for _ in range(400):
        view = view.hold(choose(view, None, rng=rng).replica)
    # One random choice would put about 30 on the busiest.
    assert max(state.load for state in view.replicas.values()) <= 23
