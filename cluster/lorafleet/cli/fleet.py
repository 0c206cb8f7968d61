"""`lorafleet up | down | status | doctor`: a fleet on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from lorafleet.cli.model import compile_progress
from lorafleet.cli.output import GatewayOption, JsonOption, err, out, print_json
from lorafleet.core import home
from lorafleet.core.errors import Internal, LorafleetError

_DETACH_TIMEOUT_S = 600.0
_DOWN_TIMEOUT_S = 90.0


def up(
    model: Annotated[
        Path | None,
        typer.Option(help="Compiled model, GGUF file or HuggingFace directory; else the default."),
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, help="Replicas; the cores are divided among them.")
    ] = 2,
    port: Annotated[int, typer.Option(help="Inference port; 0 picks a free one.")] = 8470,
    admin_port: Annotated[int, typer.Option(help="Registry port; 0 picks a free one.")] = 8471,
    adapter_pages: Annotated[
        int, typer.Option(help="Rank pages of each replica (8 rank rows each).")
    ] = 256,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when it is ready.")
    ] = False,
) -> None:
    """Start Redis, the registry, the replicas and the gateway; Ctrl-C stops them.

    Example: `lorafleet up --detach --replicas 2`
    """
    from lorafleet.compiler import ensure_compiled
    from lorafleet.fleet import FleetOptions, FleetState, Supervisor

    with compile_progress("compile") as progress:
        directory = ensure_compiled(model, progress=progress)
    if detach:
        _detach(directory, replicas, port, admin_port, adapter_pages)
        state = FleetState.read()
        assert state is not None
        _print_addresses(state.gateway, state.admin, state.logs_dir)
        return
    options = FleetOptions(
        model_dir=directory,
        replicas=replicas,
        gateway=f"127.0.0.1:{port}",
        admin=f"127.0.0.1:{admin_port}",
        engine={"num_adapter_pages": adapter_pages},
    )

    def report(line: str) -> None:
        stop_on_sigterm()
        err.print(f"[dim]·[/dim] {line}")

    supervisor = Supervisor(options, report=report)
    try:
        state = supervisor.start()
        _print_addresses(state.gateway, state.admin, state.logs_dir)
        while True:
            time.sleep(0.5)
            supervisor.watch()
    except KeyboardInterrupt:
        err.print("[dim]·[/dim] stopping")
    finally:
        ignore_signals()
        supervisor.stop()


def down(json: JsonOption = False) -> None:
    """Stop the fleet that runs on this machine."""
    from lorafleet.fleet import FleetState

    state = FleetState.read()
    if state is not None:
        os.kill(state.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + _DOWN_TIMEOUT_S
        while FleetState.read() is not None or _exists(state.pid):
            if time.monotonic() > deadline_s:
                raise Internal(f"process {state.pid} does not stop; see {state.logs_dir}")
            time.sleep(0.1)
    if json:
        print_json({"stopped": state is not None})
    else:
        out.print("stopped" if state is not None else "no fleet is running")


def status(gateway: GatewayOption = None, json: JsonOption = False) -> None:
    """Show the replicas and what they hold."""
    from rich.table import Table

    from lorafleet.sdk import Client

    with Client(gateway=gateway) as client:
        found = client.status()
    if json:
        print_json(found.to_dict())
        return
    out.print(
        f"{found.base_model}  {found.num_adapters} adapters  registry "
        + ("connected" if found.registry_connected else "[red]away[/red]")
    )
    table = Table("replica", "address", "resident", "free pages", "running", "waiting")
    for replica in found.replicas:
        table.add_row(
            replica.replica if replica.connected else f"{replica.replica} (lost)",
            replica.address,
            str(len(replica.resident)),
            f"{replica.free_pages}/{replica.num_pages}",
            str(replica.running),
            str(replica.waiting),
        )
    out.print(table)


def doctor() -> None:
    """Check that this machine has what lorafleet needs."""
    failures = 0
    for name, check in _CHECKS:
        try:
            out.print(f"[green]ok[/green]    {name}: {check()}")
        except Exception as error:
            failures += 1
            message = error.message if isinstance(error, LorafleetError) else str(error)
            out.print(f"[red]no[/red]    {name}: ", end="")
            out.print(message, markup=False)
    if failures:
        raise typer.Exit(1)


def _python() -> str:
    return sys.version.split()[0]


def _tvm() -> str:
    from importlib.metadata import version

    return f"apache-tvm {version('apache-tvm')}"


def _native() -> str:
    from lorafleet.native import kernels_name

    return f"{kernels_name()} kernels"


def _redis() -> str:
    from lorafleet.registry.embedded import find_server, server_version

    server = find_server()
    return f"{server} {'.'.join(map(str, server_version(server)))}"


def _default_model() -> str:
    from lorafleet.compiler import default_source

    return str(default_source())


def _memory() -> str:
    import psutil

    available = psutil.virtual_memory().available / 2**30
    if available < 3:
        raise Internal(f"{available:.1f} GiB are free; two replicas of the default model need 3")
    return f"{available:.1f} GiB free"


_CHECKS = (
    ("python", _python),
    ("tvm", _tvm),
    ("native library", _native),
    ("redis-server", _redis),
    ("default model", _default_model),
    ("memory", _memory),
)


def _detach(directory: Path, replicas: int, port: int, admin_port: int, pages: int) -> None:
    """Start `lorafleet up` in a session of its own and wait until it is ready."""
    from lorafleet.fleet import FleetState

    home.logs_dir().mkdir(parents=True, exist_ok=True)
    log = home.logs_dir() / "up.log"
    command = [
        *(sys.executable, "-m", "lorafleet.cli", "up", "--model", str(directory)),
        *("--replicas", str(replicas), "--port", str(port), "--admin-port", str(admin_port)),
        *("--adapter-pages", str(pages)),
    ]
    running = FleetState.read()
    with log.open("wb") as file:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    deadline_s = time.monotonic() + _DETACH_TIMEOUT_S
    with err.status("starting the fleet"):
        while time.monotonic() < deadline_s:
            if child.poll() is not None:
                words = log.read_text(errors="replace").strip().splitlines()
                message = words[-1].removeprefix("error: ") if words else f"see {log}"
                raise Internal(message)
            state = FleetState.read()
            if state is not None and running is None and state.pid == child.pid:
                return
            time.sleep(0.1)
    child.terminate()
    raise Internal(f"the fleet did not become ready in time; see {log}")


def _print_addresses(gateway: str, admin: str, logs: str) -> None:
    out.print(f"gateway   {gateway}")
    out.print(f"registry  {admin}")
    out.print(f"logs      {logs}")


def _exists(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stop_on_sigterm() -> None:
    """Make SIGTERM end the command as Ctrl-C does, so that it stops its parts.

    To be called at every stage of a start: Ray takes the signal for itself as it starts.
    """

    def interrupt(number: int, frame: object) -> None:
        del number, frame
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def ignore_signals() -> None:
    """From here on nothing interrupts the stopping of parts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
