"""What tenants use per minute, and who has used up theirs.

It owns counting requests and tokens against quotas. Every gateway counts by itself and decides at
once; in the background they add up what each has counted in Redis, so that together they let
through little more than the quota. While Redis is away each goes by what it knows.

The rate is that of a sliding window: the running minute's count, and of the minute before as much
as the window still covers (https://blog.cloudflare.com/counting-things-a-lot-of-different-things).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lorafleet.core.errors import Exhausted, LorafleetError
from lorafleet.core.log import get_logger
from lorafleet.core.tenant import Quota
from lorafleet.gateway.tasks import end
from lorafleet.registry.usage import Usage, UsageBook

_SHARE_EVERY_S = 0.25
_WINDOW_S = 60.0

_log = get_logger(__name__)


@dataclass(slots=True)
class _Minute:
    """A tenant's use in one minute: what all gateways have told, and what this one has not yet."""

    shared: Usage = field(default_factory=Usage)
    untold: Usage = field(default_factory=Usage)

    @property
    def total(self) -> Usage:
        return self.shared + self.untold


class Meter:
    """Counts tenants' use.

    Parameters
    ----------
    quota : callable
        A tenant's quota by its name.
    book : UsageBook
        Where gateways share their counts.
    clock : callable
        Unix seconds; gateways' clocks should agree within seconds.

    Notes
    -----
    Use on one event loop. Tenants without a quota per minute are not counted.
    """

    def __init__(
        self,
        quota: Callable[[str], Quota],
        book: UsageBook,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._quota = quota
        self._book = book
        self._clock = clock
        self._minutes: dict[int, dict[str, _Minute]] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to share counts."""
        self._task = asyncio.create_task(self._share_forever(), name="usage")

    async def stop(self) -> None:
        """Stop sharing."""
        if self._task is not None:
            await end(self._task)
            self._task = None

    def admit(self, tenant: str) -> None:
        """Count a request.

        Raises
        ------
        Exhausted
            The tenant has used up its requests or tokens per minute; `retry_after_s` says when the
            next is let through at the earliest.
        """
        quota = self._quota(tenant)
        if not (quota.requests_per_minute or quota.tokens_per_minute):
            return
        now_s = self._clock()
        self._check(tenant, "requests", quota.requests_per_minute, now_s)
        self._check(tenant, "tokens", quota.tokens_per_minute, now_s)
        self._minute(now_s, tenant).untold += Usage(requests=1)

    def spend(self, tenant: str, tokens: int) -> None:
        """Count tokens of a prompt and its answer."""
        if tokens and self._quota(tenant).tokens_per_minute:
            self._minute(self._clock(), tenant).untold += Usage(tokens=tokens)

    async def share(self) -> None:
        """Tell the book what was counted since, and take in what it knows of all."""
        number = int(self._clock() // _WINDOW_S)
        for old in [minute for minute in self._minutes if minute < number - 1]:
            del self._minutes[old]
        for minute, tenants in list(self._minutes.items()):
            telling = {tenant: use.untold for tenant, use in tenants.items()}
            known = await self._book.add(minute, telling)
            for tenant, shared in known.items():
                tenants[tenant].shared = shared
                tenants[tenant].untold -= telling[tenant]

    def _check(self, tenant: str, what: str, limit: int, now_s: float) -> None:
        if not limit:
            return
        passed = now_s % _WINDOW_S / _WINDOW_S
        now: int = getattr(self._minute(now_s, tenant).total, what)
        before: int = getattr(self._minute(now_s - _WINDOW_S, tenant).total, what)
        if now + before * (1.0 - passed) <= limit - 1:
            return
        wait_s = _wait(now, before, limit, passed)
        raise Exhausted(
            f"tenant {tenant!r} has used its {limit} {what} per minute: wait {wait_s:.0f} s",
            tenant=tenant,
            quota=f"{what}_per_minute",
            retry_after_s=f"{wait_s:.1f}",
        )

    def _minute(self, at_s: float, tenant: str) -> _Minute:
        tenants = self._minutes.setdefault(int(at_s // _WINDOW_S), {})
        found = tenants.get(tenant)
        if found is None:
            found = tenants[tenant] = _Minute()
        return found

    async def _share_forever(self) -> None:
        while True:
            await asyncio.sleep(_SHARE_EVERY_S)
            try:
                await self.share()
            except LorafleetError as error:
                _log.debug("usage is not shared", error=error.message)


def _wait(now: int, before: int, limit: int, passed: float) -> float:
    """Seconds until the window has room for one, if nothing more is counted."""
    room = limit - 1
    if now <= room:  # what is left of the minute before is in the way
        return max(1.0, (1.0 - _room_share(room - now, before) - passed) * _WINDOW_S)
    # This minute's count alone is too much: it must slide out of the window in the next one.
    return (1.0 - passed + 1.0 - _room_share(room, now)) * _WINDOW_S


def _room_share(room: int, count: int) -> float:
    """The share of a count that there is room for."""
    return min(1.0, room / count) if count else 1.0
