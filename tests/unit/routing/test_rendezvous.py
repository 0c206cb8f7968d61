"""Laws of the weighted rendezvous order."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.routing.rendezvous import Rendezvous

MEMBERS = st.dictionaries(st.text(min_size=1, max_size=8), st.integers(1, 2000), max_size=40)
KEYS = st.lists(st.text(max_size=12), min_size=1, max_size=20)


def of(members: dict[str, int]) -> Rendezvous:
    result = Rendezvous()
    for member, weight in members.items():
        result = result.added(member, weight)
    return result


@settings(max_examples=50)
@given(MEMBERS, KEYS)
def test_the_order_has_every_member_once(members: dict[str, int], keys: list[str]) -> None:
    for key in keys:
        order = list(of(members).order(key))
        assert sorted(order) == sorted(members)


@settings(max_examples=50)
@given(MEMBERS, KEYS, st.randoms())
def test_the_order_does_not_depend_on_how_members_came(members, keys, rng) -> None:
    shuffled = list(members.items())
    rng.shuffle(shuffled)
    for key in keys:
        assert list(of(members).order(key)) == list(of(dict(shuffled)).order(key))


@settings(max_examples=50)
@given(MEMBERS.filter(bool), KEYS, st.data())
def test_removing_a_member_keeps_the_order_of_the_others(members, keys, data) -> None:
    gone = data.draw(st.sampled_from(sorted(members)))
    full = of(members)
    rest = full.removed(gone, members[gone])
    assert rest == of({member: members[member] for member in members if member != gone})
    for key in keys:
        assert list(rest.order(key)) == [member for member in full.order(key) if member != gone]


@pytest.mark.parametrize("num_members", [2, 31, 33, 300])
def test_a_leaving_member_moves_only_its_own_keys(num_members: int) -> None:
    members = {f"replica-{index}": 64 for index in range(num_members)}
    full = of(members)
    rest = full.removed("replica-1", 64)
    for key in (f"sha256:{index}" for index in range(1000)):
        before, after = next(full.order(key)), next(rest.order(key))
        assert before == after or before == "replica-1"


def test_members_win_in_proportion_to_their_weights() -> None:
    members = {f"replica-{index}": 64 if index < 5 else 192 for index in range(10)}
    order = of(members)
    wins = Counter(next(order.order(f"sha256:{index}")) for index in range(20_000))
    for member, weight in members.items():
        assert wins[member] == pytest.approx(20_000 * weight / 1280, rel=0.15)


def test_many_equal_members_share_the_keys_evenly() -> None:
    order = of({f"replica-{index}": 64 for index in range(100)})
    wins = Counter(next(order.order(f"sha256:{index}")) for index in range(20_000))
    assert len(wins) == 100
    assert max(wins.values()) < 1.4 * 200
    assert min(wins.values()) > 0.6 * 200


def test_a_lost_members_keys_spread_over_all_others() -> None:
    order = of({f"replica-{index}": 64 for index in range(5)})
    seconds = Counter(
        second
        for first, second in (islice(order.order(f"sha256:{i}"), 2) for i in range(5_000))
        if first == "replica-0"
    )
    assert len(seconds) == 4
    assert min(seconds.values()) > 0.7 * sum(seconds.values()) / 4


def test_small_differences_of_weight_move_nothing() -> None:
    one = of({"a": 256, "b": 256, "c": 256})
    other = of({"a": 256, "b": 258, "c": 263})
    for index in range(200):
        assert list(one.order(f"k{index}")) == list(other.order(f"k{index}"))


def test_a_member_without_weight_is_not_ranked() -> None:
    members = of({"a": 0, "b": 8})
    assert list(members.order("key")) == ["b"]
    assert list(members.removed("a", 0).order("key")) == ["b"]
    assert list(Rendezvous().order("key")) == []
