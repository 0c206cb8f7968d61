"""`lorafleet doctor`: whether this machine has what lorafleet needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import typer

from lorafleet.cli.output import JsonOption, out, print_json
from lorafleet.core import home
from lorafleet.core.errors import Conflict, Internal, LorafleetError

_PORTS = (8470, 8471)
_NEEDED_GIB = 3.0


def doctor(json: JsonOption = False) -> None:
    """Check that this machine has what lorafleet needs; exit 1 if something is missing.

    Example: `lorafleet doctor --json`
    """
    results = []
    for name, check in _CHECKS.items():
        try:
            found, fine = check(), True
        except Exception as error:
            found, fine = error.message if isinstance(error, LorafleetError) else str(error), False
        results.append({"check": name, "ok": fine, "found": found})
        if not json:
            out.print("[green]ok[/green]  " if fine else "[red]no[/red]  ", end="")
            out.print(f"{name}: {found}", markup=False)
    if json:
        print_json(results)
    if not all(result["ok"] for result in results):
        raise typer.Exit(1)


def _python() -> str:
    return sys.version.split()[0]


def _tvm() -> str:
    from importlib.metadata import version

    return f"apache-tvm {version('apache-tvm')}, apache-tvm-ffi {version('apache-tvm-ffi')}"


def _native() -> str:
    from lorafleet.native import kernels_name

    return f"loads; {kernels_name()} kernels"


def _ray() -> str:
    from importlib.metadata import version

    return f"ray {version('ray')}"


def _redis() -> str:
    from lorafleet.registry.embedded import find_server, server_version

    server = find_server()
    return f"{server} {'.'.join(map(str, server_version(server)))}"


def _default_model() -> str:
    from lorafleet.compiler import default_source

    return str(default_source())


def _compiled_models() -> str:
    from lorafleet.core.model import DESCRIPTION_FILE

    found = sorted(path.parent.name for path in home.models_dir().glob(f"*/{DESCRIPTION_FILE}"))
    return ", ".join(found) or "none yet; the first `lorafleet up` or `compile` makes one"


def _home() -> str:
    folder = home.home()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise Internal(f"{folder} cannot be written; set {home.VARIABLE} to another folder")
    return f"{folder} can be written"


def _ports() -> str:
    import socket

    from lorafleet.fleet.state import FleetState

    state = FleetState.read()
    ours = [] if state is None else [state.gateway, state.admin]
    for port in _PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if f"127.0.0.1:{port}" in ours:
                    continue
                raise Conflict(
                    f"127.0.0.1:{port}: {error.strerror}; choose others with --port and "
                    "--admin-port"
                ) from error
    return "used by the fleet that runs here" if ours else "8470 and 8471 are free"


def _memory() -> str:
    import psutil

    available = psutil.virtual_memory().available / 2**30
    if available < _NEEDED_GIB:
        raise Internal(
            f"{available:.1f} GiB are free; two replicas of the default model need {_NEEDED_GIB:g}"
        )
    return f"{available:.1f} GiB free, {len(os.sched_getaffinity(0))} cores"


_CHECKS: dict[str, Callable[[], str]] = {
    "python": _python,
    "tvm": _tvm,
    "native library": _native,
    "ray": _ray,
    "redis-server": _redis,
    "default model": _default_model,
    "compiled models": _compiled_models,
    "home": _home,
    "ports": _ports,
    "memory": _memory,
}
