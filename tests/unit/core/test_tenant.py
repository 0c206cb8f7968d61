"""Keys and what they allow."""

from __future__ import annotations

import pytest

from lorafleet.core.tenant import (
    ApiKey,
    Principal,
    Scope,
    key_id_of,
    new_secret,
    secret_sha256,
)


def test_a_key_proves_its_own_secret_until_it_expires() -> None:
    key_id, secret = new_secret()
    key = ApiKey(
        id=key_id,
        tenant="t",
        scope=Scope.DATA,
        secret_sha256=secret_sha256(secret),
        expires_at_s=100.0,
    )
    assert key_id_of(secret) == key_id
    assert key.proves(secret, 99.0)
    assert not key.proves(secret, 100.0)
    assert not key.proves(new_secret()[1], 99.0)
    assert secret not in repr(key)


@pytest.mark.parametrize("text", ["", "lf_", "lf_0123456789abcdef_short", "Bearer x", "\ud800"])
def test_what_is_no_key_has_no_id(text: str) -> None:
    assert key_id_of(text) is None


def test_secrets_are_never_the_same() -> None:
    assert len({new_secret() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [
        (Scope.DATA, {Scope.DATA}),
        (Scope.ADMIN, {Scope.DATA, Scope.ADMIN}),
        (Scope.OPERATOR, {Scope.DATA, Scope.ADMIN, Scope.OPERATOR}),
    ],
)
def test_each_scope_allows_what_those_below_do(scope: Scope, allowed: set[Scope]) -> None:
    principal = Principal(tenant="t", scope=scope)
    assert {each for each in Scope if principal.allows(each)} == allowed


def test_c53_a_tenant_sees_its_own_and_the_defaults_and_owns_its_own() -> None:
    admin = Principal(tenant="t", scope=Scope.ADMIN)
    assert [admin.sees(tenant) for tenant in ("t", "default", "u")] == [True, True, False]
    assert [admin.owns(tenant) for tenant in ("t", "default", "u")] == [True, False, False]
    assert not Principal(tenant="t", scope=Scope.DATA).owns("t")
    operator = Principal(tenant="default", scope=Scope.OPERATOR)
    assert operator.sees("u")
    assert operator.owns("u")
