"""One process's link to Redis: connections, retries, and scripts that run as a whole.

It owns how a command is retried and when Redis counts as away; it knows no key but the prefix that
all keys carry. The store and the leases stand on it.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from redis.asyncio import Redis
from redis.exceptions import (
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from lorafleet.core.errors import Exhausted, Internal, Unavailable
from lorafleet.core.log import get_logger
from lorafleet.registry.urls import connect

T = TypeVar("T")

_TRANSIENT = frozenset(
    {"LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "MISCONF", "NOREPLICAS", "READONLY"}
)
_MAX_CONCURRENT = 32
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Generic[T]):
    """What Redis answered. `retried` means that an earlier try may have taken effect as well."""

    value: T
    retried: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """How patient the link is.

    Parameters
    ----------
    deadline_s : float
        How long a command is retried before Redis counts as away.
    """

    deadline_s: float = 3.0


class RedisLink:
    """Runs commands against one Redis URL, again and again until its deadline.

    Parameters
    ----------
    url : str
        See `urls`. A host name is resolved, and a sentinel asked, at each connection, so that after
        a failover the new primary is found.
    options : LinkOptions
        Deadlines.
    """

    def __init__(self, url: str, *, options: LinkOptions | None = None) -> None:
        self._options = options or LinkOptions()
        # Of a cluster, the commands that are used here are the same.
        self._client = cast(Redis, connect(url))
        self._turns = asyncio.Semaphore(_MAX_CONCURRENT)

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def call(self, command: Callable[[Redis], Awaitable[T]]) -> Reply[T]:
        """Run a command; what it does must be the same when it is done twice.

        Raises
        ------
        Unavailable
            Redis could not be reached, or would not take commands, until the deadline.
        Exhausted
            Redis has no memory left.
        Internal
            Redis refuses the command.
        """
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + self._options.deadline_s
        pause_s = _FIRST_PAUSE_S
        retried = False
        while True:
            try:
                async with asyncio.timeout_at(give_up_at), self._turns:
                    return Reply(value=await command(self._client), retried=retried)
            except (RedisError, OSError, TimeoutError) as error:
                await self._raise_unless_transient(error)
                last = error
            retried = True
            jittered_s = pause_s * (0.5 + random.random())
            if clock() + jittered_s >= give_up_at:
                raise _away(last) from last
            await asyncio.sleep(jittered_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def once(self, command: Callable[[Redis], Awaitable[T]], *, wait_s: float) -> T:
        """Run a command that may block for `wait_s`, without retries; errors as in `call`."""
        try:
            async with asyncio.timeout(wait_s + self._options.deadline_s):
                return await command(self._client)
        except (RedisError, OSError, TimeoutError) as error:
            await self._raise_unless_transient(error)
            raise _away(error) from error

    async def run(self, script: str, keys: Sequence[str], args: Sequence[str | int]) -> Reply[Any]:
        """Run a Lua script as one indivisible change; errors as in `call`."""
        digest = hashlib.sha1(script.encode()).hexdigest()  # Redis's name for it

        async def command(client: Redis) -> Any:
            rest: Any = [*keys, *args]
            try:
                return await client.evalsha(digest, len(keys), *rest)  # type: ignore[misc]
            except NoScriptError:
                return await client.eval(script, len(keys), *rest)  # type: ignore[misc]

        return await self.call(command)

    async def _raise_unless_transient(self, error: Exception) -> None:
        """Raise what no retry can help; a connection that failed or was slow is not that."""
        if not isinstance(error, ResponseError):
            return
        reason = _reason(error)
        if reason == "READONLY":
            # A demoted primary keeps its sockets open: only new connections find the new primary.
            pool = getattr(self._client, "connection_pool", None)  # a cluster has none
            if pool is not None:
                await pool.disconnect(inuse_connections=False)
        elif reason == "OOM":
            raise Exhausted("the registry's Redis has no memory left; raise its maxmemory")
        elif reason not in _TRANSIENT:
            _log.error("Redis refused a command", exc_info=error)
            raise Internal(f"the registry's Redis refused a command: {error}") from error


def _reason(error: ResponseError) -> str:
    """Return the code word of a refusal.

    The client knows some by class and has cut the word off; Redis 6 wraps those of a script's
    commands in prose.
    """
    if isinstance(error, ReadOnlyError):
        return "READONLY"
    if isinstance(error, OutOfMemoryError):
        return "OOM"
    text = str(error)
    inner = re.search(r": -([A-Z]+) ", text)
    return inner[1] if inner else text.partition(" ")[0]


def _away(error: Exception) -> Unavailable:
    cause = f"{type(error).__name__}: {error}" if str(error) else "no reply in time"
    return Unavailable(f"the registry's Redis does not answer ({cause}); try again")
