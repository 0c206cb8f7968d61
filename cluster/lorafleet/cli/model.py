"""`lorafleet compile`: base models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from lorafleet.cli.output import JsonOption, err, out, print_json
from lorafleet.core.model import BaseModel


@contextmanager
def compile_progress(title: str) -> Iterator[Callable[[str, float], None]]:
    """A progress bar for a compile; shown once there is something to compile."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err) as bar:
        task = bar.add_task(title, total=1.0, visible=False)
        yield lambda stage, done: bar.update(
            task, description=f"{title}: {stage}", completed=done, visible=True
        )


def compile_(
    source: Annotated[
        Path | None,
        typer.Argument(
            exists=True,
            help="A .gguf file or a HuggingFace directory (config.json, safetensors, "
            "tokenizer.json); the default base model, SmolLM2-135M-Instruct, if not given.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory to write; a cached one if not given."),
    ] = None,
    target: Annotated[str, typer.Option(help="Code to generate: llvm.")] = "llvm",
    lora: Annotated[
        bool, typer.Option("--lora/--no-lora", help="Whether the model can carry adapters.")
    ] = True,
    max_context: Annotated[int, typer.Option(help="Cap of the context window, in tokens.")] = 8192,
    inspect: Annotated[bool, typer.Option(help="Print every LoRA site of the result.")] = False,
    json: JsonOption = False,
) -> None:
    """Compile a base model into a directory that replicas serve.

    Example: `lorafleet compile ./Llama-3.2-1B --output ./llama`
    """
    from lorafleet.compiler import CompileOptions, compile_model, ensure_compiled
    from lorafleet.compiler.source import default_source

    options = CompileOptions(target=target, lora=lora, max_context=max_context)
    with compile_progress("compile") as progress:
        if output is not None:
            compile_model(source or default_source(), output, options=options, progress=progress)
            directory = output
        else:
            directory = ensure_compiled(source, options=options, progress=progress)
    base = BaseModel.read(directory)
    if json:
        print_json(
            {"directory": str(directory), "digest": base.digest, "num_sites": len(base.sites)}
        )
        return
    out.print(f"{base.name}: {len(base.sites)} LoRA sites, {base.context_window} tokens of context")
    out.print(str(directory), markup=False)
    if inspect:
        _print_sites(base)


def _print_sites(base: BaseModel) -> None:
    from rich.table import Table

    table = Table("site", "in", "out", "parts (output rows)")
    for site in base.sites:
        parts = ", ".join(
            f"{part.source.rsplit('.', 1)[-1]} {part.out_start}:{part.out_end}"
            for part in site.parts
        )
        table.add_row(site.name, str(site.in_features), str(site.out_features), parts)
    out.print(table)
