"""Where lorafleet keeps its files: one folder, `$LORAFLEET_HOME` or `~/.lorafleet`.

models/   compiled models, one folder each, complete or absent
blobs/    adapter files by sha256
redis/    the embedded Redis's append-only file
operator.key  the API key of whoever runs `up`
run/      what `up` started: addresses and process ids
logs/     one file a process
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "LORAFLEET_HOME"


def home() -> Path:
    """The root folder; created when first written to, never by asking."""
    return Path(os.environ.get(VARIABLE) or Path.home() / ".lorafleet").absolute()


def models_dir() -> Path:
    """Compiled models."""
    return home() / "models"


def blobs_dir() -> Path:
    """The content-addressed blob store."""
    return home() / "blobs"


def redis_dir() -> Path:
    """The embedded Redis's files."""
    return home() / "redis"


def run_dir() -> Path:
    """What `up` started."""
    return home() / "run"


def key_file() -> Path:
    """The operator's API key of a fleet on this machine, readable by its owner alone."""
    return home() / "operator.key"


def logs_dir() -> Path:
    """Log files."""
    return home() / "logs"
