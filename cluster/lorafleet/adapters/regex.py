"""A regular expression that never hangs: Python's syntax and meaning, without backtracking.

It owns the syntax in which PEFT users write patterns: literals, `.`, classes, groups, `|`, `? * +
{m,n}`, `^`, `$`, and the escapes of those. The rest (look-around, back references, flags,
possessive repeats) is refused by name. It knows nothing of PEFT.

An expression becomes a function from the set of positions where it may start to the set of
positions where it may end. Sets do not grow with the number of ways to match, which is what makes
backtracking explode; what is left is counted in steps, and a caller says how many it will pay for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

Node = Callable[[str, set[int], "Steps"], set[int]]
"""(text, starts, steps) -> ends."""

_MAX_CHARS = 512
_MAX_DEPTH = 32
_REPEAT = re.compile(r"\*|\+|\?|\{(?:\d{1,4}(?:,\d{0,4})?|,\d{1,4})\}", re.ASCII)
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda char: char.isalnum() or char == "_",
    "s": str.isspace,
}


class RegexError(ValueError):
    """An expression that is malformed, not supported, or too costly; `key` is the expression."""

    key: str = ""


class Steps:
    """What matching may still cost. One per piece of work, not shared between threads."""

    def __init__(self, left: int) -> None:
        self.left = left

    def spend(self, count: int) -> None:
        """Pay; RegexError when it cannot be paid."""
        self.left -= count
        if self.left < 0:
            raise RegexError("takes too many steps to match")


def parse(text: str) -> Node:
    """Compile an expression.

    Raises
    ------
    RegexError
        It is malformed, longer than 512 characters, or uses what is not supported here.
    """
    if len(text) > _MAX_CHARS:
        raise RegexError(f"longer than {_MAX_CHARS} characters")
    return _Parser(text).parse()


class _Parser:
    """Recursive descent: alternatives of sequences of repeated atoms."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def parse(self) -> Node:
        node = self._alternatives()
        if self.at < len(self.text):
            self._fail("unbalanced parenthesis")
        return node

    def _alternatives(self) -> Node:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else _either(branches)

    def _sequence(self) -> Node:
        nodes = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            nodes.append(self._repeated(self._atom()))
        return nodes[0] if len(nodes) == 1 else _sequence(nodes)

    def _repeated(self, node: Node) -> Node:
        match = _REPEAT.match(self.text, self.at)
        if match is None:
            return node
        self.at = match.end()
        self._take("?")  # lazy: finds another match first, but the same ones in all
        if self.text[self.at : self.at + 1] == "+":
            self._fail("possessive repeats are not supported")
        if _REPEAT.match(self.text, self.at):
            self._fail("multiple repeat")
        least, most = _bounds(match[0])
        if most is not None and most < least:
            self._fail("the least repeat is above the most")
        return _repeat(node, least, most)

    def _atom(self) -> Node:
        char = self.text[self.at]
        self.at += 1
        if char == "(":
            return self._group()
        if char == "[":
            return _char(self._class())
        if char == "\\":
            return _char(self._escape())
        if char == ".":
            return _char(lambda found: found != "\n")
        if char == "^":
            return lambda text, starts, steps: starts & {0}
        if char == "$":
            return lambda text, starts, steps: starts & {len(text)}
        if char in "*+?":
            self._fail("nothing to repeat")
        if char == "{":
            self._fail("a bare { is not supported; write \\{")
        return _char(_is(char))

    def _group(self) -> Node:
        if self.text.startswith("?", self.at) and not self._take("?:"):
            self._fail("look-around, flags and named groups are not supported")
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            self._fail(f"groups nest deeper than {_MAX_DEPTH}")
        node = self._alternatives()
        self.depth -= 1
        if not self._take(")"):
            self._fail("missing )")
        return node

    def _escape(self) -> Callable[[str], bool]:
        if self.at == len(self.text):
            self._fail("ends in a backslash")
        char = self.text[self.at]
        self.at += 1
        if char.lower() in _CATEGORIES:
            accepts = _CATEGORIES[char.lower()]
            return accepts if char.islower() else lambda found: not accepts(found)
        if char.isalnum():
            self._fail(f"\\{char} is not supported")
        return _is(char)

    def _class(self) -> Callable[[str], bool]:
        negated = self._take("^")
        members: list[Callable[[str], bool]] = []
        while not members or not self.text.startswith("]", self.at):
            members.append(self._member())
        self.at += 1
        return lambda found: any(accepts(found) for accepts in members) != negated

    def _member(self) -> Callable[[str], bool]:
        low = self._class_char()
        if not (self.text.startswith("-", self.at) and self.text[self.at + 1 : self.at + 2] != "]"):
            return low if callable(low) else _is(low)
        self.at += 1
        high = self._class_char()
        if callable(low) or callable(high) or high < low:
            self._fail("bad character range")
        return lambda found: low <= found <= high

    def _class_char(self) -> str | Callable[[str], bool]:
        if self.at == len(self.text):
            self._fail("missing ]")
        char = self.text[self.at]
        self.at += 1
        if char != "\\":
            return char
        escaped = self.text[self.at : self.at + 1]
        accepts = self._escape()
        return accepts if escaped.lower() in _CATEGORIES else escaped

    def _take(self, token: str) -> bool:
        found = self.text.startswith(token, self.at)
        self.at += len(token) * found
        return found

    def _fail(self, why: str) -> NoReturn:
        raise RegexError(f"{why} (at position {self.at})")


def _bounds(token: str) -> tuple[int, int | None]:
    if token in ("*", "+", "?"):
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[token]
    least, comma, most = token[1:-1].partition(",")
    if not comma:
        return int(least), int(least)
    return int(least or 0), int(most) if most else None


def _is(char: str) -> Callable[[str], bool]:
    return lambda found: found == char


def _char(accepts: Callable[[str], bool]) -> Node:
    def ends(text: str, starts: set[int], steps: Steps) -> set[int]:
        steps.spend(len(starts) + 1)
        return {at + 1 for at in starts if at < len(text) and accepts(text[at])}

    return ends


def _sequence(nodes: list[Node]) -> Node:
    def ends(text: str, starts: set[int], steps: Steps) -> set[int]:
        for node in nodes:
            if not starts:
                break
            starts = node(text, starts, steps)
        return starts

    return ends


def _either(nodes: list[Node]) -> Node:
    def ends(text: str, starts: set[int], steps: Steps) -> set[int]:
        return set().union(*(node(text, starts, steps) for node in nodes))

    return ends


def _repeat(node: Node, least: int, most: int | None) -> Node:
    def ends(text: str, starts: set[int], steps: Steps) -> set[int]:
        for _ in range(least):
            steps.spend(1)
            after = node(text, starts, steps)
            if after == starts:  # and so for ever
                break
            starts = after
        found, fresh, count = set(starts), starts, least
        while fresh and count != most:
            steps.spend(1)
            fresh = node(text, fresh, steps) - found
            found |= fresh
            count += 1
        return found

    return ends
