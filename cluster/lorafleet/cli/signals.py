"""Ctrl-C and SIGTERM for commands that run a fleet: the first one asks for an orderly end.

It owns the two handlers while a command runs. The end itself is not interrupted by an impatient
second signal, which would leave processes behind.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Raises KeyboardInterrupt in the main thread at the first signal; later ones do nothing."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._held = False

    def __enter__(self) -> StopSignals:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._held:
            return  # the command is about to end, and should end in its own way
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hold(self) -> None:
        """From here on no signal interrupts."""
        self._held = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._held:
            self._held = True
            raise KeyboardInterrupt
