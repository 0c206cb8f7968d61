r"""PEFT's `rank_pattern` and `alpha_pattern`: which of the keys speaks for a module.

It owns the matching rule of PEFT's `get_pattern_key`: the first key, in the order of the file, that
matches the end of the module's path at a dot, `re.match(rf"(.*\.)?({key})$", path)`. The keys are a
stranger's regular expressions, and Python's `re` may take longer than the universe lasts for one of
them, with the interpreter lock held. So they are read by `regex`, whose cost is bounded.

It knows neither configs nor tensors.

References: PEFT 0.21, `peft.utils.other.get_pattern_key`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from lorafleet.adapters.regex import Node, RegexError, Steps, parse

V = TypeVar("V", int, float)

_LITERAL = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Generic[V]):
    """One key and its value; `node` is None for a key without operators except the dot."""

    key: str
    value: V
    node: Node | None

    def matches(self, path: str, steps: Steps) -> bool:
        """Whether the key matches the end of a module's path at a dot."""
        if self.node is None:
            steps.spend(1)
            return _literal_matches(self.key, path)
        starts = {0, *(i + 1 for i, char in enumerate(path) if char == ".")}
        return len(path) in self.node(path, starts, steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patterns(Generic[V]):
    """Values by pattern, in the order of the file."""

    entries: tuple[Entry[V], ...] = ()

    def find(self, path: str, steps: Steps) -> V | None:
        """The value of the first key that matches a module's path.

        Raises
        ------
        RegexError
            Matching costs more steps than were left.
        """
        return next((e.value for e in self.entries if e.matches(path, steps)), None)


def compile_patterns(values: Mapping[str, V]) -> Patterns[V]:
    """Read the keys of a pattern option.

    Raises
    ------
    RegexError
        A key is no regular expression, or uses what is not supported; `key` names it.
    """
    entries = []
    for key, value in values.items():
        try:
            node = None if _LITERAL.fullmatch(key) else parse(key)
        except RegexError as error:
            error.key = key
            raise
        entries.append(Entry(key=key, value=value, node=node))
    return Patterns(entries=tuple(entries))


def _literal_matches(key: str, path: str) -> bool:
    # EVA writes a key for every module, so this is asked of every pair of modules.
    start = len(path) - len(key)
    if start < 0 or (start > 0 and path[start - 1] != "."):
        return False
    return all(k in (".", p) for k, p in zip(key, path[start:], strict=True))
