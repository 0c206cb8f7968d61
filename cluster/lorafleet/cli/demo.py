"""`lorafleet demo`: the main job, from nothing to many adapters on one model, in one command."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lorafleet.cli.fleet import ignore_signals, stop_on_sigterm
from lorafleet.cli.model import compile_progress
from lorafleet.cli.output import err, out
from lorafleet.core import home
from lorafleet.core.errors import LorafleetError
from lorafleet.sdk import Client, Completion, Delta, Event, Sampling
from lorafleet.sdk.client import collect


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

    began_s = time.monotonic()
    directories = example_adapters(adapters)
    with compile_progress("compile") as progress:
        model_dir = ensure_compiled(progress=progress)

    def report(line: str) -> None:
        stop_on_sigterm()
        err.print(f"[dim]{time.monotonic() - began_s:5.1f} s  {line}[/dim]")

    with tempfile.TemporaryDirectory(prefix="lorafleet-demo-") as folder:
        os.environ[home.VARIABLE] = folder
        supervisor = Supervisor(
            FleetOptions(
                model_dir=model_dir,
                replicas=replicas,
                gateway="127.0.0.1:0",
                admin="127.0.0.1:0",
            ),
            report=report,
        )
        try:
            state = supervisor.start()
            with Client(gateway=state.gateway, admin=state.admin) as client:
                for name, directory in directories.items():
                    version, _ = client.push_adapter(directory, name=name)
                    out.print(
                        f"pushed [bold]{name}[/bold] {version.id[:19]}, rank {version.max_rank}"
                    )
                _ask_all(client, ["base", *directories], QUESTIONS, rounds)
        finally:
            report("stopping")
            ignore_signals()
            supervisor.stop()
    out.print(f"done in {time.monotonic() - began_s:.0f} s")


def _ask_all(client: Client, names: list[str], questions: tuple[str, ...], rounds: int) -> None:
    """All adapters at once, `rounds` times: texts as they stream in, then who served them."""
    served = Table("adapter", "replica", "resident", "first token", "tokens/s", title="who served")
    with ThreadPoolExecutor(len(names)) as pool:
        for turn in range(rounds):
            streams = [
                _Stream(name, questions[(turn + i) % len(questions)])
                for i, name in enumerate(names)
            ]
            jobs = [pool.submit(stream.run, client) for stream in streams]
            with Live(console=out, auto_refresh=False, transient=False) as live:
                while True:
                    done = all(job.done() for job in jobs)
                    live.update(_texts(streams), refresh=True)
                    if done:
                        break
                    time.sleep(0.1)
            if not out.is_terminal:
                out.print()  # Live ends its last line on terminals only
            for stream, job in zip(streams, jobs, strict=True):
                answer = job.result()
                served.add_row(
                    stream.name,
                    answer.replica,
                    "yes" if answer.resident else "no, loaded",
                    f"{1000 * answer.ttft_s:.0f} ms",
                    f"{answer.tokens_per_s:.1f}",
                )
    out.print(served)
    try:
        client.chat([("user", "Hello")], adapter="no-such-adapter")
    except LorafleetError as error:
        out.print(
            f"an unknown adapter is never answered by the base: {error.code}: {error.message}"
        )


class _Stream:
    """One request, and its text so far."""

    def __init__(self, name: str, question: str) -> None:
        self.name = name
        self.question = question
        self.text = ""

    def run(self, client: Client) -> Completion:
        events = client.chat_stream(
            [("user", self.question)], adapter=self.name, sampling=Sampling(max_tokens=40)
        )
        return collect(self._seen(events))

    def _seen(self, events: Iterator[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Delta):
                self.text += event.text
            yield event


def _texts(streams: list[_Stream]) -> Table:
    table = Table.grid(padding=(0, 1))
    for stream in streams:
        table.add_row(
            Text(stream.name, style="bold cyan"),
            Text(stream.question, style="dim"),
            Text(" ".join(stream.text.split())),
        )
    return table
