"""A whole fleet on one machine: Redis, the registry, Ray with its replicas, and the gateway.

It owns their order, their readiness and their end; what dies is started again. Each part logs to
its own file in the home's `logs`. How a part is run is known by `processes` and `cluster`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from lorafleet.core import home
from lorafleet.core.errors import Conflict, Internal, InvalidInput, LorafleetError
from lorafleet.core.log import get_logger
from lorafleet.core.model import BaseModel
from lorafleet.fleet.cluster import LocalCluster
from lorafleet.fleet.processes import Part, end, marked, marking
from lorafleet.fleet.state import FleetLock, FleetState, Holder
from lorafleet.registry import EmbeddedRedis
from lorafleet.registry.keyring import read_or_make_key
from lorafleet.v1 import fleet_pb2, fleet_pb2_grpc
from lorafleet.wire.auth import bearer
from lorafleet.wire.channel import open_sync_channel

STOPPING = "stopping"
"""What is reported as the parts begin to be stopped; from there on nothing should interrupt."""

# What cannot start says so by itself; this is for what hangs, on a machine however loaded.
_START_TIMEOUT_S = 300.0
_DRAIN_TIMEOUT_S = 60.0
_POLL_S = 0.05

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What to run.

    Parameters
    ----------
    model_dir : Path
        The compiled base model.
    replicas : int
        Number of replicas; the machine's cores are divided among them.
    gateway, admin : str
        `host:port` of the two planes; port 0 picks a free one.
    require_keys : bool
        Whether callers of both planes need an API key; the operator's is in the home.
    allow_sources : tuple of str
        URLs at or below which adapters may be imported from.
    engine : dict
        Fields of EngineOptions for every replica.
    """

    model_dir: Path
    replicas: int = 2
    gateway: str = "127.0.0.1:8470"
    admin: str = "127.0.0.1:8471"
    require_keys: bool = False
    allow_sources: tuple[str, ...] = ()
    engine: dict[str, Any] = field(default_factory=dict)


class Supervisor:
    """Starts and stops a fleet. Use from the thread that lives longest: parts end with it.

    Parameters
    ----------
    options : FleetOptions
        What to run.
    report : callable
        Receives a line for each stage, `STOPPING` for the last one.
    """

    def __init__(
        self, options: FleetOptions, report: Callable[[str], None] = lambda line: None
    ) -> None:
        self._options = options
        self._report = report
        self._mark = uuid.uuid4().hex
        self._lock = FleetLock()
        self._redis = EmbeddedRedis(home.redis_dir())
        self._listen = {"registry": options.admin, "gateway": options.gateway}
        self._parts: tuple[Part, ...] = ()
        self._state: FleetState | None = None
        self._exit = contextlib.ExitStack()

    def start(self) -> FleetState:
        """Start everything and return when the fleet takes requests and every replica is known.

        Raises
        ------
        InvalidInput
            The model directory is incomplete, or an address is malformed.
        Conflict
            A fleet is running in this home already, or a port is in use.
        Internal
            A part does not start; the message has its last words. All others are stopped.
        """
        options = self._options
        BaseModel.read(options.model_dir)
        try:
            before = self._lock.take(self._mark)
            self._exit.callback(self._lock.release)
            if before is not None:
                self._stage("ending what a killed fleet left")
                end_left(before)
            for address in (options.gateway, options.admin):
                _check_free(address)
            with marking(self._mark):
                return self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop everything, in reverse order, and leave no process. A second call does nothing."""
        if self._lock.held:
            self._stage(STOPPING)
        self._exit.close()

    def watch(self) -> None:
        """Start again what has died; call it now and then."""
        with marking(self._mark):
            revived = [part.name for part in self._parts if part.revive()]
            if not self._redis.alive:
                _log.error("redis-server died; starting it again")
                try:
                    self._redis.start()
                    revived.append("redis")
                except LorafleetError as error:  # the fleet serves what it knows without it
                    _log.error("redis-server does not start", error=error.message)
            if revived:
                self._publish()

    def _start(self) -> FleetState:
        options = self._options
        home.logs_dir().mkdir(parents=True, exist_ok=True)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        self._exit.callback(self._end_rest)

        self._stage("starting Redis")
        self._exit.callback(self._redis.stop)
        redis_url = self._redis.start()

        self._stage("starting the registry, the gateway and Ray")
        common = [f"--redis={redis_url}", f"--model-dir={options.model_dir}"]
        common.append(f"--operator-key-file={home.key_file()}")
        own = [f"--blobs={home.blobs_dir()}"]
        own += [f"--allow-source={url}" for url in options.allow_sources]
        own += [] if options.require_keys else ["--no-auth"]
        registry = self._launch_server("registry", [*common, *own])
        replicas = self._launch_replicas(redis_url)
        # Last, so that it is stopped first: the front door closes before what is behind it.
        own = ["--require-keys"] if options.require_keys else []
        gateway = self._launch_server("gateway", [*common, *own])
        for part in (registry, gateway):
            self._listen[part.name] = part.wait(deadline_s)

        self._stage(f"loading {_replicas(options.replicas)}")
        self._wait_known(deadline_s)
        replicas.wait(deadline_s)
        self._exit.callback(FleetState.remove)
        self._state = FleetState(
            pid=os.getpid(),
            gateway=self._listen["gateway"],
            admin=self._listen["registry"],
            redis=redis_url,
            model_dir=str(options.model_dir),
            logs_dir=str(home.logs_dir()),
            replicas=options.replicas,
        )
        state = self._publish()
        self._stage("ready")
        return state

    def _stage(self, line: str) -> None:
        _log.info("stage", stage=line)
        self._report(line)

    def _launch(self, part: Part) -> Part:
        self._exit.callback(part.stop)
        part.start()
        self._parts += (part,)
        return part

    def _launch_server(self, name: str, arguments: list[str]) -> Part:
        """Start a part that listens; started again, it comes back where clients know it to be."""
        address_file = home.run_dir() / f"{name}.address"
        arguments = [*arguments, f"--address-file={address_file}"]
        part = Part(
            name,
            name,
            arguments=lambda: [f"--listen={self._listen[name]}", *arguments],
            ready_file=address_file,
            logs_dir=home.logs_dir(),
        )
        return self._launch(part)

    def _launch_replicas(self, redis_url: str) -> Part:
        options = self._options
        cores = len(os.sched_getaffinity(0))
        app = {
            "model_dir": str(options.model_dir),
            "blobs_dir": str(home.blobs_dir()),
            "redis_url": redis_url,
            "replicas": options.replicas,
            "threads": max(1, cores // options.replicas),
            # Cores are divided by `threads`; Ray need not count them a second time.
            "num_cpus": 0,
            "host": "127.0.0.1",
            "logs_dir": str(home.logs_dir()),
            "engine": options.engine,
        }
        ready_file = home.run_dir() / "replicas.ready"
        arguments = [f"--name={self._mark}", f"--app={json.dumps(app)}"]
        part = Part(
            "replicas",
            "fleet",
            arguments=lambda: [*arguments, f"--ready-file={ready_file}"],
            ready_file=ready_file,
            logs_dir=home.logs_dir(),
            stop_timeout_s=_DRAIN_TIMEOUT_S,
        )
        self._exit.callback(LocalCluster(self._mark).clear)
        return self._launch(part)

    def _publish(self) -> FleetState:
        """Write the state with the processes of now."""
        assert self._state is not None, "watch is for a started fleet"
        processes = {part.name: part.pid for part in self._parts if part.pid is not None}
        if self._redis.pid is not None:
            processes["redis"] = self._redis.pid
        self._state = replace(self._state, processes=processes)
        self._state.write()
        return self._state

    def _wait_known(self, deadline_s: float) -> None:
        """Wait until the gateway has heard from every replica."""
        known, wanted = 0, self._options.replicas
        key = read_or_make_key(home.key_file())
        with open_sync_channel(self._listen["gateway"]) as channel:
            fleet: Any = fleet_pb2_grpc.FleetStub(channel)  # type: ignore[no-untyped-call]
            while time.monotonic() < deadline_s:
                for part in self._parts:
                    part.check()
                with contextlib.suppress(grpc.RpcError):
                    status = fleet.GetStatus(
                        fleet_pb2.GetStatusRequest(), timeout=1, metadata=bearer(key)
                    )
                    before, known = known, sum(r.connected for r in status.replicas)
                    if known >= wanted and status.registry_connected:
                        return
                    if known > before:
                        self._stage(f"{known} of {_replicas(wanted)} loaded")
                time.sleep(_POLL_S)
        raise Internal(
            f"the gateway knows {known} of {_replicas(wanted)} after {_START_TIMEOUT_S:.0f} s; see "
            f"{home.logs_dir()}"
        )

    def _end_rest(self) -> None:
        """End what ought to have ended by now."""
        rest = end(lambda: marked(self._mark))
        if rest:
            _log.warning("processes were left and have been ended", processes=rest)


def end_left(holder: Holder) -> int:
    """End what a killed supervisor has left in this home; returns how many processes that were."""
    left = end(lambda: marked(holder.mark), _DRAIN_TIMEOUT_S) + LocalCluster(holder.mark).clear()
    if home.redis_dir().exists():
        # Whoever starts a Redis there takes the place of one whose owner has died.
        with EmbeddedRedis(home.redis_dir()):
            pass
    FleetState.remove()
    return left


def _replicas(count: int) -> str:
    return f"{count} replica" + ("s" if count != 1 else "")


def _check_free(address: str) -> None:
    """Find a port in use now, rather than after everything else has started."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidInput(f"{address!r}: expected host:port", field="address")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except (OSError, OverflowError) as error:
            raise Conflict(
                f"cannot listen on {address}: {error}; stop what uses the port, or choose another",
                address=address,
            ) from error
