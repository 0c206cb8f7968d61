"""The keyring: one process's own view of tenants and API keys, current within a second.

It owns following the feed for keys and quotas, and telling who a caller is. Keys that are known
stay valid while Redis is away; a revoked one ends as soon as the feed says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path

from lorafleet.core.errors import Conflict, LorafleetError, Unauthenticated, Unavailable
from lorafleet.core.log import get_logger
from lorafleet.core.names import DEFAULT_TENANT
from lorafleet.core.tenant import (
    ApiKey,
    Principal,
    Quota,
    Scope,
    key_id_of,
    new_secret,
    secret_sha256,
)
from lorafleet.registry.feed import Cursor
from lorafleet.registry.store import RegistryStore

_WAIT_S = 1.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0

_log = get_logger(__name__)


class Keyring:
    """A local view of all keys and quotas.

    Parameters
    ----------
    store : RegistryStore
        Followed; not closed by the keyring.
    operator : ApiKey, optional
        A key that is not in Redis: the operator's own.

    Notes
    -----
    Ask on the event loop's thread; an answer costs one sha256.
    """

    def __init__(self, store: RegistryStore, operator: ApiKey | None = None) -> None:
        self._store = store
        self._operator = operator
        self._keys: dict[str, ApiKey] = {}
        self._quotas: dict[str, Quota] = {}
        self._cursor: Cursor | None = None
        self._task: asyncio.Task[None] | None = None
        self._synced = asyncio.Event()

    async def start(self, *, wait_s: float = 5.0) -> None:
        """Begin to follow; return when all was read, or after `wait_s` without Redis."""
        if self._task is not None:
            raise Conflict("the keyring is started already")
        self._task = asyncio.create_task(self._follow_forever(), name="keyring")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._synced.wait()

    async def stop(self) -> None:
        """Stop following; what is known stays."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def authenticate(self, secret: str) -> Principal:
        """Who a secret belongs to.

        Raises
        ------
        Unauthenticated
            It is no key, or one that is unknown, revoked or expired. Which, is not said.
        """
        key = self._find(key_id_of(secret))
        if key is None or not key.proves(secret, time.time()):
            raise Unauthenticated(
                "the API key is not valid: it is unknown, revoked or expired", field="authorization"
            )
        return Principal(tenant=key.tenant, scope=key.scope, key_id=key.id)

    def quota(self, tenant: str) -> Quota:
        """A tenant's quota; unbounded where none is known."""
        return self._quotas.get(tenant, Quota())

    def _find(self, key_id: str | None) -> ApiKey | None:
        if key_id is None:
            return None
        if self._operator is not None and key_id == self._operator.id:
            return self._operator
        return self._keys.get(key_id)

    async def _follow_forever(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._read_all()
                pause_s = _FIRST_PAUSE_S
                await self._follow()
            except LorafleetError as error:
                _log.warning("API keys cannot be followed", error=error.message)
                await asyncio.sleep(pause_s * (0.5 + random.random()))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _read_all(self) -> None:
        # The cursor comes first: later changes are then read again rather than missed.
        cursor = await self._store.cursor()
        if cursor.incarnation is None and self._keys:
            raise Unavailable("the registry's Redis lost its data; it will be rebuilt")
        keys = {key.id: key for key in await self._store.tenancy.all_keys()}
        quotas = await self._store.tenancy.quotas()
        self._keys, self._quotas, self._cursor = keys, quotas, cursor
        self._synced.set()

    async def _follow(self) -> None:
        """Take in changes until the feed cannot tell."""
        while True:
            assert self._cursor is not None, "a snapshot sets it"
            changes = await self._store.changes(self._cursor, wait_s=_WAIT_S)
            if changes.names is None:
                return
            await self._refresh_keys(sorted(changes.keys))
            await self._refresh_quotas(changes.tenants)
            self._cursor = changes.cursor

    async def _refresh_keys(self, ids: list[str]) -> None:
        for key_id, key in zip(ids, await self._store.tenancy.keys_by_id(ids), strict=True):
            if key is None:
                self._keys.pop(key_id, None)
            else:
                self._keys[key_id] = key

    async def _refresh_quotas(self, tenants: Iterable[str]) -> None:
        names = list(tenants)
        found = await self._store.tenancy.quotas(names) if names else {}
        for name in names:
            self._quotas[name] = found.get(name, Quota())


def operator_key(secret: str) -> ApiKey:
    """The operator's own key of its secret.

    Raises
    ------
    Unauthenticated
        The secret has not the form of a key.
    """
    key_id = key_id_of(secret)
    if key_id is None:
        raise Unauthenticated("the operator key has not the form of an API key: lf_<id>_<secret>")
    return ApiKey(
        id=key_id,
        tenant=DEFAULT_TENANT,
        scope=Scope.OPERATOR,
        secret_sha256=secret_sha256(secret),
        note="operator",
    )


def read_or_make_key(path: Path) -> str:
    """The key in a file; a fresh one, readable by its owner alone, if there is no file."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    _, secret = new_secret()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.touch(mode=0o600)
    partial.write_text(secret + "\n")
    with contextlib.suppress(FileExistsError):  # another process was quicker: its key holds
        os.link(partial, path)
    partial.unlink()
    return path.read_text().strip()


def read_operator(path: Path | None) -> ApiKey | None:
    """The operator's key of its file, made if it is not there; None without a file."""
    return operator_key(read_or_make_key(path)) if path is not None else None
