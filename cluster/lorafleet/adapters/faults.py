"""How this layer says what is wrong: one form of message, with the same facts as fields.

Names and values inside an adapter's files are a stranger's: they may be megabytes long, or hold
characters that no terminal and no header can carry. They are quoted and cut here, once for all. It
knows no rule that an adapter could break.
"""

from __future__ import annotations

import json

from lorafleet.core.errors import InvalidAdapter, Unsupported

_MAX_VALUE = 80
_MAX_NAME = 200


def shown(value: object, max_chars: int = _MAX_VALUE) -> str:
    """A value as it stands in the file, on one line of ASCII, cut to `max_chars`."""
    try:
        # ascii() quotes strings as Python does; anything else is shown as the JSON that it was.
        text = ascii(value) if isinstance(value, str) else json.dumps(value)
    except (RecursionError, TypeError, ValueError):
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def shown_name(name: str) -> str:
    """A quoted name of a tensor, a module or an option."""
    return shown(name, _MAX_NAME)


def invalid(
    file: str, what: str, *, field: str | None = None, tensor: str | None = None
) -> InvalidAdapter:
    """Something in a file of the adapter is broken or does not fit."""
    return InvalidAdapter(f"{file}: {what}", file=file, field=_fact(field), tensor=_fact(tensor))


def unsupported(
    file: str, what: str, *, field: str | None = None, tensor: str | None = None
) -> Unsupported:
    """Something in a file of the adapter would change the output and is not honoured."""
    return Unsupported(f"{file}: {what}", file=file, field=_fact(field), tensor=_fact(tensor))


def _fact(text: str | None) -> str | None:
    """A name as a fact: unquoted, but as safe and as short as in the message."""
    return None if text is None else shown_name(text)[1:-1]
