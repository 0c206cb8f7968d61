"""`lorafleet demo`: the main job, from nothing to many adapters on one model, in one command.

It owns the order of the show; `asking` sends the requests and shows the answers.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from lorafleet.cli.model import compile_progress
from lorafleet.cli.output import err, out
from lorafleet.cli.signals import StopSignals
from lorafleet.core import home


def demo(
    model: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="Compiled model, GGUF file or HuggingFace directory; else the default.",
        ),
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option(help="Folder of adapter folders; the examples if not given.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of the base model.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Requests to each adapter.")] = 3,
) -> None:
    """Compile the default model, start a fleet, push adapters, ask them all at once, stop.

    It uses ports and a state of its own, so a fleet that runs already is left alone.

    Example: `lorafleet demo --replicas 2 --rounds 3`
    """
    from lorafleet.bench.examples import example_adapters
    from lorafleet.compiler import ensure_compiled

    began_s = time.monotonic()
    directories = example_adapters(adapters)
    with compile_progress("compile") as progress:
        model_dir = ensure_compiled(model, progress=progress)
    folder = Path(tempfile.mkdtemp(prefix="lorafleet-demo-"))
    before = os.environ.get(home.VARIABLE)
    os.environ[home.VARIABLE] = str(folder)
    try:
        _show(model_dir, directories, replicas=replicas, rounds=rounds, began_s=began_s)
    except Exception:
        err.print(f"[dim]what the parts logged is in {home.logs_dir()}[/dim]")
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if before is None:
            del os.environ[home.VARIABLE]
        else:
            os.environ[home.VARIABLE] = before
    shutil.rmtree(folder, ignore_errors=True)
    out.print(f"done in {time.monotonic() - began_s:.0f} s")


def _show(
    model_dir: Path, adapters: dict[str, Path], *, replicas: int, rounds: int, began_s: float
) -> None:
    """Start a fleet, push, ask, stop."""
    from lorafleet.bench.examples import QUESTIONS
    from lorafleet.cli.asking import ask_all, ask_unknown
    from lorafleet.core.log import configure
    from lorafleet.fleet import STOPPING, FleetOptions, Supervisor
    from lorafleet.sdk import Client

    configure("supervisor", file=home.logs_dir() / "supervisor.log")
    options = FleetOptions(
        model_dir=model_dir, replicas=replicas, gateway="127.0.0.1:0", admin="127.0.0.1:0"
    )
    with StopSignals() as signals:

        def report(line: str) -> None:
            if line == STOPPING:
                signals.hold()
            err.print(f"[dim]{time.monotonic() - began_s:5.1f} s  {line}[/dim]")

        supervisor = Supervisor(options, report=report)
        try:
            state = supervisor.start()
            with Client(gateway=state.gateway, admin=state.admin) as client:
                for name, directory in adapters.items():
                    version, _ = client.push_adapter(directory, name=name)
                    out.print(
                        f"pushed [bold]{name}[/bold] {version.id[:19]}, rank {version.max_rank}"
                    )
                ask_all(client, ["base", *adapters], QUESTIONS, rounds)
                ask_unknown(client)
        finally:
            supervisor.stop()
