"""A whole fleet on one machine: Redis, the registry, Ray with its replicas, and the gateway.

It owns their order, their readiness and their end; a gateway or registry process that dies is
started again. Each part logs to its own file in the home's `logs`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorafleet.core import home
from lorafleet.core.errors import Conflict, Internal
from lorafleet.core.log import get_logger
from lorafleet.fleet.state import FleetState
from lorafleet.registry import EmbeddedRedis

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.05
_OBJECT_STORE_BYTES = 128 << 20  # no request passes through Ray's object store

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
    engine : dict
        Fields of EngineOptions for every replica.
    """

    model_dir: Path
    replicas: int = 2
    gateway: str = "127.0.0.1:8470"
    admin: str = "127.0.0.1:8471"
    engine: dict[str, Any] = field(default_factory=dict)


class Supervisor:
    """Starts and stops a fleet. Use from one thread.

    Parameters
    ----------
    options : FleetOptions
        What to run.
    report : callable
        Receives a line for each stage.
    """

    def __init__(
        self, options: FleetOptions, report: Callable[[str], None] = lambda line: None
    ) -> None:
        self._options = options
        self._report = report
        self._redis = EmbeddedRedis(home.redis_dir())
        self._processes: dict[str, _Child] = {}
        self._exit = contextlib.ExitStack()

    def start(self) -> FleetState:
        """Start everything and return when the fleet takes requests.

        Raises
        ------
        Conflict
            A fleet is running in this home already, or a port is in use.
        Internal
            A part does not start; the message has the end of its log.
        """
        running = FleetState.read()
        if running is not None:
            raise Conflict(
                f"a fleet is running already (process {running.pid}, gateway {running.gateway}); "
                "stop it with `lorafleet down`"
            )
        with contextlib.ExitStack() as stack:
            state = self._start(stack)
            self._exit = stack.pop_all()
        return state

    def stop(self) -> None:
        """Stop everything in reverse order."""
        self._exit.close()

    def watch(self) -> None:
        """Start again what has died; call it now and then."""
        if not self._redis.alive:
            _log.error("redis-server died; starting it again")
            self._redis.start()
        for child in self._processes.values():
            child.revive()

    def _start(self, stack: contextlib.ExitStack) -> FleetState:
        options, logs = self._options, home.logs_dir()
        logs.mkdir(parents=True, exist_ok=True)

        self._report("starting Redis")
        redis_url = self._redis.start()
        stack.callback(self._redis.stop)

        self._report("starting the registry and the gateway")
        common = [f"--redis={redis_url}", f"--model-dir={options.model_dir}"]
        registry = self._launch(
            stack, "registry", options.admin, [*common, f"--blobs={home.blobs_dir()}"]
        )
        gateway = self._launch(stack, "gateway", options.gateway, common)

        self._report("starting Ray")
        self._start_ray(stack)
        self._report(f"loading {options.replicas} replicas")
        self._run_replicas(stack, redis_url)
        # The front door closes before what is behind it; its own entry then finds it stopped.
        stack.callback(gateway.stop)

        self._report("waiting for the registry and the gateway")
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        state = FleetState(
            pid=os.getpid(),
            admin=registry.wait(deadline_s),
            gateway=gateway.wait(deadline_s),
            redis=redis_url,
            model_dir=str(options.model_dir),
            logs_dir=str(logs),
            replicas=options.replicas,
        )
        self._wait_ready(state.gateway, gateway, deadline_s)
        state.write()
        stack.callback(FleetState.remove)
        self._report("ready")
        return state

    def _launch(
        self, stack: contextlib.ExitStack, name: str, listen: str, arguments: list[str]
    ) -> _Child:
        child = _Child(name, listen, arguments)
        child.spawn()
        stack.callback(child.stop)
        self._processes[name] = child
        return child

    def _start_ray(self, stack: contextlib.ExitStack) -> None:
        # Before the import: Ray reads these once.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="error",
        )
        stack.callback(ray.shutdown)

    def _run_replicas(self, stack: contextlib.ExitStack, redis_url: str) -> None:
        from ray import serve
        from ray.serve.config import HTTPOptions, ProxyLocation

        from lorafleet.fleet.app import APP, build_app

        options = self._options
        # No request passes Serve's proxy; what little it needs listens on a free port.
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location=ProxyLocation.Disabled, http_options=HTTPOptions(port=0))
        # Waits for the replicas to drain; Serve's own processes end with Ray.
        stack.callback(serve.delete, APP)
        cores = len(os.sched_getaffinity(0))
        application = build_app(
            {
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
        )
        try:
            serve.run(application, name=APP, route_prefix=None)
        except Exception as error:
            raise Internal(f"the replicas do not start: {error}") from error

    def _wait_ready(self, address: str, gateway: _Child, deadline_s: float) -> None:
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        from lorafleet.wire.channel import open_sync_channel

        with open_sync_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline_s:
                gateway.check()
                try:
                    reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                except grpc.RpcError:
                    pass
                time.sleep(_POLL_S)
        raise Internal(f"the gateway is not ready; see {gateway.log_file}")


class _Child:
    """A process of ours that writes its address to a file; `python -m lorafleet.<name>`."""

    def __init__(self, name: str, listen: str, arguments: list[str]) -> None:
        self.name = name
        self.log_file = home.logs_dir() / f"{name}.log"
        self._listen = listen
        self._arguments = arguments
        self._address_file = home.run_dir() / f"{name}.address"
        self._errors = home.logs_dir() / f"{name}.stderr"
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> None:
        self._address_file.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            f"lorafleet.{self.name}",
            f"--listen={self._listen}",
            f"--address-file={self._address_file}",
            f"--log-file={self.log_file}",
            *self._arguments,
        ]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for the supervisor, who stops it in order
                preexec_fn=_end_with_parent,
            )

    def wait(self, deadline_s: float) -> str:
        """Return its address once it serves."""
        while time.monotonic() < deadline_s:
            self.check()
            with contextlib.suppress(OSError):
                # From now on it comes back where clients know it to be.
                self._listen = self._address_file.read_text().strip()
                return self._listen
            time.sleep(_POLL_S)
        raise Internal(f"{self.name} does not start; see {self.log_file}")

    def check(self) -> None:
        """Raise Internal, with its last words, if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            words = self._errors.read_text(errors="replace").strip().splitlines()
            raise Internal(f"{self.name} ended: {words[-1] if words else 'it said nothing'}")

    def revive(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            _log.error("process died; starting it again", process=self.name)
            self.spawn()

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def _end_with_parent() -> None:
    """In a new process: be told to end when the supervisor is killed. Linux."""
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_pdeathsig = 1
    libc.prctl(pr_set_pdeathsig, signal.SIGTERM)
