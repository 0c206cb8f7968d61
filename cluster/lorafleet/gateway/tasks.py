"""Ending a background task for sure.

It owns one rule that Python 3.11 makes necessary and knows nothing else.
"""

from __future__ import annotations

import asyncio

_AGAIN_S = 0.1


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has ended, however it ended.

    Notes
    -----
    Cancelling once is not enough: until Python 3.12, `asyncio.wait_for` (redis-py sends by it)
    swallows a cancellation that comes just as what it waits for is done (python/cpython#86296).
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_AGAIN_S)
