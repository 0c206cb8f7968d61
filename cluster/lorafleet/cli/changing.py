"""`lorafleet adapter`: the commands that change what is registered, or check it."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorafleet.cli.adapter import app
from lorafleet.cli.output import AdminOption, JsonOption, out, print_json, print_json_line
from lorafleet.cli.records import (
    IdempotencyOption,
    NameArgument,
    RevisionOption,
    condition,
    labels_of,
    record_json,
    target_words,
    weights_of,
    when,
)

__all__ = ["app"]

if TYPE_CHECKING:
    from lorafleet.core.record import AdapterRecord
    from lorafleet.sdk.admin import Operation

AliasArgument = Annotated[str, typer.Argument(help="Like `prod`; used as `name@prod`.")]
VersionArgument = Annotated[str, typer.Argument(help="A version id, sha256:..., or an alias.")]


def _change(operation: Operation[AdapterRecord], admin: str | None, json: bool, said: str) -> None:
    """Run a change and say what it did."""
    from lorafleet.sdk import Client

    with Client(admin=admin) as client:
        record = client.run(operation)
    if json:
        print_json(record_json(record))
    else:
        out.print(said.format(**_words(record)), markup=False)


def _words(record: AdapterRecord) -> dict[str, Any]:
    return {"aliases": {a: target_words(target) for a, target in record.aliases.items()}}


@app.command()
def alias(
    name: NameArgument,
    alias: AliasArgument,
    version: Annotated[str, typer.Argument(help="A version id, sha256:...")],
    if_revision: RevisionOption = 0,
    idempotency_key: IdempotencyOption = "",
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Point an alias at a version, atomically.

    Example: `lorafleet adapter alias support-bot prod sha256:...`
    """
    from lorafleet.sdk.admin import set_alias

    wanted = condition(if_revision, idempotency_key)
    _change(set_alias(name, alias, version, wanted), admin, json, f"{name}@{alias} is {version}")


@app.command()
def split(
    name: NameArgument,
    alias: AliasArgument,
    shares: Annotated[list[str], typer.Argument(help="sha256:...=weight, two or more.")],
    if_revision: RevisionOption = 0,
    idempotency_key: IdempotencyOption = "",
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Share an alias between versions by weight: a canary.

    Requests with the same sticky key get the same version while the shares stay.

    Example: `lorafleet adapter split support-bot prod sha256:OLD=95 sha256:NEW=5`
    """
    from lorafleet.sdk.admin import split_alias

    operation = split_alias(
        name, alias, weights_of(shares), condition(if_revision, idempotency_key)
    )
    _change(operation, admin, json, f"{name}@{alias} is {{aliases[{alias}]}}")


@app.command()
def unalias(
    name: NameArgument,
    alias: AliasArgument,
    if_revision: RevisionOption = 0,
    idempotency_key: IdempotencyOption = "",
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Remove an alias."""
    from lorafleet.sdk.admin import remove_alias

    wanted = condition(if_revision, idempotency_key)
    _change(remove_alias(name, alias, wanted), admin, json, f"{name}@{alias} is removed")


@app.command()
def rollback(
    name: NameArgument,
    alias: Annotated[str, typer.Argument(help="`latest`, or like `prod`.")] = "latest",
    if_revision: RevisionOption = 0,
    idempotency_key: IdempotencyOption = "",
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Point an alias at what it meant before; a second time goes one further back.

    Example: `lorafleet adapter rollback support-bot prod`
    """
    from lorafleet.sdk.admin import rollback

    operation = rollback(name, alias, condition(if_revision, idempotency_key))
    _change(operation, admin, json, f"{name}@{alias} is {{aliases[{alias}]}}")


@app.command()
def label(
    name: NameArgument,
    labels: Annotated[list[str] | None, typer.Argument(help="key=value; none removes all.")] = None,
    if_revision: RevisionOption = 0,
    idempotency_key: IdempotencyOption = "",
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Replace an adapter's labels, by which lists are filtered."""
    from lorafleet.sdk.admin import set_labels

    wanted = condition(if_revision, idempotency_key)
    _change(set_labels(name, labels_of(labels), wanted), admin, json, f"{name} is labelled")


@app.command()
def pin(
    name: NameArgument,
    version: VersionArgument = "latest",
    replicas: Annotated[int, typer.Option(min=1, help="How many keep it resident.")] = 1,
    if_revision: RevisionOption = 0,
    idempotency_key: IdempotencyOption = "",
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Keep a version resident, before and without traffic."""
    from lorafleet.sdk.admin import pin

    operation = pin(name, version, replicas, condition(if_revision, idempotency_key))
    _change(operation, admin, json, f"{name} {version} is pinned on {replicas}")


@app.command()
def unpin(
    name: NameArgument,
    version: VersionArgument = "latest",
    if_revision: RevisionOption = 0,
    idempotency_key: IdempotencyOption = "",
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """End a pin."""
    from lorafleet.sdk.admin import pin

    operation = pin(name, version, 0, condition(if_revision, idempotency_key))
    _change(operation, admin, json, f"{name} {version} is not pinned")


@app.command()
def prefetch(
    name: NameArgument,
    version: VersionArgument = "latest",
    replicas: Annotated[int, typer.Option(min=1, help="How many load it.")] = 1,
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Ask replicas to load a version now: a hint."""
    from lorafleet.sdk import Client
    from lorafleet.sdk.admin import prefetch

    with Client(admin=admin) as client:
        client.run(prefetch(name, version, replicas))
    if json:
        print_json({"adapter": name, "version": version, "replicas": replicas})
    else:
        out.print(f"{name} {version} is announced to {replicas}")


@app.command()
def verify(
    name: NameArgument,
    version: Annotated[str, typer.Argument(help="A version id; all if not given.")] = "",
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Have the registry read a version's files again; exit code 1 when something is wrong."""
    from lorafleet.sdk import Client
    from lorafleet.sdk.admin import verify

    with Client(admin=admin) as client:
        checks = client.run(verify(name, version))
    if json:
        print_json(checks)
    else:
        for checked, problems in checks.items():
            out.print(f"{checked[:19]} {'; '.join(problems) or 'is whole'}", markup=False)
    if any(checks.values()):
        raise typer.Exit(1)


@app.command()
def delete(
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    if_revision: RevisionOption = 0,
    idempotency_key: IdempotencyOption = "",
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Remove an adapter with all its versions; running requests finish.

    `lorafleet adapter restore` brings it back within a day.
    """
    from lorafleet.sdk import Client
    from lorafleet.sdk.admin import delete_adapter

    if not yes and sys.stdin.isatty():
        typer.confirm(f"delete {name} with all its versions?", abort=True)
    with Client(admin=admin) as client:
        until_s = client.run(delete_adapter(name, condition(if_revision, idempotency_key)))
    if json:
        print_json({"deleted": name, "restorable_until": until_s})
    else:
        out.print(f"deleted {name}; can be restored until {when(until_s)}")


@app.command()
def restore(
    name: NameArgument,
    idempotency_key: IdempotencyOption = "",
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Bring a deleted adapter back."""
    from lorafleet.sdk.admin import restore_adapter

    wanted = condition(0, idempotency_key)
    _change(restore_adapter(name, wanted), admin, json, f"{name} is restored")


@app.command()
def watch(
    cursor: Annotated[str, typer.Option(help="Go on after it; else all adapters come first.")] = "",
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Show changes of adapters as they come, until Ctrl-C."""
    from lorafleet.sdk import Client

    with Client(admin=admin) as client:
        for change in client.watch(cursor):
            if json:
                adapter = record_json(change.adapter) if change.adapter else None
                print_json_line({**asdict(change), "adapter": adapter})
            elif change.adapter is not None:
                meanings = _words(change.adapter)["aliases"]
                out.print(f"{change.adapter.name} {meanings}", markup=False)
            elif change.deleted:
                out.print(f"{change.deleted} deleted", markup=False)
