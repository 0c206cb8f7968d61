"""`lorafleet demo`: the main job, from nothing to many adapters on one model, in one command."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from lorafleet.cli.model import compile_progress
from lorafleet.cli.output import err, out
from lorafleet.core import home
from lorafleet.core.errors import LorafleetError

_COLOURS = ("white", "cyan", "yellow", "green", "magenta", "blue")


def demo(
    adapters: Annotated[
        Path | None, typer.Option(help="Folder of adapter folders; the examples if not given.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of the base model.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Requests to each adapter.")] = 3,
) -> None:
    """Compile the default model, start a fleet, push adapters, ask them all at once, stop.

    It uses ports and a state of its own, so a fleet that runs already is left alone.
    """
    from lorafleet.bench.examples import QUESTIONS, example_adapters
    from lorafleet.compiler import ensure_compiled
    from lorafleet.fleet import FleetOptions, Supervisor
    from lorafleet.sdk import Client

    began_s = time.monotonic()
    directories = example_adapters(adapters)
    with compile_progress("compile") as progress:
        model_dir = ensure_compiled(progress=progress)
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="lorafleet-demo-") as folder:
        os.environ[home.VARIABLE] = folder
        supervisor = Supervisor(
            FleetOptions(
                model_dir=model_dir,
                replicas=replicas,
                gateway="127.0.0.1:0",
                admin="127.0.0.1:0",
            ),
            report=lambda line: err.print(f"[dim]{time.monotonic() - began_s:5.1f} s  {line}[/dim]"),
        )
        try:
            state = supervisor.start()
            with Client(gateway=state.gateway, admin=state.admin) as client:
                for name, directory in directories.items():
                    version, _ = client.push_adapter(directory, name=name)
                    out.print(f"pushed [bold]{name}[/bold] {version.id[:19]}, rank {version.max_rank}")
                _ask_all(client, ["base", *directories], QUESTIONS, rounds)
        finally:
            err.print(f"[dim]{time.monotonic() - began_s:5.1f} s  stopping[/dim]")
            supervisor.stop()
    out.print(f"done in {time.monotonic() - began_s:.0f} s")


def _ask_all(client: object, names: list[str], questions: tuple[str, ...], rounds: int) -> None:
    """All adapters at once, `rounds` times; texts as they end, then a table."""
    from rich.table import Table

    from lorafleet.sdk import Client, Completion, Sampling

    assert isinstance(client, Client)
    colours = dict(zip(names, _COLOURS * len(names), strict=False))
    table = Table("request", "replica", "resident", "first token", "tokens/s", title="who served")
    printing = threading.Lock()

    def ask(name: str, question: str) -> tuple[str, Completion]:
        answer = client.chat(
            [("user", question)], adapter=name, sampling=Sampling(max_tokens=40)
        )
        with printing:
            out.print(f"[{colours[name]}]{name:>8}[/] [dim]{question}[/dim] ", end="")
            out.print(answer.text.strip(), markup=False)
        return name, answer

    with ThreadPoolExecutor(2 * len(names)) as pool:
        for turn in range(rounds):
            asked = [(name, questions[(turn + i) % len(questions)]) for i, name in enumerate(names)]
            for name, answer in pool.map(lambda pair: ask(*pair), asked):
                table.add_row(
                    f"[{colours[name]}]{name}[/]",
                    answer.replica,
                    "yes" if answer.resident else "no, loaded",
                    f"{1000 * answer.ttft_s:.0f} ms",
                    f"{answer.tokens_per_s:.1f}",
                )
    out.print(table)
    try:
        client.chat([("user", "Hello")], adapter="no-such-adapter")
    except LorafleetError as error:
        out.print(f"an unknown adapter is never answered by the base: {error.code}: {error.message}")


def _interrupt(number: int, frame: object) -> None:
    del number, frame
    raise KeyboardInterrupt
