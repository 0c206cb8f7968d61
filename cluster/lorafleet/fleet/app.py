"""The replicas as a Ray Serve application.

Serve starts, checks, restarts and stops replicas; no request passes through it. `build_app` is also
what a RayService on Kubernetes names as its import path.
"""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray import serve

from lorafleet.core.errors import LorafleetError
from lorafleet.core.log import configure
from lorafleet.engine import EngineOptions
from lorafleet.fleet.replica import Replica, ReplicaOptions

APP = "lorafleet"
DEPLOYMENT = "replica"

_GRACE_S = 10.0

# A replica that cannot start is tried once more, in case it was the machine's state; then `deploy`
# fails and says why, rather than after Serve's twenty tries.
_START_TRIES = 2


class ReplicaActor:
    """One replica as Serve's callable; `arguments` are those of `build_app`."""

    async def __init__(self, arguments: dict[str, Any]) -> None:  # type: ignore[misc]
        replica_id = f"replica-{uuid.uuid4().hex[:8]}"
        logs = arguments.get("logs_dir")
        configure(replica_id, file=Path(logs) / f"{replica_id}.log" if logs else None)
        host = arguments.get("host")
        if host is None:
            import ray.util

            host = ray.util.get_node_ip_address()
        self._replica = Replica(
            ReplicaOptions(
                replica_id=replica_id,
                model_dir=Path(arguments["model_dir"]),
                blobs_dir=Path(arguments["blobs_dir"]),
                redis_url=arguments["redis_url"],
                host=host,
                engine=EngineOptions(**arguments.get("engine", {})),
            )
        )
        self._grace_s = float(arguments.get("grace_s", _GRACE_S))
        with _without("torch"):
            import tvm_ffi  # noqa: F401
        try:
            await self._replica.start()
        except LorafleetError as error:
            raise RuntimeError(error.message) from error

    async def check_health(self) -> None:
        self._replica.check_health()

    async def __call__(self) -> str:
        """Requests go to the replica's own port; Serve's path only tells that it is there."""
        return "ok"

    async def __del__(self) -> None:
        await self._replica.stop(self._grace_s)


def build_app(arguments: dict[str, Any]) -> serve.Application:
    """Describe the application.

    Parameters
    ----------
    arguments : dict
        `model_dir`, `blobs_dir`, `redis_url`: where things are. `replicas` (1), `threads` of each
        (1), `num_cpus` that Ray reserves for each (`threads`), `host` under which gateways reach
        the replicas (the node's address), `logs_dir` (standard error), `grace_s` for running
        streams at the end (10), `engine`: fields of EngineOptions.
    """
    threads = int(arguments.get("threads", 1))
    environment = {
        "TVM_NUM_THREADS": str(threads),
        "TVM_USE_RUNTIME_LIB": "1",  # replicas need no compiler: half the start, a third the memory
        "OMP_NUM_THREADS": str(threads),
    }
    chosen = {**asdict(EngineOptions()), **arguments.get("engine", {}), "num_threads": threads}
    engine = asdict(EngineOptions(**chosen))  # what is wrong is found here, not on the replicas
    grace_s = float(arguments.get("grace_s", _GRACE_S))
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=int(arguments.get("replicas", 1)),
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=grace_s + 5.0,
        max_constructor_retry_count=_START_TRIES,
        ray_actor_options={
            "num_cpus": float(arguments.get("num_cpus", threads)),
            "runtime_env": {"env_vars": environment},
        },
    )(ReplicaActor)
    return deployment.bind({**arguments, "engine": engine})


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
    """Make a module look absent while the block runs, unless it is imported already.

    tvm_ffi imports torch wherever it is installed: four seconds and 250 MB of each replica, for an
    exchange of tensors that never happens here.
    """
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]
