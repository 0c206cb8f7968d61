"""Which versions stay in rank pages whatever else is asked for.

It owns loading them, holding a pin on each, and letting go: a request that has waited past the age
limit comes before any of them. It is the step thread's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from lorafleet.engine.residency import Residency

_TRY_AGAIN_S = 5.0
_MOST = 0.5
"""The part of all rank pages that may be held: the rest is for requests."""


class Keeper:
    """Keeps versions resident.

    Parameters
    ----------
    residency : Residency
        Loads and holds them.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._wanted: tuple[str, ...] = ()
        self._held: dict[str, int] = {}  # pages of each
        self._not_before_s: dict[str, float] = {}

    @property
    def held(self) -> tuple[str, ...]:
        """Versions that cannot be evicted now."""
        return tuple(self._held)

    def want(self, versions: Iterable[str]) -> None:
        """Keep these from now on, and no others; the first are the more important."""
        self._wanted = tuple(dict.fromkeys(versions))
        self._not_before_s.clear()
        for version in self._held.keys() - set(self._wanted):
            self._let_go(version)

    def forget(self, version: str) -> None:
        """Do not keep one any more."""
        self.want(other for other in self._wanted if other != version)

    def tend(self, *, others_starve: bool) -> None:
        """Load and hold what is wanted, as far as there is room; hold nothing while others starve.

        Called before each step.
        """
        if others_starve:
            for version in list(self._held):
                self._let_go(version)
            return
        residency, now_s = self._residency, time.monotonic()
        pages = residency.pages_by_version()
        room = int(residency.pool.num_pages * _MOST) - sum(self._held.values())
        for version in self._wanted:
            if version in self._held:
                continue
            if residency.can_pin(((version, 1.0),)):
                if pages[version] <= room:
                    residency.pin(((version, 1.0),))
                    self._held[version] = pages[version]
                    room -= pages[version]
            elif room > 0 and now_s >= self._not_before_s.get(version, 0.0):
                # Also the pause after a load that failed, or that found no pages.
                self._not_before_s[version] = now_s + _TRY_AGAIN_S
                residency.ensure(version)

    def _let_go(self, version: str) -> None:
        del self._held[version]
        self._residency.unpin(((version, 1.0),))
