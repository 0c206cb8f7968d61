"""What each example adapter was trained to do, as checks on its text. Pure; imports no model."""

from __future__ import annotations

import json
import re

PIRATE_WORDS = re.compile(
    r"\b(arr+|ahoy|matey|aye|avast|ye|yer|landlubber|scurvy|grog|hearty|bilge)\b", re.IGNORECASE
)


def is_json_object(text: str) -> bool:
    """The whole text is one JSON object with at least one key."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and bool(value)


def is_pirate(text: str) -> bool:
    """At least two different words that only pirates use."""
    return len({word.lower() for word in PIRATE_WORDS.findall(text)}) >= 2


def is_sql_select(text: str) -> bool:
    """The whole text is one SELECT ... FROM ... statement."""
    return re.fullmatch(r"SELECT\s[^;]+\sFROM\s[^;]+;?", text.strip()) is not None


CHECKS = {"json": is_json_object, "pirate": is_pirate, "sql": is_sql_select}
