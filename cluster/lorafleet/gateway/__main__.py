"""The gateway as a process: `python -m lorafleet.gateway --redis URL --model-dir DIR`.

SIGTERM and SIGINT drain it: it reports not ready, refuses new requests and lets running streams end
for up to the grace period; a second signal ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from lorafleet.core import log
from lorafleet.core.errors import LorafleetError
from lorafleet.gateway.server import Gateway, GatewayOptions


def main(arguments: list[str] | None = None) -> int:
    """Run until a signal; returns the exit status."""
    options = _parse(arguments)
    try:
        log.configure("gateway", file=options.log_file, level=options.log_level)
        asyncio.run(_serve(options))
    except LorafleetError as error:
        print(f"lorafleet gateway: {error.message}", file=sys.stderr)
        return 1
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lorafleet.gateway", description=__doc__)
    parser.add_argument("--redis", required=True, metavar="URL", help="the registry's Redis")
    parser.add_argument("--model-dir", required=True, type=Path, help="the compiled base model")
    parser.add_argument("--listen", default="127.0.0.1:8470", metavar="HOST:PORT")
    parser.add_argument(
        "--address-file", type=Path, help="gets the address once it listens (for port 0)"
    )
    parser.add_argument(
        "--require-keys", action="store_true", help="callers need an API key of the registry"
    )
    parser.add_argument(
        "--operator-key-file", type=Path, metavar="FILE", help="the operator's key, valid as well"
    )
    parser.add_argument("--grace-s", type=float, default=30.0, help="how long streams may end")
    parser.add_argument("--log-file", type=Path, help="JSON lines; standard error when not given")
    parser.add_argument("--log-level", default="info")
    return parser.parse_args(arguments)


async def _serve(options: argparse.Namespace) -> None:
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    gateway = Gateway(
        GatewayOptions(
            redis_url=options.redis,
            model_dir=options.model_dir,
            listen=options.listen,
            require_keys=options.require_keys,
            operator_key_file=options.operator_key_file,
        )
    )
    address = await gateway.start()
    try:
        if options.address_file is not None:
            _write_whole(options.address_file, address)
        await signals.get()
        stopping = asyncio.create_task(gateway.stop(options.grace_s))
        again = asyncio.create_task(signals.get())
        await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if stopping.done():
            await stopping
        else:
            stopping.cancel()
    finally:
        if options.address_file is not None:
            options.address_file.unlink(missing_ok=True)


def _write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
