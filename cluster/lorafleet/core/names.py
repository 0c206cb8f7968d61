"""Names of adapters and how requests refer to them.

The one written rule: a name is `part` or `tenant/part`; a part is 1 to 64 characters of
`A-Z a-z 0-9 . _ -`, starts with a letter or digit, and is case-sensitive. Nothing is rewritten, so
`org/a` and `org_a` are two names. A reference adds `@alias` or `@sha256:<64 hex digits>`. The base
model's reserved name is `base`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lorafleet.core.errors import InvalidInput

BASE = "base"
"""The reserved name of the base model; an empty reference means the same."""

LATEST = "latest"
"""The alias that each push moves, and that a bare name means."""

DEFAULT_TENANT = "default"

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_NAME = re.compile(rf"(?:(?P<tenant>{_PART})/)?(?P<part>{_PART})")
_ALIAS = re.compile(_PART)
_VERSION = re.compile(r"sha256:[0-9a-f]{64}")

_RULE = (
    "expected `name` or `tenant/name`, each part 1 to 64 characters of A-Z a-z 0-9 . _ - "
    "starting with a letter or digit"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """A parsed reference: exactly one of `alias` and `version` is set."""

    name: str
    alias: str | None = None
    version: str | None = None


def canonical_name(text: str) -> str:
    """Check an adapter's name and return its canonical form (the default tenant left out).

    Raises
    ------
    InvalidInput
        The text breaks the rule above, or is the base model's reserved name.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        raise InvalidInput(f"adapter name {text!r} is not valid: {_RULE}", field="name")
    if match["tenant"] in (None, DEFAULT_TENANT):
        if match["part"] == BASE:
            raise InvalidInput(
                f"adapter name {BASE!r} is reserved for the base model", field="name"
            )
        return match["part"]
    return text


def check_alias(text: str) -> str:
    """Return an alias that may be set by hand.

    Raises
    ------
    InvalidInput
        It breaks the rule for a part of a name, or is `latest`, which only pushes move.
    """
    if not _ALIAS.fullmatch(text):
        raise InvalidInput(f"alias {text!r} is not valid: {_RULE}", field="alias")
    if text == LATEST:
        raise InvalidInput(f"alias {LATEST!r} is moved by pushes alone", field="alias")
    return text


def check_part(text: str, field: str) -> str:
    """Return a text that follows the rule for a part of a name: a tenant, a label's key.

    Raises
    ------
    InvalidInput
        It does not; `field` is named.
    """
    if not _ALIAS.fullmatch(text):
        raise InvalidInput(
            f"{field} {text[:80]!r} is not valid: expected 1 to 64 characters of A-Z a-z 0-9 . _ - "
            "starting with a letter or digit",
            field=field,
        )
    return text


def is_version_id(text: str) -> bool:
    """Whether the text has the form of a version id."""
    return _VERSION.fullmatch(text) is not None


def parse_ref(text: str) -> AdapterRef | None:
    """Parse what a request puts into `adapter`; None is the base model.

    Raises
    ------
    InvalidInput
        Name, alias or version is malformed.
    """
    if text in ("", BASE, f"{DEFAULT_TENANT}/{BASE}"):
        return None
    name, at, selector = text.partition("@")
    name = canonical_name(name)
    if not at:
        return AdapterRef(name=name, alias=LATEST)
    if is_version_id(selector):
        return AdapterRef(name=name, version=selector)
    if selector.startswith("sha256:") or not _ALIAS.fullmatch(selector):
        raise InvalidInput(
            f"adapter reference {text!r} is not valid: after @ expected an alias or "
            "sha256: and 64 hex digits",
            field="adapter",
        )
    return AdapterRef(name=name, alias=selector)


def tenant_of(name: str) -> str:
    """The tenant of a canonical name."""
    tenant, slash, _ = name.partition("/")
    return tenant if slash else DEFAULT_TENANT
