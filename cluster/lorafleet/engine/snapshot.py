"""What an engine holds and how busy it is, for those who watch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from lorafleet.core.log import get_logger
from lorafleet.engine.scheduler import Scheduler

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySnapshot:
    """`resident` and `loading` are version ids; `sequence` grows with every change."""

    sequence: int = 0
    resident: tuple[str, ...] = ()
    loading: tuple[str, ...] = ()
    free_pages: int = 0
    num_pages: int = 0
    running: int = 0
    waiting: int = 0


def take(scheduler: Scheduler) -> ResidencySnapshot:
    """What a scheduler has now. Step thread."""
    queues = ResidencySnapshot(running=len(scheduler.running), waiting=len(scheduler.waiting))
    residency = scheduler.residency
    if residency is None:
        return queues
    return replace(
        queues,
        resident=residency.resident(),
        loading=residency.loading(),
        free_pages=residency.pool.free_pages(),
        num_pages=residency.pool.num_pages,
    )


Subscriber = Callable[[ResidencySnapshot], object]


class Snapshots:
    """The newest snapshot and its subscribers. Published by one thread, read by any."""

    def __init__(self) -> None:
        self.newest = ResidencySnapshot()
        self._lock = threading.Lock()
        self._subscribers: list[Subscriber] = []

    def publish(self, snapshot: ResidencySnapshot) -> None:
        """Tell subscribers, if it is news; the snapshot's own sequence is ignored."""
        snapshot = replace(snapshot, sequence=self.newest.sequence)
        if snapshot == self.newest:
            return
        self.newest = replace(snapshot, sequence=snapshot.sequence + 1)
        with self._lock:
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            try:
                subscriber(self.newest)
            except Exception:
                # A watcher's trouble, such as a closed event loop, is not the engine's.
                _log.exception("residency_subscriber_failed")

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call back, on the publishing thread, at every change; the result ends it."""
        with self._lock:
            self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            with self._lock, contextlib.suppress(ValueError):  # ended twice
                self._subscribers.remove(subscriber)

        return unsubscribe
