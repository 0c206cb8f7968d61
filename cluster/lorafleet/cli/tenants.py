"""`lorafleet tenant` and `lorafleet key`: who may use the registry, and how much."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorafleet.cli.output import AdminOption, JsonOption, out, print_json
from lorafleet.cli.records import when
from lorafleet.core.tenant import Scope

if TYPE_CHECKING:
    from lorafleet.core.tenant import ApiKey, Quota, Tenant

tenant_app = typer.Typer(help="Tenants and their quotas; for operators.", no_args_is_help=True)
key_app = typer.Typer(help="API keys of tenants.", no_args_is_help=True)

TenantArgument = Annotated[str, typer.Argument(help="The tenant's name.")]
AdaptersOption = Annotated[int, typer.Option(min=0, help="Most adapters; 0 is no bound.")]
BytesOption = Annotated[
    int, typer.Option("--bytes", min=0, help="Most bytes of all versions' files; 0 is no bound.")
]
RequestsOption = Annotated[
    int, typer.Option(min=0, help="Most inference requests a minute; 0 is no bound.")
]
TokensOption = Annotated[
    int, typer.Option(min=0, help="Most prompt and generated tokens a minute; 0 is no bound.")
]


@tenant_app.command()
def create(
    name: TenantArgument,
    adapters: AdaptersOption = 0,
    bytes_: BytesOption = 0,
    requests_per_minute: RequestsOption = 0,
    tokens_per_minute: TokensOption = 0,
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Make a tenant.

    Example: `lorafleet tenant create acme --adapters 100 --tokens-per-minute 50000`
    """
    from lorafleet.sdk.admin import create_tenant

    quota = _quota(adapters, bytes_, requests_per_minute, tokens_per_minute)
    _show([_run(create_tenant(name, quota), admin)], json)


@tenant_app.command("list")
def list_(admin: AdminOption = None, json: JsonOption = False) -> None:
    """List tenants with what they use."""
    from lorafleet.sdk.admin import list_tenants

    tenants, token = _run(list_tenants(), admin)
    while token:
        more, token = _run(list_tenants(token), admin)
        tenants += more
    _show(tenants, json)


@tenant_app.command()
def show(name: TenantArgument, admin: AdminOption = None, json: JsonOption = False) -> None:
    """Show a tenant with what it uses."""
    from lorafleet.sdk.admin import get_tenant

    _show([_run(get_tenant(name), admin)], json)


@tenant_app.command()
def quota(
    name: TenantArgument,
    adapters: AdaptersOption = 0,
    bytes_: BytesOption = 0,
    requests_per_minute: RequestsOption = 0,
    tokens_per_minute: TokensOption = 0,
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Replace a tenant's quota; what is above it already stays."""
    from lorafleet.sdk.admin import set_quota

    wanted = _quota(adapters, bytes_, requests_per_minute, tokens_per_minute)
    _show([_run(set_quota(name, wanted), admin)], json)


@tenant_app.command()
def delete(name: TenantArgument, admin: AdminOption = None, json: JsonOption = False) -> None:
    """Remove a tenant that has no adapters, with its keys."""
    from lorafleet.sdk.admin import delete_tenant

    _run(delete_tenant(name), admin)
    if json:
        print_json({"deleted": name})
    else:
        out.print(f"deleted {name}")


@key_app.command("create")
def create_key(
    tenant: TenantArgument,
    scope: Annotated[Scope, typer.Option(help="What it allows.")] = Scope.DATA,
    note: Annotated[str, typer.Option(help="What it is for.")] = "",
    days: Annotated[float | None, typer.Option(help="When it expires; never if not given.")] = None,
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """Make an API key and print its secret, which nobody can show again.

    Example: `lorafleet key create acme --scope admin --days 90`
    """
    from lorafleet.sdk.admin import create_key

    key, secret = _run(create_key(tenant, scope, note=note, days=days), admin)
    if json:
        print_json({**_key(key), "secret": secret})
    else:
        out.print(secret, markup=False)


@key_app.command("list")
def list_keys(tenant: TenantArgument, admin: AdminOption = None, json: JsonOption = False) -> None:
    """List a tenant's keys, without their secrets."""
    from rich.table import Table

    from lorafleet.sdk.admin import list_keys

    keys = _run(list_keys(tenant), admin)
    if json:
        print_json([_key(key) for key in keys])
        return
    table = Table("id", "scope", "note", "created", "expires")
    for key in keys:
        expires = when(key.expires_at_s) if key.expires_at_s is not None else "never"
        table.add_row(key.id, key.scope.value, key.note, when(key.created_at_s), expires)
    out.print(table)


@key_app.command("revoke")
def revoke_key(
    tenant: TenantArgument,
    key_id: Annotated[str, typer.Argument(help="The key's id.")],
    admin: AdminOption = None,
    json: JsonOption = False,
) -> None:
    """End a key, everywhere within a second."""
    from lorafleet.sdk.admin import revoke_key

    _run(revoke_key(tenant, key_id), admin)
    if json:
        print_json({"revoked": key_id})
    else:
        out.print(f"revoked {key_id}")


def _run(operation: Any, admin: str | None) -> Any:
    from lorafleet.sdk import Client

    with Client(admin=admin) as client:
        return client.run(operation)


def _quota(adapters: int, bytes_: int, requests: int, tokens: int) -> Quota:
    from lorafleet.core.tenant import Quota

    return Quota(
        adapters=adapters, bytes=bytes_, requests_per_minute=requests, tokens_per_minute=tokens
    )


def _key(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "scope": key.scope.value,
        "note": key.note,
        "created_at": key.created_at_s,
        "expires_at": key.expires_at_s,
    }


def _show(tenants: list[Tenant], json: bool) -> None:
    from rich.table import Table

    if json:
        print_json([asdict(tenant) for tenant in tenants])
        return
    table = Table("tenant", "adapters", "bytes", "requests/min", "tokens/min")
    for tenant in tenants:
        most = tenant.quota
        table.add_row(
            tenant.name,
            _of(tenant.used_adapters, most.adapters),
            _of(tenant.used_bytes, most.bytes),
            str(most.requests_per_minute or "-"),
            str(most.tokens_per_minute or "-"),
        )
    out.print(table)


def _of(used: int, most: int) -> str:
    return f"{used} of {most}" if most else str(used)
