"""`python -m lorafleet.registry`: run the admin process until SIGTERM or SIGINT.

It owns the command line and the signals; `registry.server` does the rest. `lorafleet up` and the
chart start it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from lorafleet.core.errors import LorafleetError
from lorafleet.core.log import configure
from lorafleet.registry.changes import DEFAULT_GRACE_S
from lorafleet.registry.pushing import PushLimits
from lorafleet.registry.server import RegistryServer, ServerOptions


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; 0 after a signal, 2 when it cannot start."""
    options = _parse(arguments)
    try:
        configure("registry", file=options.log_file, level=options.log_level)
        return asyncio.run(_serve(options))
    except LorafleetError as error:
        print(f"lorafleet.registry: {error.message}", file=sys.stderr)
        return 2


async def _serve(options: argparse.Namespace) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = RegistryServer(
        ServerOptions(
            redis_url=options.redis,
            blobs_dir=options.blobs,
            model_dir=options.model_dir,
            listen=options.listen,
            limits=PushLimits(max_adapter_bytes=options.max_adapter_bytes),
            operator_key_file=options.operator_key_file,
            auth=False if options.no_auth else None,
            allow_sources=tuple(options.allow_source),
            trash_grace_s=options.trash_grace_s,
            gc_every_s=options.gc_every_s,
        )
    )
    address = await server.start()
    try:
        print(f"listening on {address}", flush=True)
        if options.address_file is not None:
            _write_whole(options.address_file, address)
        await stop.wait()
    finally:
        if options.address_file is not None:
            options.address_file.unlink(missing_ok=True)
        await server.stop(options.grace_s)
    return 0


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever waits for it never reads a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lorafleet.registry",
        description="Serve lorafleet.v1.AdapterRegistry over gRPC, with health and reflection.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    kinds = "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"
    add("--redis", required=True, metavar="URL", help=kinds)
    add("--blobs", required=True, type=Path, metavar="DIR", help="the blob store's directory")
    add("--model-dir", required=True, type=Path, metavar="DIR", help="the compiled base model")
    add("--listen", default="127.0.0.1:8471", metavar="HOST:PORT", help="port 0 picks one")
    add("--address-file", type=Path, metavar="FILE", help="gets HOST:PORT while it serves")
    add("--max-adapter-bytes", type=int, default=4 << 30, metavar="N", help="default 4 GiB")
    add(
        "--operator-key-file",
        type=Path,
        metavar="FILE",
        help="the operator's API key; made if absent; callers then need a key",
    )
    add("--no-auth", action="store_true", help="ask nobody for a key; on loopback only")
    add(
        "--allow-source",
        action="append",
        default=[],
        metavar="URL",
        help="import adapters from at or below it; repeatable; default: from nowhere",
    )
    add(
        "--trash-grace-s",
        type=float,
        default=DEFAULT_GRACE_S,
        metavar="S",
        help="how long deleted adapters can be restored; default a day",
    )
    add("--gc-every-s", type=float, default=3600.0, metavar="S", help="between collections")
    add("--grace-s", type=float, default=10.0, metavar="S", help="for running calls at the end")
    add("--log-file", type=Path, metavar="FILE", help="default: standard error")
    add("--log-level", default="info", help="debug, info, warning or error")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
