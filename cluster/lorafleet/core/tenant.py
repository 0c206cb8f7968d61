"""Tenants: who owns adapters, what they may use, and the keys that prove who asks.

An API key reads `lf_<id>_<secret>`. The id is public; of the secret the registry keeps a sha256,
which is enough as the secret is 256 random bits. It knows neither Redis nor protobuf.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field

from lorafleet.core.names import DEFAULT_TENANT

_KEY = re.compile(r"lf_([0-9a-f]{16})_([0-9A-Za-z_-]{43})")


class Scope(enum.Enum):
    """What a key allows; each allows what those before it do."""

    DATA = "data"
    ADMIN = "admin"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Bounds of a tenant; 0 is no bound."""

    adapters: int = 0
    bytes: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant; what it uses is counted in versions' file bytes and in registered adapters."""

    name: str
    quota: Quota = field(default_factory=Quota)
    created_at_s: float = 0.0
    used_adapters: int = 0
    used_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as the registry keeps it."""

    id: str
    tenant: str
    scope: Scope
    secret_sha256: str
    note: str = ""
    created_at_s: float = 0.0
    expires_at_s: float | None = None

    def proves(self, secret: str, now_s: float) -> bool:
        """Whether a text that a client sent is this key, unexpired. Takes constant time."""
        same = hmac.compare_digest(secret_sha256(secret), self.secret_sha256)
        return same and (self.expires_at_s is None or now_s < self.expires_at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who makes a call."""

    tenant: str
    scope: Scope
    key_id: str = ""

    def allows(self, scope: Scope) -> bool:
        """Whether it may do what needs a scope."""
        order = list(Scope)
        return order.index(self.scope) >= order.index(scope)

    def sees(self, tenant: str) -> bool:
        """Whether adapters of a tenant exist for it: its own, the default's; all for operators."""
        return self.scope is Scope.OPERATOR or tenant in (self.tenant, DEFAULT_TENANT)

    def owns(self, tenant: str) -> bool:
        """Whether it may change what is a tenant's."""
        return self.scope is Scope.OPERATOR or (self.scope is Scope.ADMIN and tenant == self.tenant)


ANYONE = Principal(tenant=DEFAULT_TENANT, scope=Scope.OPERATOR)
"""Who calls a server that runs without authentication."""


def new_secret() -> tuple[str, str]:
    """A fresh (key id, secret): the secret is the whole text that clients send."""
    key_id = secrets.token_hex(8)
    return key_id, f"lf_{key_id}_{secrets.token_urlsafe(32)}"


def key_id_of(secret: str) -> str | None:
    """The id in a key's text; None when it is no key."""
    match = _KEY.fullmatch(secret)
    return match[1] if match else None


def secret_sha256(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
