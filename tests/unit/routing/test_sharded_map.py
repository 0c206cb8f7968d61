"""The persistent map behaves as a dict, and old versions stay as they were."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lorafleet.routing.sharded_map import ShardedMap

CHANGES = st.dictionaries(st.text(max_size=3), st.one_of(st.none(), st.integers()), max_size=8)


@given(st.lists(CHANGES, max_size=8))
def test_updates_agree_with_a_dict_and_leave_earlier_maps_alone(steps) -> None:
    model: dict[str, int] = {}
    current: ShardedMap[int] = ShardedMap()
    history = [(current, dict(model))]
    for changes in steps:
        current = current.updated(changes)
        for key, value in changes.items():
            if value is None:
                model.pop(key, None)
            else:
                model[key] = value
        history.append((current, dict(model)))
    for kept, expected in history:
        assert dict(kept.items()) == expected
        assert len(kept) == len(expected)
        for key, value in expected.items():
            assert kept.get(key, None) == value


def test_a_missing_key_gives_the_default() -> None:
    assert ShardedMap().get("absent", 7) == 7


def test_an_empty_update_is_the_same_map() -> None:
    current: ShardedMap[int] = ShardedMap()
    assert current.updated({}) is current
