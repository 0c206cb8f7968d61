"""`lorafleet adapter`: the registry's adapters, and adapter directories."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lorafleet.cli.output import AdminOption, JsonOption, err, out, print_json
from lorafleet.cli.records import (
    LabelOption,
    NameArgument,
    labels_of,
    record_json,
    target_words,
    when,
)

app = typer.Typer(help="Register adapters and look at them.", no_args_is_help=True)


@app.command()
def push(
    directory: Annotated[
        Path, typer.Argument(help="PEFT directory: adapter_config.json and safetensors.")
    ],
    name: Annotated[str, typer.Option(help="`name` or `tenant/name`.")],
    if_new: Annotated[
        bool, typer.Option("--if-new", help="Fail if the adapter has another version already.")
    ] = False,
    label: LabelOption = None,
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Upload an adapter; it can be used as soon as this returns.

    What the registry holds already is not sent again; a push that breaks off is taken up again.

    Example: `lorafleet adapter push ./my-adapter --name support-bot --label team=support`
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from lorafleet.sdk import Client

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Client(admin=admin) as client, Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(f"push {name}", total=None)
        version, existed = client.push_adapter(
            directory,
            name=name,
            if_new=if_new,
            labels=labels_of(label),
            progress=lambda sent, total: bar.update(task, completed=sent, total=total),
        )
    _print_version(name, version, existed, json)


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(help="file://, http(s)://, s3://, gs:// or az:// URL.")],
    name: Annotated[str, typer.Option(help="`name` or `tenant/name`.")],
    if_new: Annotated[
        bool, typer.Option("--if-new", help="Fail if the adapter has another version already.")
    ] = False,
    label: LabelOption = None,
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Let the registry fetch an adapter; only from where its --allow-source permits.

    Example: `lorafleet adapter import s3://models/support-bot --name support-bot`
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from lorafleet.sdk import Client

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Client(admin=admin) as client, Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(f"import {name}", total=None)
        version, existed = client.import_adapter(
            source,
            name=name,
            if_new=if_new,
            labels=labels_of(label),
            progress=lambda sent, total: bar.update(task, completed=sent, total=total or None),
        )
    _print_version(name, version, existed, json)


@app.command("list")
def list_(
    tenant: Annotated[str, typer.Option(help="Of this tenant.")] = "",
    search: Annotated[str, typer.Option(help="With this text in their names.")] = "",
    label: LabelOption = None,
    deleted: Annotated[
        bool, typer.Option("--deleted", help="Those that can be restored, instead.")
    ] = False,
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """List adapters.

    Example: `lorafleet adapter list --tenant acme --label team=support`
    """
    from rich.table import Table

    from lorafleet.sdk import Client

    with Client(admin=admin) as client:
        records = client.list_adapters(
            tenant=tenant, search=search, labels=labels_of(label), deleted=deleted
        )
    if json:
        print_json([record_json(record) for record in records])
        return
    table = Table("adapter", "version", "rank", "modules", "size", "versions", "aliases")
    for record in records:
        latest = record.latest
        table.add_row(
            record.name,
            latest.id[:19],
            str(latest.max_rank),
            ", ".join(latest.target_modules),
            f"{latest.weights_bytes / 2**20:.1f} MiB",
            str(len(record.versions)),
            ", ".join(sorted(set(record.aliases) - {"latest"})),
        )
    out.print(table)


@app.command()
def show(name: NameArgument, admin: AdminOption = None, json: JsonOption = False) -> None:
    """Show one adapter with its versions and aliases."""
    from rich.table import Table

    from lorafleet.sdk import Client

    with Client(admin=admin) as client:
        record = client.get_adapter(name)
    if json:
        print_json(record_json(record))
        return
    table = Table("version", "created", "rank", "dtype", "size", "aliases", title=record.name)
    for version in record.versions:
        table.add_row(
            version.id,
            when(version.created_at_s),
            str(version.max_rank),
            version.dtype,
            f"{version.weights_bytes / 2**20:.1f} MiB",
            ", ".join(
                sorted(a for a, target in record.aliases.items() if version.id in target.versions)
            ),
        )
    out.print(table)


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(help="PEFT directory.")],
    model: Annotated[
        Path | None,
        typer.Option(exists=True, help="Compiled base model; the default one if not given."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check an adapter directory against a base model and show what is in it."""
    from rich.table import Table

    from lorafleet.adapters import load_adapter
    from lorafleet.compiler import ensure_compiled
    from lorafleet.core.model import BaseModel

    adapter = load_adapter(directory, BaseModel.read(ensure_compiled(model)))
    if json:
        print_json(
            {
                "version": adapter.version,
                "max_rank": adapter.max_rank,
                "dtype": adapter.dtype,
                "weights_bytes": adapter.weights_bytes,
                "modules": [
                    {"module": m.source, "rank": m.rank, "alpha": m.alpha, "scale": m.scale}
                    for m in adapter.modules
                ],
            }
        )
        return
    table = Table("module", "rank", "alpha", "scale", "in", "out", "dtype", title=adapter.version)
    for module in adapter.modules:
        table.add_row(
            module.source,
            str(module.rank),
            f"{module.alpha:g}",
            f"{module.scale:.4g}",
            str(module.in_features),
            str(module.out_features),
            module.dtype,
        )
    out.print(table)


@app.command()
def history(
    name: NameArgument,
    limit: Annotated[int, typer.Option(help="The most entries.")] = 20,
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Show what was done to an adapter, newest first, and by which API key."""
    from rich.table import Table

    from lorafleet.sdk import Client
    from lorafleet.sdk.admin import history

    with Client(admin=admin) as client:
        entries = client.run(history(name, limit))
    if json:
        print_json([asdict(entry) for entry in entries])
        return
    table = Table("when", "what", "alias", "before", "after", "key", title=name)
    for entry in entries:
        table.add_row(
            when(entry.at_s),
            entry.action,
            entry.alias,
            target_words(entry.before),
            target_words(entry.after),
            entry.actor,
        )
    out.print(table)


def _print_version(name: str, version: Any, existed: bool, json: bool) -> None:
    if json:
        print_json({**asdict(version), "existed": existed})
    else:
        out.print(f"{name} {version.id}" + (" (registered before)" if existed else ""))
