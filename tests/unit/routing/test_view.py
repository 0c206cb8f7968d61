"""The view's reducer: fencing, counting, and indexes that never drift."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lorafleet.core.errors import Internal
from lorafleet.routing import FleetView, Report

IDS = st.sampled_from(["a", "b", "c"])
VERSIONS = st.frozensets(st.sampled_from(["v1", "v2", "v3", "v4"]))


@st.composite
def reports(draw, replica=IDS) -> Report:
    return Report(
        replica=draw(replica),
        epoch=draw(st.integers(1, 3)),
        sequence=draw(st.integers(0, 5)),
        resident=draw(VERSIONS),
        loading=draw(VERSIONS),
        num_pages=draw(st.sampled_from([0, 8, 64])),
        running=draw(st.integers(0, 9)),
        waiting=draw(st.integers(0, 9)),
        draining=draw(st.booleans()),
    )


def announced(*ids: str) -> FleetView:
    view = FleetView()
    for id in ids:
        view = view.announce(id, address=f"{id}:1", epoch=1)
    return view


class ViewMachine(RuleBasedStateMachine):
    """Any sequence of events: every index equals what the replicas say."""

    def __init__(self) -> None:
        super().__init__()
        self.view = FleetView()
        self.held: list[str] = []

    @rule(id=IDS, epoch=st.integers(1, 3), port=st.integers(1, 2))
    def announce(self, id: str, epoch: int, port: int) -> None:
        self.view = self.view.announce(id, address=f"{id}:{port}", epoch=epoch)

    @rule(report=reports())
    def apply(self, report: Report) -> None:
        self.view = self.view.apply(report)

    @rule(id=IDS)
    def disconnect(self, id: str) -> None:
        self.view = self.view.disconnect(id)

    @rule(id=IDS)
    def forget(self, id: str) -> None:
        if id not in self.held:
            self.view = self.view.forget(id)

    @rule(id=IDS)
    def hold(self, id: str) -> None:
        if id in self.view.replicas:
            self.view = self.view.hold(id)
            self.held.append(id)

    @rule(data=st.data())
    def release(self, data) -> None:
        if self.held:
            id = data.draw(st.sampled_from(self.held))
            self.held.remove(id)
            self.view = self.view.release(id)

    @invariant()
    def indexes_agree(self) -> None:
        self.view.check()

    @invariant()
    def open_requests_are_counted(self) -> None:
        for id, state in self.view.replicas.items():
            assert state.inflight == self.held.count(id)
            assert state.load >= state.inflight


TestViewMachine = ViewMachine.TestCase
TestViewMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@given(st.lists(reports(st.just("a")), max_size=8, unique_by=lambda r: (r.epoch, r.sequence)))
def test_the_newest_report_wins_in_whatever_order_they_come(arrived: list[Report]) -> None:
    view = announced("a")
    for report in arrived:
        view = view.apply(report)
    newest = max(arrived, key=lambda r: (r.epoch, r.sequence), default=None)
    assert view.replicas["a"].report == newest


def test_a_report_of_an_older_epoch_than_the_lease_is_ignored() -> None:
    view = FleetView().announce("a", address="a:1", epoch=5)
    assert view.apply(Report(replica="a", epoch=4, sequence=99)) is view
    assert view.eligible == ()
    assert view.apply(Report(replica="a", epoch=5, sequence=0)).eligible == ("a",)


def test_a_stale_report_changes_nothing_even_after_a_disconnect() -> None:
    view = announced("a").apply(Report(replica="a", epoch=1, sequence=7)).disconnect("a")
    assert view.apply(Report(replica="a", epoch=1, sequence=6)) is view


def test_the_last_report_sent_again_makes_a_reconnected_replica_eligible() -> None:
    report = Report(replica="a", epoch=1, sequence=7)
    view = announced("a").apply(report)
    assert view.disconnect("a").apply(report).eligible == ("a",)
    assert view.apply(report) is view


def test_an_unannounced_replica_is_ignored() -> None:
    view = FleetView()
    assert view.apply(Report(replica="ghost", epoch=1, sequence=1)) is view
    assert view.disconnect("ghost") is view
    assert view.hold("ghost").release("ghost").forget("ghost") is view


def test_a_restarted_replica_starts_empty_but_keeps_this_gateways_requests() -> None:
    first = Report(replica="a", epoch=1, sequence=3, resident=frozenset({"v1"}), running=4)
    view = announced("a").apply(first).hold("a")
    view = view.announce("a", address="a:2", epoch=2)
    state = view.replicas["a"]
    assert (state.address, state.report, state.inflight) == ("a:2", None, 1)
    assert view.eligible == ()
    assert view.holders.get("v1", ()) == ()
    assert view.apply(replace(first, sequence=9)) is view
    assert view.announce("a", address="a:1", epoch=1) is view


def test_a_moved_address_keeps_the_state() -> None:
    view = announced("a").apply(Report(replica="a", epoch=1, sequence=1))
    view = view.announce("a", address="a:9", epoch=1)
    assert view.replicas["a"].address == "a:9"
    assert view.eligible == ("a",)


def test_a_draining_replica_is_no_holder() -> None:
    view = announced("a").apply(
        Report(replica="a", epoch=1, sequence=1, resident=frozenset({"v1"}), num_pages=8)
    )
    assert view.holders.get("v1", ()) == ("a",)
    view = view.apply(replace(view.replicas["a"].report, sequence=2, draining=True))
    assert view.eligible == ()
    assert view.holders.get("v1", ()) == ()
    assert list(view.rendezvous.order("v1")) == []


def test_load_is_the_report_corrected_by_what_was_opened_since() -> None:
    view = announced("a").hold("a")
    view = view.apply(Report(replica="a", epoch=1, sequence=1, running=3, waiting=2))
    assert view.replicas["a"].load == 5
    assert view.hold("a").hold("a").replicas["a"].load == 7
    assert view.release("a").replicas["a"].load == 4
    assert view.mean_load == 5


def test_load_is_never_below_this_gateways_own_requests() -> None:
    view = announced("a")
    for _ in range(3):
        view = view.hold("a")
    view = view.apply(Report(replica="a", epoch=1, sequence=1, running=0))
    assert view.replicas["a"].load == 3
    assert view.total_load == 3


def test_a_drifted_index_is_found() -> None:
    view = announced("a").apply(Report(replica="a", epoch=1, sequence=1, running=1))
    with pytest.raises(Internal, match="expected indexes"):
        replace(view, total_load=7).check()
