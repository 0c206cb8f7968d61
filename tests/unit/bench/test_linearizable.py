"""The checker accepts what could have been one after another, and nothing else."""

from __future__ import annotations

import itertools
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from lorafleet.bench.registry.histories import State
from lorafleet.bench.registry.histories import step as registry_step
from lorafleet.bench.registry.linearizable import History, Operation


def register(state: int, call, answer):
    """A register that holds a number."""
    what, value = call
    if what == "write":
        return True, value
    return answer is None or answer == state, state


def op(call, answer, began_s, ended_s=math.inf) -> Operation:
    return Operation(call=call, answer=answer, began_s=began_s, ended_s=ended_s)


def accepts(*operations: Operation) -> bool:
    return History(operations, register).is_linearizable(0)


def test_a_read_that_overlaps_a_write_may_see_it_or_not():
    write = op(("write", 1), "OK", 0, 2)
    assert accepts(write, op(("read", 0), 0, 1, 3))
    assert accepts(write, op(("read", 0), 1, 1, 3))


def test_a_read_after_a_write_must_see_it():
    assert not accepts(op(("write", 1), "OK", 0, 1), op(("read", 0), 0, 2, 3))


def test_what_was_seen_once_stays_seen():
    write = op(("write", 1), "OK", 0, 9)
    assert not accepts(write, op(("read", 0), 1, 1, 2), op(("read", 0), 0, 3, 4))


def test_an_unanswered_write_may_have_happened_or_not_or_later():
    write = op(("write", 1), None, 0)
    assert accepts(write, op(("read", 0), 0, 1, 2))
    assert accepts(write, op(("read", 0), 0, 1, 2), op(("read", 0), 1, 3, 4))
    assert not accepts(write, op(("read", 0), 2, 1, 2))


CALLS = st.lists(st.tuples(st.sampled_from(["read", "write"]), st.integers(0, 2)), max_size=5)


@given(CALLS, st.randoms())
def test_it_agrees_with_trying_every_order(calls, rng: random.Random):
    operations = []
    for call in calls:
        began_s = rng.uniform(0, 3)
        operations.append(op(call, rng.randint(0, 2), began_s, began_s + rng.uniform(0, 2)))

    def fits(order) -> bool:
        if any(b.ended_s < a.began_s for a, b in itertools.combinations(order, 2)):
            return False
        state = 0
        for each in order:
            possible, state = register(state, each.call, each.answer)
            if not possible:
                return False
        return True

    assert accepts(*operations) == any(map(fits, itertools.permutations(operations)))


def test_the_registry_lost_update_is_found():
    """Two pushes were answered, and a later read knows only one of them."""
    state = (("b",), (("latest", "b"),))
    history = [
        op(("push", "a"), "OK", 0, 1),
        op(("push", "b"), "OK", 2, 3),
        op(("read",), state, 4, 5),
    ]
    assert not History(history, registry_step).is_linearizable(State())
    history[-1] = op(("read",), (("a", "b"), (("latest", "b"),)), 4, 5)
    assert History(history, registry_step).is_linearizable(State())
