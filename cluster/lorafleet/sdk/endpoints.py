"""Where the fleet is when nobody says, and what to say when nobody is there."""

from __future__ import annotations

import json
import os

import grpc

from lorafleet.core.errors import LorafleetError, Unavailable
from lorafleet.core.home import key_file, run_dir
from lorafleet.wire.status import from_rpc_error

Metadata = tuple[tuple[str, str], ...]
"""What is sent beside a request."""


def find_address(plane: str, given: str | None) -> str:
    """`host:port` of the `gateway` or `admin` plane.

    As given, else from LORAFLEET_GATEWAY or LORAFLEET_ADMIN, else of the fleet that runs on this
    machine.

    Raises
    ------
    Unavailable
        None of them says.
    """
    variable = f"LORAFLEET_{plane.upper()}"
    address = given or os.environ.get(variable)
    if address:
        return address
    try:
        return str(json.loads((run_dir() / "fleet.json").read_text())[plane])
    except (OSError, ValueError, KeyError, TypeError):
        raise Unavailable(
            f"no fleet is running here: start one with `lorafleet up`, or give --{plane} or "
            f"{variable}"
        ) from None


def find_key(given: str | None, address: str | None) -> str | None:
    """The API key to show.

    As given, else from LORAFLEET_KEY, else the operator's own key of the fleet on this machine:
    that one is shown to nobody else, so only when no address was given or set.
    """
    key = given or os.environ.get("LORAFLEET_KEY")
    if key or address or any(f"LORAFLEET_{plane}" in os.environ for plane in ("GATEWAY", "ADMIN")):
        return key
    try:
        return key_file().read_text().strip() or None
    except OSError:
        return None


def call_error(error: grpc.RpcError, plane: str, address: str) -> LorafleetError:
    """What a failed call to a plane means; names the address when no answer came from there."""
    found = from_rpc_error(error)
    code = found.facts.get("grpc_code")
    if code == "DEADLINE_EXCEEDED":
        message = f"the {plane} at {address} did not finish the call within its deadline"
    elif code == "UNAVAILABLE":
        message = (
            f"the {plane} at {address} does not answer ({found.message}); is the fleet up? Start "
            "one with `lorafleet up`"
        )
    else:
        return found
    return Unavailable(message, address=address, grpc_code=code)
