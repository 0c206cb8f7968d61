"""`run/fleet.json`: what a running fleet on this machine says of itself."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from lorafleet.core.home import run_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """Addresses and processes of a fleet; written when it is ready, removed when it stops."""

    pid: int
    gateway: str
    admin: str
    redis: str
    model_dir: str
    logs_dir: str
    replicas: int

    @staticmethod
    def path() -> Path:
        return run_dir() / "fleet.json"

    @classmethod
    def read(cls) -> FleetState | None:
        """The running fleet of this home; None when there is none (a stale file is no fleet)."""
        try:
            state = cls(**json.loads(cls.path().read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return state if _alive(state.pid) else None

    def write(self) -> None:
        """Publish, whole or not at all."""
        path = self.path()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(asdict(self), indent=1))
        partial.replace(path)

    @classmethod
    def remove(cls) -> None:
        """Take the file away."""
        cls.path().unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
