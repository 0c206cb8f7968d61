"""Whether a concurrent history could have happened one operation after another.

The search of Wing and Gong ("Testing and Verifying Concurrent Objects", 1993) with Lowe's memory of
configurations already seen ("Testing for Linearizability", 2017), as in porcupine. An operation
that was never answered may have happened at any time after it began, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

State = TypeVar("State", bound=Hashable)

Step = Callable[[State, Any, Any], tuple[bool, State]]
"""(state, call, answer) -> (could it have been answered so, the state after it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A call and its answer, with the times between which it happened."""

    call: Any
    answer: Any = None
    began_s: float
    ended_s: float = math.inf

    @property
    def answered(self) -> bool:
        """Whether its caller heard of its outcome."""
        return self.ended_s < math.inf


class History(Generic[State]):
    """A history to be checked against a sequential model.

    Parameters
    ----------
    operations : sequence of Operation
        In any order.
    step : callable
        The model. For an unanswered operation it gets None as the answer.
    """

    def __init__(self, operations: Sequence[Operation], step: Step[State]) -> None:
        self._operations = sorted(operations, key=lambda each: each.began_s)
        self._step = step
        self._seen: set[tuple[int, State]] = set()

    def is_linearizable(self, initial: State) -> bool:
        """Whether there is an order that respects time, in which the model gives the answers."""
        everything = sum(1 << i for i, each in enumerate(self._operations) if each.answered)
        stack = [(0, initial)]
        while stack:
            done, state = stack.pop()
            if done & everything == everything:
                return True
            for index in self._next(done):
                operation = self._operations[index]
                possible, after = self._step(state, operation.call, operation.answer)
                configuration = (done | 1 << index, after)
                if possible and configuration not in self._seen:
                    self._seen.add(configuration)
                    stack.append(configuration)
        return False

    def _next(self, done: int) -> list[int]:
        """Operations that may come next: no other one ended before they began."""
        left = [i for i in range(len(self._operations)) if not done >> i & 1]
        first_end_s = min(self._operations[i].ended_s for i in left)
        return [i for i in left if self._operations[i].began_s <= first_end_s]
