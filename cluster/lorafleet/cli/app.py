"""The command tree and its one way to fail."""

from __future__ import annotations

import typer

from lorafleet import __version__
from lorafleet.cli import (
    adapter,
    bench,
    changing,
    demo,
    doctor,
    fleet,
    generate,
    making,
    model,
    tenants,
)
from lorafleet.cli.output import run_command

app = typer.Typer(
    name="lorafleet",
    help="One base model, thousands of LoRA adapters, a fleet of replicas.\n\n"
    "Start with `lorafleet demo`, or `lorafleet up --detach`, then "
    "`lorafleet adapter push DIR --name NAME` and `lorafleet generate TEXT --adapter NAME`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lorafleet {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


for command in (model.compile_, fleet.up, fleet.down, fleet.status, doctor.doctor):
    app.command(command.__name__.rstrip("_"))(command)
app.add_typer(changing.app, name="adapter")  # adapter's, with the changing commands
app.add_typer(tenants.tenant_app, name="tenant")
app.add_typer(tenants.key_app, name="key")
adapter.app.command("mix")(making.mix)
adapter.app.command("convert")(making.convert)
app.command("merge")(making.merge)
app.command("generate")(generate.generate)
app.command("chat")(generate.chat)
app.command("demo")(demo.demo)
app.command("bench")(bench.bench)


def main() -> None:
    """Run the command line."""
    run_command(app)
