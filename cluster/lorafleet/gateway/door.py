"""Who is inside: counts open requests, and lets no more in once it is closed.

It owns the first half of a graceful end. gRPC's asyncio server could refuse new calls itself, but a
call that arrives as it begins to stop may be accepted and then forgotten until the grace period is
over; so the server stops only when nobody is inside any more. It knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from lorafleet.core.errors import Unavailable


class Door:
    """Open from the start, closed for good by `close`."""

    def __init__(self) -> None:
        self._open = True
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def inside(self) -> int:
        """How many requests are open."""
        return self._inside

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Be inside for as long as the block runs.

        Raises
        ------
        Unavailable
            The door is closed; another gateway may serve.
        """
        if not self._open:
            raise Unavailable("this gateway is stopping; connect to another one or try again")
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()

    def close(self) -> None:
        """Let nobody in from now on."""
        self._open = False

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nobody is inside; returns whether that is so."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return self._inside == 0
