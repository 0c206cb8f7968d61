"""`python -m lorafleet.fleet`: a Ray cluster of this machine with its replicas, until SIGTERM.

It owns the command line, the signals and the watch over Ray. It is a process of its own because Ray
ends the process that started it when one of Ray's own processes dies; the supervisor, which does
not import Ray, then starts this one again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from lorafleet.core.errors import LorafleetError
from lorafleet.core.log import configure, get_logger
from lorafleet.fleet.cluster import LocalCluster

_LOOK_S = 0.5
_DIED = 3

_log = get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; 0 after a signal, 2 when it cannot start, 3 when Ray died."""
    options = _parse(arguments)
    try:
        configure("replicas", file=options.log_file)
        return _run(options)
    except LorafleetError as error:
        print(error.message, file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    stop = threading.Event()
    cluster = LocalCluster(options.name)
    cluster.clear()  # of one before this that was killed
    try:
        cluster.start()
        # Ray has taken SIGTERM as it started. Until here it, like Ctrl-C, ends by an exception.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        cluster.deploy(options.app)
        options.ready_file.parent.mkdir(parents=True, exist_ok=True)
        options.ready_file.write_text("ready")
        while not stop.wait(_LOOK_S):
            if not cluster.alive:
                _end_now(cluster)
    finally:
        options.ready_file.unlink(missing_ok=True)
        cluster.stop()
    return 0


def _end_now(cluster: LocalCluster) -> None:
    """Ray died: its library in this process would not let it end in order."""
    _log.error("Ray died")
    print("Ray died", file=sys.stderr, flush=True)
    cluster.clear()
    os._exit(_DIED)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lorafleet.fleet",
        description="Run a Ray cluster of this machine with replicas of a compiled model.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--name", required=True, help="of the cluster; names its folder")
    add("--app", required=True, type=json.loads, metavar="JSON", help="arguments of build_app")
    add("--ready-file", required=True, type=Path, metavar="FILE", help="is there while all serve")
    add("--log-file", type=Path, metavar="FILE", help="default: standard error")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
