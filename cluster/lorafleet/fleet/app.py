"""The replicas as a Ray Serve application.

Serve starts, checks, restarts and stops replicas; no request passes through it. `build_app` is also
what a RayService on Kubernetes names as its import path.
"""

from __future__ import annotations

import uuid
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
        self._grace_s = float(arguments.get("grace_s", 10.0))
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
    engine = {**asdict(EngineOptions()), **arguments.get("engine", {}), "num_threads": threads}
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=int(arguments.get("replicas", 1)),
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=float(arguments.get("grace_s", 10.0)) + 5.0,
        ray_actor_options={
            "num_cpus": float(arguments.get("num_cpus", threads)),
            "runtime_env": {"env_vars": environment},
        },
    )(ReplicaActor)
    return deployment.bind({**arguments, "engine": engine})
