"""A request's events as an iterator, on an event loop or not; leaving it ends the request."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator, Callable, Iterator

from lorafleet.engine.request import Event, Failed, Finished, Request

Submit = Callable[[Callable[[Event], None]], Request]
"""Hands a request over, given where its events go."""

Abort = Callable[[Request], None]


async def listen(submit: Submit, abort: Abort) -> AsyncGenerator[Event, None]:
    """Yield a request's events on the running loop; raises the error of one that failed."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def emit(event: Event) -> None:
        # Raises when the client's loop is gone, which ends the request.
        loop.call_soon_threadsafe(events.put_nowait, event)

    request = submit(emit)
    try:
        while True:
            event = _checked(await events.get())
            yield event
            if isinstance(event, Finished):
                return
    finally:
        abort(request)


def wait(submit: Submit, abort: Abort) -> Iterator[Event]:
    """`listen` for code without an event loop."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    request = submit(events.put)
    try:
        while True:
            event = _checked(events.get())
            yield event
            if isinstance(event, Finished):
                return
    finally:
        abort(request)


def _checked(event: Event) -> Event:
    if isinstance(event, Failed):
        raise event.error
    return event
