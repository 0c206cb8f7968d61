"""`lorafleet adapter`: the registry's adapters, and adapter directories."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from lorafleet.cli.output import AdminOption, JsonOption, err, out, print_json

app = typer.Typer(help="Register adapters and look at them.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="`name` or `tenant/name`.")]


@app.command()
def push(
    directory: Annotated[
        Path, typer.Argument(help="PEFT directory: adapter_config.json and safetensors.")
    ],
    name: Annotated[str, typer.Option(help="`name` or `tenant/name`.")],
    if_new: Annotated[
        bool, typer.Option("--if-new", help="Fail if the adapter has another version already.")
    ] = False,
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Upload an adapter; it can be used as soon as this returns.

    Example: `lorafleet adapter push ./my-adapter --name support-bot`
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
            progress=lambda sent, total: bar.update(task, completed=sent, total=total),
        )
    if json:
        print_json({**asdict(version), "existed": existed})
    else:
        out.print(f"{name} {version.id}" + (" (pushed before)" if existed else ""))


@app.command("list")
def list_(admin: AdminOption = None, json: JsonOption = False) -> None:
    """List all adapters."""
    from rich.table import Table

    from lorafleet.sdk import Client

    with Client(admin=admin) as client:
        records = client.list_adapters()
    if json:
        print_json([_record(record) for record in records])
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
        print_json(_record(record))
        return
    table = Table("version", "created", "rank", "dtype", "size", "aliases", title=record.name)
    for version in record.versions:
        table.add_row(
            version.id,
            datetime.fromtimestamp(version.created_at_s, UTC).isoformat(timespec="seconds"),
            str(version.max_rank),
            version.dtype,
            f"{version.weights_bytes / 2**20:.1f} MiB",
            ", ".join(
                sorted(a for a, target in record.aliases.items() if version.id in target.versions)
            ),
        )
    out.print(table)


@app.command()
def alias(
    name: NameArgument,
    alias: Annotated[str, typer.Argument(help="Like `prod`; used as `name@prod`.")],
    version: Annotated[str, typer.Argument(help="A version id, sha256:...")],
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Point an alias at a version."""
    from lorafleet.sdk import Client

    with Client(admin=admin) as client:
        record = client.set_alias(name, alias, version)
    if json:
        print_json(_record(record))
    else:
        out.print(f"{name}@{alias} is {version}")


@app.command()
def delete(name: NameArgument, admin: AdminOption = None, json: JsonOption = False) -> None:
    """Remove an adapter with all its versions; running requests finish."""
    from lorafleet.sdk import Client

    with Client(admin=admin) as client:
        client.delete_adapter(name)
    if json:
        print_json({"deleted": name})
    else:
        out.print(f"deleted {name}")


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


def _record(record: Any) -> dict[str, Any]:
    return {
        "name": record.name,
        "aliases": {alias: asdict(target) for alias, target in record.aliases.items()},
        "versions": [asdict(version) for version in record.versions],
    }
