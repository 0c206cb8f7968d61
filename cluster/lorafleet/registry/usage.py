"""What tenants use by the minute, added up over all gateways in Redis.

One hash a minute, which expires by itself: nothing here is the truth about anything for longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorafleet.registry.layout import key
from lorafleet.registry.link import RedisLink

_KEPT_S = 180


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Requests and tokens."""

    requests: int = 0
    tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(requests=self.requests + other.requests, tokens=self.tokens + other.tokens)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(requests=self.requests - other.requests, tokens=self.tokens - other.tokens)


class UsageBook:
    """Adds up usage over one link."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def add(self, minute: int, more: Mapping[str, Usage]) -> dict[str, Usage]:
        """Add to a minute (since the Unix epoch), and return the same tenants' sums.

        Not retried, so that nothing is counted twice; Unavailable while Redis is away.
        """
        if not more:
            return {}
        name = key("usage", str(minute))

        async def command(redis: Any) -> list[int]:
            pipeline = redis.pipeline(transaction=False)
            for tenant, usage in more.items():
                pipeline.hincrby(name, f"{tenant}:requests", usage.requests)
                pipeline.hincrby(name, f"{tenant}:tokens", usage.tokens)
            pipeline.expire(name, _KEPT_S)
            sums: list[int] = await pipeline.execute()
            return sums

        sums = await self._link.once(command, wait_s=0.0)
        return {
            tenant: Usage(requests=sums[2 * index], tokens=sums[2 * index + 1])
            for index, tenant in enumerate(more)
        }
