"""What callers of the admin plane may do: scopes by method, tenants by name.

An adapter of a tenant that a caller does not see is reported exactly as one that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable

from lorafleet.core.errors import Forbidden, Unauthenticated
from lorafleet.core.names import canonical_name, tenant_of
from lorafleet.core.tenant import Principal, Scope
from lorafleet.registry.changes import no_adapter
from lorafleet.wire.auth import Authorise, caller

_OPERATORS_ALONE = frozenset(
    f"/lorafleet.v1.Tenants/{method}"
    for method in ("CreateTenant", "ListTenants", "SetQuota", "DeleteTenant")
)


def needed_scope(method: str) -> Scope:
    """The scope that a method of the admin plane needs."""
    return Scope.OPERATOR if method in _OPERATORS_ALONE else Scope.ADMIN


def authorise_by(
    authenticate: Callable[[str], Principal], needed: Callable[[str], Scope], plane: str
) -> Authorise:
    """Says who calls a method of a plane.

    Parameters
    ----------
    authenticate : callable
        Says who a secret belongs to.
    needed : callable
        Says what a method, by its full name, needs.
    plane : str
        Named in errors.
    """

    def authorise(method: str, secret: str | None) -> Principal:
        if secret is None:
            raise Unauthenticated(
                f"the {plane} needs an API key, sent as `authorization: Bearer <key>`",
                field="authorization",
            )
        principal = authenticate(secret)
        scope = needed(method)
        if not principal.allows(scope):
            raise Forbidden(
                f"{method.rpartition('/')[2]} needs a key with scope {scope.value}; this one's is "
                f"{principal.scope.value}",
                scope=scope.value,
            )
        return principal

    return authorise


def seen(name: str) -> str:
    """The canonical form of an adapter's name that the caller may look at.

    Raises
    ------
    InvalidInput
        The name breaks the rule.
    NotFound
        It is of a tenant that the caller does not see.
    """
    name = canonical_name(name)
    if not caller().sees(tenant_of(name)):
        raise no_adapter(name)
    return name


def owned(name: str) -> str:
    """The canonical form of an adapter's name that the caller may change; errors as in `seen`.

    Raises
    ------
    Forbidden
        The caller may look at it only.
    """
    name = seen(name)
    check_owner(tenant_of(name))
    return name


def check_owner(tenant: str) -> None:
    """Raise Forbidden unless the caller may change what is a tenant's."""
    if not caller().owns(tenant):
        raise Forbidden(
            f"this key is of tenant {caller().tenant!r} and may not change what is of {tenant!r}",
            tenant=tenant,
        )
