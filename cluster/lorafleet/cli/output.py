"""What commands print and how they fail: one red line, or JSON, and an exit code.

Exit codes: 0 done, 1 an error of ours, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

from lorafleet.core.errors import Internal, LorafleetError

_PIPE_WIDTH = 200
"""Columns of a table when nobody's terminal says how many there are."""


def _width(stream: TextIO) -> int | None:
    return None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH


out = Console(highlight=False, soft_wrap=True, width=_width(sys.stdout))
err = Console(stderr=True, highlight=False, soft_wrap=True, width=_width(sys.stderr))

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
GatewayOption = Annotated[
    str | None,
    typer.Option(
        "--gateway",
        envvar="LORAFLEET_GATEWAY",
        metavar="HOST:PORT",
        help="Inference address; the fleet that runs on this machine if not given.",
    ),
]
AdminOption = Annotated[
    str | None,
    typer.Option(
        "--admin",
        envvar="LORAFLEET_ADMIN",
        metavar="HOST:PORT",
        help="Registry address; the fleet that runs on this machine if not given.",
    ),
]


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_json_line(value: Any) -> None:
    """One JSON document on one line, at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def run_command(app: Callable[[], None]) -> None:
    """Run the command line; turn errors into a line and an exit code."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output, like `head`, has seen enough. Nothing is left to be flushed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if os.environ.get("LORAFLEET_DEBUG"):
            raise
        known = error if isinstance(error, LorafleetError) else _unexpected(error)
        if "--json" in sys.argv:
            print_json(
                {"error": {"code": known.code, "message": known.message, "facts": known.facts}}
            )
        else:
            err.print("[red]error:[/red]", end=" ")
            err.print(known.message, markup=False)
        sys.exit(1)


def _unexpected(error: Exception) -> LorafleetError:
    """A bug of ours, or a machine that fails us."""
    return Internal(
        f"{type(error).__name__}: {error} (LORAFLEET_DEBUG=1 shows where)",
        exception=type(error).__name__,
    )
