"""A Ray cluster of this machine alone, started and stopped with the fleet, and its replicas.

It owns what Ray is told: no dashboard, no telemetry, a small object store, files in a folder of its
own. It knows what `app` deploys and nothing of the parts around it. Importing it does not import
Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import psutil

from lorafleet.core.errors import Internal, LorafleetError
from lorafleet.core.log import get_logger
from lorafleet.fleet.processes import end, runs, using

_OBJECT_STORE_BYTES = 128 << 20  # no request passes through Ray's object store

# Ray puts sockets below its folder, whose whole paths must stay within 107 bytes.
_LONGEST_TEMPORARY = 20

_START_TRIES = 2

_VITAL = ("gcs_server", "raylet")

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # A loaded machine is no reason to give up.
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_raylet_client_num_connect_attempts": "60",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Replicas have an environment of their own, so a worker started in advance serves nobody.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}

_log = get_logger(__name__)


class LocalCluster:
    """Ray on this machine. Use from one thread; one at a time in a process.

    Parameters
    ----------
    name : str
        Distinguishes its folder from those of others; whoever knows it can `clear` what is left.
    """

    def __init__(self, name: str) -> None:
        self._folder = _folder(name)
        self._running = False
        self._deployed = False
        self._vital: list[psutil.Process] = []

    @property
    def alive(self) -> bool:
        """Whether Ray's own processes run; without one of them nothing looks after the replicas."""
        return self._running and all(runs(process) for process in self._vital)

    def start(self) -> None:
        """Start Ray, which takes the SIGTERM handler of this process for itself.

        Raises
        ------
        Internal
            Ray does not start.
        """
        for name, value in _ENVIRONMENT.items():  # before the import: Ray reads them once
            os.environ.setdefault(name, value)
        import ray

        self._running = True
        for attempt in range(1, _START_TRIES + 1):
            try:
                ray.init(
                    address="local",
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level="error",
                    _temp_dir=str(self._folder),
                )
                self._vital = [p for p in psutil.Process().children() if p.name() in _VITAL]
                return
            except Exception as error:
                if attempt == _START_TRIES:
                    raise Internal(f"Ray does not start: {error}") from error
                # It gives its own processes 30 s, which a machine with much else to do may miss.
                _log.warning("Ray does not start; trying again", error=repr(error))
                ray.shutdown()
                self.clear()

    def deploy(self, arguments: dict[str, Any]) -> None:
        """Start the replicas and wait until all of them serve.

        Parameters
        ----------
        arguments : dict
            Those of `app.build_app`.

        Raises
        ------
        Internal
            They do not start; the message says why.
        """
        from ray import serve
        from ray.serve.config import HTTPOptions, ProxyLocation

        from lorafleet.fleet.app import APP, build_app

        logging.getLogger("ray.serve").setLevel(logging.CRITICAL)  # its errors are raised as well
        # No request passes Serve's proxy; what little it needs listens on a free port.
        serve.start(proxy_location=ProxyLocation.Disabled, http_options=HTTPOptions(port=0))
        self._deployed = True
        try:
            serve.run(build_app(arguments), name=APP, route_prefix=None)
        except LorafleetError:
            raise
        except Exception as error:
            raise Internal(_cause(error)) from error

    def stop(self) -> None:
        """Let the replicas drain, end Ray, and remove its files. Does nothing when stopped."""
        if not self._running:
            return
        import ray

        if self._deployed and self.alive:
            self._drain()
        self._deployed = False
        ray.shutdown()
        self._running = False
        left = self.clear()
        if left:
            _log.warning("Ray left processes, which have been ended", processes=left)

    def clear(self) -> int:
        """End the processes and remove the files that a cluster of this name has left."""
        left = end(lambda: using(self._folder))
        shutil.rmtree(self._folder, ignore_errors=True)
        return left

    def _drain(self) -> None:
        from ray import serve

        from lorafleet.fleet.app import APP

        try:
            serve.delete(APP)  # returns when they have ended
        except Exception as error:
            _log.warning("the replicas were not drained", error=repr(error))


def _folder(name: str) -> Path:
    temporary = Path(tempfile.gettempdir())
    if len(str(temporary)) > _LONGEST_TEMPORARY:
        temporary = Path("/tmp")
    return temporary / f"lorafleet-ray-{name[:8]}"


def _cause(error: Exception) -> str:
    """What a replica said as it failed to start: the last line of its traceback in Serve's status.

    What Serve raises says only that a deployment failed.
    """
    from ray import serve

    from lorafleet.fleet.app import APP, DEPLOYMENT

    with contextlib.suppress(Exception):
        message = serve.status().applications[APP].deployments[DEPLOYMENT].message
        raised = [line for line in message.splitlines() if "Error: " in line]
        if raised:
            return str(raised[-1].partition("Error: ")[2])
    return str(error)
