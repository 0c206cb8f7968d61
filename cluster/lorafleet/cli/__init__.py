"""The `lorafleet` command. Heavy libraries are imported by the commands that need them."""

from __future__ import annotations

from lorafleet.cli.app import main

__all__ = ["main"]
