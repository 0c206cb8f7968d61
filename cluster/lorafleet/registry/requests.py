"""What requests of the admin plane say, checked: conditions, labels, targets, versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lorafleet.core.errors import InvalidInput
from lorafleet.core.names import LATEST, check_alias, check_part, is_version_id
from lorafleet.core.record import Target
from lorafleet.registry.changes import Condition
from lorafleet.wire.auth import caller
from lorafleet.wire.messages import target_from_proto

_MAX_LABELS = 64
_MAX_LABEL_BYTES = 256
_MAX_SHARES = 16
_MAX_WEIGHT = 1_000_000


def condition_of(message: Any) -> Condition:
    """A change's condition, and who asks for it.

    Raises
    ------
    InvalidInput
        The idempotency key is malformed.
    """
    key = message.idempotency_key
    return Condition(
        if_revision=message.if_revision,
        idempotency_key=check_part(key, "idempotency_key") if key else "",
        actor=caller().key_id,
    )


def check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels that an adapter may have; InvalidInput names what it may not."""
    if len(labels) > _MAX_LABELS:
        raise InvalidInput(
            f"labels: expected at most {_MAX_LABELS}, got {len(labels)}", field="labels"
        )
    for key, value in labels.items():
        check_part(key, "labels")
        if len(value.encode()) > _MAX_LABEL_BYTES:
            raise InvalidInput(
                f"labels: {key}: expected at most {_MAX_LABEL_BYTES} bytes", field="labels"
            )
    return dict(labels)


def check_version(text: str) -> str:
    """A version's id; InvalidInput when it is none."""
    if not is_version_id(text):
        raise InvalidInput(
            f"version {text[:80]!r} is not valid: expected sha256: and 64 hex digits",
            field="version",
        )
    return text


def any_alias(text: str) -> str:
    """An alias, `latest` too; InvalidInput when it breaks the rule."""
    return text if text == LATEST else check_alias(text)


def check_target(message: Any) -> Target:
    """The shares of a split.

    Raises
    ------
    InvalidInput
        There are none or too many, a version comes twice, or a weight is out of range.
    """
    target = target_from_proto(message)
    if not 1 <= len(target.shares) <= _MAX_SHARES:
        raise InvalidInput(
            f"shares: expected 1 to {_MAX_SHARES}, got {len(target.shares)}", field="shares"
        )
    for share in target.shares:
        check_version(share.version)
        if not 1 <= share.weight <= _MAX_WEIGHT:
            raise InvalidInput(
                f"shares: expected weights of 1 to {_MAX_WEIGHT}, got {share.weight}",
                field="shares",
            )
    if len(target.versions) != len(target.shares):
        raise InvalidInput("shares: a version comes twice", field="shares")
    return target
