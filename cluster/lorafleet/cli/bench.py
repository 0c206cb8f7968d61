"""`lorafleet bench`: the figures lorafleet is held to."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from lorafleet.cli.output import JsonOption, err, out, print_json
from lorafleet.core.errors import NotFound


def bench(
    name: Annotated[str, typer.Argument(help="A figure's name, `list`, or `all`.")],
    json: JsonOption = False,
    output: Annotated[Path, typer.Option(help="Where `all` writes its JSON.")] = Path(
        "benchmarks/out/latest.json"
    ),
) -> None:
    """Measure a figure; exit 0 only if its goal holds.

    Examples: `lorafleet bench list`, `lorafleet bench first_light_affinity --json`
    """
    from lorafleet.bench import FIGURES, run

    if name == "list":
        _list(json)
        return
    if name != "all" and name not in FIGURES:
        raise NotFound(f"there is no figure {name!r}; see `lorafleet bench list`")
    chosen = list(FIGURES.values()) if name == "all" else [FIGURES[name]]
    results = []
    for figure in chosen:
        result = run(figure, lambda line: err.print(f"[dim]· {line}[/dim]"))
        results.append(result)
        if not json:
            _print(result)
    if name == "all":
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(jsonlib.dumps(results, indent=2) + "\n")
    if json:
        print_json(results if name == "all" else results[0])
    if not all(result["holds"] for result in results):
        raise typer.Exit(1)


def _list(json: bool) -> None:
    from rich.table import Table

    from lorafleet.bench import FIGURES

    if json:
        print_json([{"name": f.name, "unit": f.unit, "goal": f.goal} for f in FIGURES.values()])
        return
    table = Table("figure", "goal", "what is measured")
    for figure in FIGURES.values():
        table.add_row(figure.name, figure.goal, figure.about)
    out.print(table)


def _print(result: dict[str, Any]) -> None:
    from lorafleet.bench.figure import machine

    if result.get("not_measured"):
        out.print(f"{result['name']}: [yellow]not measured[/yellow]: {result['not_measured']}")
        return
    verdict = "[green]holds[/green]" if result["holds"] else "[red]does not hold[/red]"
    baseline = "" if result["baseline"] is None else f", baseline {result['baseline']:.4g}"
    out.print(
        f"{result['name']}: {result['value']:.4g} {result['unit']}{baseline}; "
        f"goal {result['goal']}: {verdict}"
    )
    for key, value in result["details"].items():
        out.print(f"  {key}: {value}", markup=False)
    out.print(f"  machine: {machine()}", markup=False)
