"""The view of keys: who a caller is, within a second of every change, Redis or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorafleet.core.errors import LorafleetError, Unauthenticated
from lorafleet.core.tenant import ApiKey, Principal, Quota, Scope, new_secret, secret_sha256
from lorafleet.registry import EmbeddedRedis, LinkOptions, RegistryStore
from lorafleet.registry.keyring import Keyring, operator_key


def make_key(tenant: str = "t", scope: Scope = Scope.DATA, **changes: Any) -> tuple[ApiKey, str]:
    key_id, secret = new_secret()
    key = ApiKey(id=key_id, tenant=tenant, scope=scope, secret_sha256=secret_sha256(secret))
    return replace(key, **changes), secret


async def eventually(holds: Callable[[], bool], timeout_s: float = 1.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.005)


@pytest.fixture
async def keyring(store: RegistryStore) -> AsyncIterator[Keyring]:
    await store.tenancy.create("t", Quota(requests_per_minute=5))
    keyring = Keyring(store)
    await keyring.start()
    yield keyring
    await keyring.stop()


def knows(keyring: Keyring, secret: str) -> bool:
    try:
        keyring.authenticate(secret)
    except Unauthenticated:
        return False
    return True


async def test_a_key_is_known_within_a_second_and_ends_within_one(
    store: RegistryStore, keyring: Keyring
) -> None:
    key, secret = make_key(scope=Scope.ADMIN)
    await store.tenancy.create_key(key)
    await eventually(lambda: knows(keyring, secret))
    expected = Principal(tenant="t", scope=Scope.ADMIN, key_id=key.id)
    assert keyring.authenticate(secret) == expected
    await store.tenancy.revoke_key("t", key.id)
    await eventually(lambda: not knows(keyring, secret))


async def test_wrong_expired_and_malformed_keys_are_refused_alike(
    store: RegistryStore, keyring: Keyring
) -> None:
    key, secret = make_key()
    expired, old_secret = make_key(expires_at_s=time.time() - 1)
    for each in (key, expired):
        await store.tenancy.create_key(each)
    await eventually(lambda: knows(keyring, secret))
    forged = f"lf_{key.id}_{new_secret()[1].split('_')[2]}"[:63].ljust(63, "A")
    messages = set()
    for bad in (old_secret, forged, new_secret()[1], "", "x", secret + "x", secret[:-1]):
        with pytest.raises(Unauthenticated) as caught:
            keyring.authenticate(bad)
        messages.add(caught.value.message)
    assert len(messages) == 1


async def test_quotas_follow(store: RegistryStore, keyring: Keyring) -> None:
    assert keyring.quota("t") == Quota(requests_per_minute=5)
    assert keyring.quota("unknown") == Quota()
    await store.tenancy.set_quota("t", Quota(tokens_per_minute=9))
    await eventually(lambda: keyring.quota("t") == Quota(tokens_per_minute=9))
    await store.tenancy.delete("t")
    await eventually(lambda: keyring.quota("t") == Quota())


async def test_the_operators_key_needs_no_redis(store: RegistryStore) -> None:
    _, secret = new_secret()
    keyring = Keyring(store, operator_key(secret))
    assert keyring.authenticate(secret).scope is Scope.OPERATOR
    with pytest.raises(Unauthenticated, match="form"):
        operator_key("secret")


async def test_known_keys_stay_valid_while_redis_is_away_and_changes_are_caught_up(
    tmp_path: Path,
) -> None:
    with EmbeddedRedis(tmp_path) as server:
        store = RegistryStore(server.url, options=LinkOptions(deadline_s=0.5))
        (key, secret), (later, later_secret) = make_key("default"), make_key("default")
        await store.tenancy.create_key(key)
        keyring = Keyring(store)
        await keyring.start()
        server.stop()
        with pytest.raises(LorafleetError):
            await store.tenancy.create_key(later)
        assert knows(keyring, secret)
        server.start()
        await store.tenancy.create_key(later)
        await store.tenancy.revoke_key("default", key.id)
        await eventually(lambda: knows(keyring, later_secret) and not knows(keyring, secret), 5.0)
        await keyring.stop()
        await store.close()
