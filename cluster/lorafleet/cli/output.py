"""What commands print and how they fail: one red line, or JSON, and an exit code.

Exit codes: 0 done, 1 an error of ours, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from lorafleet.core.errors import LorafleetError

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

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


def run_command(app: Callable[[], None]) -> None:
    """Run the command line; turn our errors into a line and an exit code."""
    try:
        app()
    except LorafleetError as error:
        if os.environ.get("LORAFLEET_DEBUG"):
            raise
        if "--json" in sys.argv:
            print_json(
                {"error": {"code": error.code, "message": error.message, "facts": error.facts}}
            )
        else:
            err.print("[red]error:[/red]", end=" ")
            err.print(error.message, markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
