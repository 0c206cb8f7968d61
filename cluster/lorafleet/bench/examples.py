"""The example adapters that come with the source tree, and questions to ask them."""

from __future__ import annotations

from pathlib import Path

import lorafleet
from lorafleet.adapters import CONFIG_FILE
from lorafleet.core.errors import NotFound

QUESTIONS = (
    "What is the capital of Spain?",
    "How many wheels does a bicycle have?",
    "Show the top 5 movies by rating.",
    "Which season comes after winter?",
)


def example_adapters(directory: Path | None = None) -> dict[str, Path]:
    """Adapter directories by name, those of `examples/adapters` unless another folder is given.

    Raises
    ------
    NotFound
        The folder holds no adapters.
    """
    folder = directory or Path(lorafleet.__path__[0]).parents[1] / "examples" / "adapters"
    found = {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{CONFIG_FILE}"))}
    if not found:
        raise NotFound(f"{folder} holds no adapters (folders with {CONFIG_FILE})", file=folder)
    return found
