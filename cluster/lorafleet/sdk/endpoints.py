"""Where the fleet is, when nobody says."""

from __future__ import annotations

import json
import os

from lorafleet.core.errors import Unavailable
from lorafleet.core.home import run_dir


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
    except (OSError, ValueError, KeyError):
        raise Unavailable(
            f"no fleet is running here: start one with `lorafleet up`, or give --{plane} or "
            f"{variable}"
        ) from None
