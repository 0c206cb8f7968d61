"""What the registry's commands share: their arguments, and how records are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorafleet.core.errors import InvalidInput

if TYPE_CHECKING:
    from lorafleet.core.record import AdapterRecord, Target
    from lorafleet.sdk.admin import Condition

NameArgument = Annotated[str, typer.Argument(help="`name` or `tenant/name`.")]
LabelOption = Annotated[
    list[str] | None, typer.Option(help="key=value; repeatable.", metavar="KEY=VALUE")
]
RevisionOption = Annotated[
    int,
    typer.Option(help="Only if the adapter has this revision, as `adapter show --json` tells."),
]
IdempotencyOption = Annotated[
    str, typer.Option(help="A repetition with the same key is answered as the first was.")
]


def condition(if_revision: int, idempotency_key: str) -> Condition:
    """What a change depends on."""
    from lorafleet.sdk.admin import Condition

    return Condition(if_revision=if_revision, idempotency_key=idempotency_key)


def labels_of(texts: list[str] | None) -> dict[str, str]:
    """`key=value` texts as a mapping; InvalidInput names one that is not."""
    labels = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput(f"label {text!r}: expected key=value", field="label")
        labels[key] = value
    return labels


def weights_of(texts: list[str]) -> dict[str, int]:
    """`VERSION=weight` texts as a mapping; InvalidInput names one that is not."""
    weights = {}
    for text in texts:
        version, _, weight = text.rpartition("=")
        if not version or not weight.isdecimal():
            raise InvalidInput(f"share {text!r}: expected sha256:...=weight", field="shares")
        weights[version] = int(weight)
    return weights


def record_json(record: AdapterRecord) -> dict[str, Any]:
    """An adapter as JSON."""
    return {
        "name": record.name,
        "revision": record.revision,
        "aliases": {
            alias: {share.version: share.weight for share in target.shares}
            for alias, target in record.aliases.items()
        },
        "labels": dict(record.labels),
        "pins": dict(record.pins),
        "versions": [asdict(version) for version in record.versions],
    }


def target_words(target: Target | None) -> str:
    """What an alias means, in a few characters."""
    if target is None:
        return ""
    if target.version is not None:
        return target.version[:19]
    return " ".join(f"{share.version[:15]}={share.weight}" for share in target.shares)


def when(seconds: float) -> str:
    """A time in Unix seconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def table_rows(pairs: Mapping[str, object]) -> list[tuple[str, str]]:
    """Pairs as rows of text."""
    return [(key, str(value)) for key, value in pairs.items()]
