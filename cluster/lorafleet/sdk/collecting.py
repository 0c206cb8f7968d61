"""A stream of events, read to its end and timed by the client's clock."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from lorafleet.core.errors import Internal
from lorafleet.sdk.values import Completion, Delta, Event, Finished, Started


@dataclass(slots=True)
class Collector:
    """Takes the events of one answer as they come; times count from its making."""

    began_s: float = field(default_factory=time.monotonic)
    _text: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _first_s: float | None = None
    _first_count: int = 0
    _last_s: float = 0.0
    _started: Started | None = None
    _finished: Finished | None = None

    def add(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case Started():
                self._started = event
            case Delta():
                self._last_s = time.monotonic()
                if self._first_s is None:
                    self._first_s, self._first_count = self._last_s, len(event.token_ids)
                self._text.append(event.text)
                self._token_ids += event.token_ids
            case Finished():
                self._finished = event

    def completion(self) -> Completion:
        """The whole answer.

        Raises
        ------
        Internal
            The stream ended without Started or Finished.
        """
        if self._started is None or self._finished is None:
            raise Internal("the answer ended without its Started or Finished event")
        ended_s = time.monotonic()
        first_s = self._first_s if self._first_s is not None else ended_s
        later, decode_s = len(self._token_ids) - self._first_count, self._last_s - first_s
        return Completion(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=self._finished.reason,
            version=self._started.version,
            replica=self._started.replica,
            resident=self._started.resident,
            ttft_s=first_s - self.began_s,
            tokens_per_s=later / decode_s if later > 0 and decode_s > 0 else 0.0,
        )


def collect(events: Iterator[Event]) -> Completion:
    """Read a stream to its end."""
    collector = Collector()
    for event in events:
        collector.add(event)
    return collector.completion()


async def collect_async(events: AsyncIterator[Event]) -> Completion:
    """Read an asyncio stream to its end."""
    collector = Collector()
    async for event in events:
        collector.add(event)
    return collector.completion()
