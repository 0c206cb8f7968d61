"""A client for each way of running Redis, by URL.

    redis://[[user]:password@]host[:port][/db]                      one server
    rediss://...                                                    the same over TLS
    unix://path[?db=n]                                              the same on a socket
    redis+sentinel://[[user]:password@]host[:port],.../service[/db]  whichever server is primary
    redis+cluster://[[user]:password@]host[:port],...               a cluster; any of its nodes

`rediss+sentinel` and `rediss+cluster` are over TLS. Credentials are the servers', and are shown to
the sentinels as well. It owns no retry: whoever uses the client does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from lorafleet.core.errors import InvalidInput

_URL = re.compile(
    r"(?P<tls>rediss?)\+(?P<kind>sentinel|cluster)://(?:(?P<user>[^:@/]*):(?P<password>[^@/]*)@)?"
    r"(?P<hosts>[^/@?#]+)(?:/(?P<path>[^?#]*))?"
)
_HOST = re.compile(r"(?P<host>[^\[\]:,]+|\[[0-9a-fA-F:]+\])(?::(?P<port>\d{1,5}))?")
_PORTS = {"sentinel": 26379, "cluster": 6379}

Client = Redis | RedisCluster


def connect(url: str) -> Client:
    """A client for a URL; nothing is contacted yet.

    Retries and time limits are left to the caller: the client's own would hide that a try may have
    taken effect, and its limits use asyncio.wait_for, which on Python 3.11 now and then swallows
    the cancellation of the task that waits.

    Raises
    ------
    InvalidInput
        The URL is malformed, or of a kind that is not known.
    """
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": None,
        "socket_connect_timeout": None,
        "retry": Retry(NoBackoff(), 0),
    }
    if "+" not in url.partition("://")[0]:
        try:
            client: Redis = Redis.from_url(url, **options)
        except ValueError as error:
            raise _refused(url, str(error)) from error
        return client
    several = _parse(url)
    options |= several.credentials | ({"ssl": True} if several.tls else {})
    if several.kind == "cluster":
        nodes = [ClusterNode(host, port) for host, port in several.hosts]
        return RedisCluster(startup_nodes=nodes, **options)
    sentinels: Any = Sentinel(several.hosts, sentinel_kwargs=options, **options)  # type: ignore[no-untyped-call]
    primary: Redis = sentinels.master_for(several.service, db=several.db)
    return primary


@dataclass(frozen=True, slots=True, kw_only=True)
class _Several:
    """What a URL with several hosts says."""

    kind: str
    tls: bool
    hosts: list[tuple[str, int]]
    credentials: dict[str, str]
    service: str = ""
    db: int = 0


def _parse(url: str) -> _Several:
    match = _URL.fullmatch(url)
    if match is None:
        raise _refused(url, "expected rediss?+sentinel:// or rediss?+cluster:// and hosts")
    kind = match["kind"]
    hosts = [_host(url, text, _PORTS[kind]) for text in match["hosts"].split(",")]
    credentials = {"username": match["user"], "password": match["password"]}
    given = {name: unquote(text) for name, text in credentials.items() if text}
    service, _, db = (match["path"] or "").partition("/")
    if kind == "cluster" and (service or db):
        raise _refused(url, "a cluster has no database to choose: nothing may follow the hosts")
    if kind == "sentinel" and not service:
        raise _refused(url, "after the sentinels' hosts, /<service> must name what they watch")
    if db and not db.isdecimal():
        raise _refused(url, f"database {db!r} is no number")
    return _Several(
        kind=kind,
        tls=match["tls"] == "rediss",
        hosts=hosts,
        credentials=given,
        service=unquote(service),
        db=int(db or 0),
    )


def _host(url: str, text: str, default_port: int) -> tuple[str, int]:
    match = _HOST.fullmatch(text.strip())
    if match is None or int(match["port"] or 0) > 65_535:
        raise _refused(url, f"{text!r} is no host:port")
    return match["host"].strip("[]"), int(match["port"] or default_port)


def _refused(url: str, why: str) -> InvalidInput:
    """An error that shows the URL without its password."""
    shown = re.sub(r"://[^@/]*@", "://***@", url)
    return InvalidInput(f"redis URL {shown!r} is not valid: {why}", field="redis")
