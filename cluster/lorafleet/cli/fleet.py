"""`lorafleet up | down | status`: a fleet on this machine."""

from __future__ import annotations

import json as jsonlib
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorafleet.cli.model import compile_progress
from lorafleet.cli.output import GatewayOption, JsonOption, err, out, print_json
from lorafleet.cli.signals import StopSignals
from lorafleet.core import home
from lorafleet.core.errors import Conflict, Internal, InvalidInput, LorafleetError

if TYPE_CHECKING:
    from lorafleet.fleet import FleetOptions, FleetState

_DETACH_TIMEOUT_S = 600.0
_DOWN_TIMEOUT_S = 180.0
_LOOK_S = 0.5
_POLL_S = 0.1


def up(
    model: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="Compiled model, GGUF file or HuggingFace directory; else the default.",
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, help="Replicas; the cores are divided among them.")
    ] = 2,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Inference port; 0 picks a free one.")
    ] = 8470,
    admin_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Registry port; 0 picks a free one.")
    ] = 8471,
    adapter_pages: Annotated[
        int, typer.Option(min=1, help="Rank pages of each replica (8 rank rows each).")
    ] = 256,
    require_keys: Annotated[
        bool,
        typer.Option("--require-keys", help="Callers need an API key; yours is in the home."),
    ] = False,
    allow_source: Annotated[
        list[str] | None,
        typer.Option(help="URL at or below which adapters may be imported from; repeatable."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when it is ready.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Start Redis, the registry, the replicas and the gateway; Ctrl-C stops them.

    Examples: `lorafleet up` runs until Ctrl-C, `lorafleet up --detach` until `lorafleet down`;
    `lorafleet up --model ./llama --replicas 4 --port 9000` serves a model of your own.
    """
    from lorafleet.compiler import ensure_compiled
    from lorafleet.fleet import FleetOptions

    with compile_progress("compile") as progress:
        directory = ensure_compiled(model, progress=progress)
    options = FleetOptions(
        model_dir=directory,
        replicas=replicas,
        gateway=f"127.0.0.1:{port}",
        admin=f"127.0.0.1:{admin_port}",
        require_keys=require_keys,
        allow_sources=tuple(allow_source or ()),
        engine={"num_adapter_pages": adapter_pages},
    )
    if detach:
        _print_state(_detach(options), json)
    else:
        _run(options, json)


def down(json: JsonOption = False) -> None:
    """Stop the fleet that runs on this machine; running requests get a few seconds to finish."""
    from lorafleet.fleet.state import FleetLock

    holder, killed = FleetLock.holder(), FleetLock.left_by()
    if holder is not None:
        with err.status("stopping the fleet"):
            _stop(holder.pid)
    elif killed is not None:
        from lorafleet.core.log import configure
        from lorafleet.fleet.supervisor import end_left

        configure("supervisor", file=home.logs_dir() / "supervisor.log")
        lock = FleetLock()
        lock.take(killed.mark)
        end_left(killed)
        lock.release()
    if json:
        print_json({"stopped": holder is not None, "cleared": killed is not None})
    elif holder is not None:
        out.print("stopped")
    else:
        cleared = "; cleared away what a killed one had left" if killed else ""
        out.print(f"no fleet is running{cleared}")


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


def _run(options: FleetOptions, json: bool) -> None:
    """Run a fleet in this process until a signal."""
    from lorafleet.core.log import configure
    from lorafleet.fleet import STOPPING, Supervisor

    configure("supervisor", file=home.logs_dir() / "supervisor.log")
    with StopSignals() as signals:

        def report(line: str) -> None:
            if line == STOPPING:
                signals.hold()
            err.print(f"[dim]·[/dim] {line}")

        supervisor = Supervisor(options, report=report)
        served = False
        try:
            _print_state(supervisor.start(), json)
            served = True
            while True:
                time.sleep(_LOOK_S)
                supervisor.watch()
        except KeyboardInterrupt:
            if not served:
                raise
        finally:
            supervisor.stop()


def _detach(options: FleetOptions) -> FleetState:
    """Start `lorafleet up` in a session of its own and wait until it is ready."""
    from lorafleet.fleet import FleetState

    logs = home.logs_dir()
    logs.mkdir(parents=True, exist_ok=True)
    result, log = logs / "up.json", logs / "up.log"
    command = [
        *(sys.executable, "-m", "lorafleet.cli", "up", "--json"),
        *("--model", str(options.model_dir), "--replicas", str(options.replicas)),
        *("--port", options.gateway.rpartition(":")[2]),
        *("--admin-port", options.admin.rpartition(":")[2]),
        *("--adapter-pages", str(options.engine["num_adapter_pages"])),
        *(("--require-keys",) if options.require_keys else ()),
        *(f"--allow-source={url}" for url in options.allow_sources),
    ]
    with result.open("wb") as stdout, log.open("wb") as stderr:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        )
    deadline_s = time.monotonic() + _DETACH_TIMEOUT_S
    try:
        with err.status("starting the fleet") as shown:
            while time.monotonic() < deadline_s:
                if child.poll() is not None:
                    raise _failure(result, log)
                state = FleetState.read()
                if state is not None and state.pid == child.pid:
                    return state
                shown.update(_last_line(log) or "starting the fleet")
                time.sleep(_POLL_S)
    except BaseException:
        child.terminate()  # it stops what it has started
        child.wait()
        raise
    child.terminate()
    raise Internal(f"the fleet did not become ready in time; see {log}")


def _failure(result: Path, log: Path) -> LorafleetError:
    """What a detached `up` died of: the error that it printed, or its last words."""
    try:
        error = jsonlib.loads(result.read_text())["error"]
    except (OSError, ValueError, KeyError, TypeError):
        return Internal(f"the fleet did not start: {_last_line(log) or 'it said nothing'}")
    kinds: list[type[LorafleetError]] = [Conflict, InvalidInput]
    kind = next((kind for kind in kinds if kind.code == error["code"]), Internal)
    return kind(error["message"], **error["facts"])


def _stop(pid: int) -> None:
    """Ask a supervisor to stop its fleet, and wait until it has."""
    import psutil

    from lorafleet.fleet.processes import runs

    try:
        supervisor = psutil.Process(pid)
        supervisor.terminate()
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied as error:
        raise Conflict(f"the fleet (process {pid}) is another user's") from error
    deadline_s = time.monotonic() + _DOWN_TIMEOUT_S
    while runs(supervisor):
        if time.monotonic() > deadline_s:
            raise Internal(f"process {pid} does not stop; see {home.logs_dir()}")
        time.sleep(_POLL_S)


def _last_line(log: Path) -> str:
    from lorafleet.fleet.processes import tail

    return tail(log, lines=1).removeprefix("· ")


def _print_state(state: FleetState, json: bool) -> None:
    if json:
        print_json(asdict(state))
        return
    out.print(f"gateway   {state.gateway}")
    out.print(f"registry  {state.admin}")
    out.print(f"logs      {state.logs_dir}")
