"""The names of the keys in Redis; `scripts` says what is in them."""

from __future__ import annotations

PREFIX = "{lorafleet}:"
"""Starts every key. The braces put all into one hash slot, so that scripts run on a cluster."""


def key(*parts: str) -> str:
    """Return a key of ours."""
    return PREFIX + ":".join(parts)


STATE = key("state")
CHANGES = key("changes")
NAMES = key("names")
DELETED_NAMES = key("deleted_names")
DELETED_UNTIL = key("deleted_until")
TENANT_NAMES = key("tenant_names")
API_KEYS = key("keys")
