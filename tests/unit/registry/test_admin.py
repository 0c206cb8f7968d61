"""The admin plane over real gRPC and Redis: keys and tenants, resume, imports, watch, verify."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from lorafleet.core.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    InvalidAdapter,
    InvalidInput,
    NotFound,
    Unauthenticated,
    Unavailable,
)
from lorafleet.core.names import DEFAULT_TENANT
from lorafleet.core.tenant import Principal, Scope, new_secret
from lorafleet.registry import BlobStore, EmbeddedRedis
from lorafleet.registry.keyring import operator_key, read_or_make_key
from lorafleet.registry.push import push_messages
from lorafleet.registry.server import (
    SERVICE,
    TENANTS,
    RegistryServer,
    ServerOptions,
)
from lorafleet.v1 import registry_pb2 as pb
from lorafleet.v1 import tenants_pb2
from support.admin import VERSION, Admin


async def known(admin: Admin) -> Admin:
    """Once the server has heard of the key."""
    async with asyncio.timeout(2):
        while True:
            try:
                await admin.call("ListAdapters", pb.ListAdaptersRequest())
                return admin
            except Unauthenticated:
                await asyncio.sleep(0.01)
            except Forbidden:
                return admin


METHODS = [
    (service, method)
    for file in (pb.DESCRIPTOR, tenants_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
]


@pytest.mark.parametrize(("service", "method"), METHODS, ids=[method.name for _, method in METHODS])
async def test_c53_every_method_asks_for_a_key_and_for_more_than_a_data_key(
    guarded: Admin, service: Any, method: Any
) -> None:
    data_key = await guarded.make_key("t1", tenants_pb2.SCOPE_DATA)
    await known(guarded.with_key(data_key))
    request = getattr(
        pb if service.name == "AdapterRegistry" else tenants_pb2, method.input_type.name
    )()

    async def refusal(secret: str | None) -> Exception:
        stub = guarded.with_key(secret)
        sent = iter([request]) if method.name == "PushAdapter" else request
        ask = stub.stream if method.name in ("Watch", "ImportAdapter") else stub.call
        with pytest.raises((Unauthenticated, Forbidden)) as caught:
            await ask(method.name, sent)
        return caught.value

    assert {SERVICE, TENANTS} >= {service.full_name}
    for secret in (None, "", "x", new_secret()[1]):
        assert isinstance(await refusal(secret), Unauthenticated)
    assert isinstance(await refusal(data_key), Forbidden)


async def test_c53_a_tenant_finds_nothing_of_another_in_any_call(
    guarded: Admin, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    one, two = [
        await known(guarded.with_key(await guarded.make_key(tenant))) for tenant in ("t1", "t2")
    ]
    directory = make_adapter(tmp_path / "a")
    pushed = (await one.push(directory, "t1/p")).version
    await guarded.push(directory, "shared")
    name = "t1/p"
    calls: list[tuple[str, Any]] = [
        ("GetAdapter", pb.GetAdapterRequest(name=name)),
        ("GetHistory", pb.GetHistoryRequest(name=name)),
        ("SetAlias", pb.SetAliasRequest(name=name, alias="x", version=pushed.id)),
        ("RemoveAlias", pb.RemoveAliasRequest(name=name, alias="x")),
        ("Rollback", pb.RollbackRequest(name=name, alias="latest")),
        ("SetLabels", pb.SetLabelsRequest(name=name)),
        ("Pin", pb.PinRequest(name=name, version=pushed.id, replicas=1)),
        ("Prefetch", pb.PrefetchRequest(name=name, version=pushed.id)),
        ("Verify", pb.VerifyRequest(name=name)),
        ("DeleteAdapter", pb.DeleteAdapterRequest(name=name)),
        ("RestoreAdapter", pb.RestoreAdapterRequest(name=name)),
        ("PlanPush", pb.PlanPushRequest(name=name, files=pushed.files)),
    ]
    for method, request in calls:
        with pytest.raises(NotFound):
            await two.call(method, request)
    with pytest.raises(NotFound):
        await two.push(directory, name)
    listed = (await two.call("ListAdapters", pb.ListAdaptersRequest())).adapters
    assert [adapter.name for adapter in listed] == ["shared"]
    for tenant, names in (("t1", []), ("default", ["shared"]), ("t2", [])):
        request = pb.ListAdaptersRequest(tenant=tenant)
        listed = (await two.call("ListAdapters", request)).adapters
        assert [adapter.name for adapter in listed] == names
    # The shared one is seen but not changed; the digest of a file gives no access to it.
    with pytest.raises(Forbidden):
        await two.call("DeleteAdapter", pb.DeleteAdapterRequest(name="shared"))
    plan = await two.call("PlanPush", pb.PlanPushRequest(name="t2/p", files=pushed.files))
    assert list(plan.held_bytes) == [0, 0]
    watched = two.method("Watch")(pb.WatchRequest(), metadata=two.metadata)
    names = []
    async for response in watched:
        names.append(response.changed.name)
        if response.current:
            break
    assert names == ["", "shared", ""]
    watched.cancel()


async def test_keys_are_made_within_ones_own_scope_and_tenant(guarded: Admin) -> None:
    one = await known(guarded.with_key(await guarded.make_key("t1")))
    own = await one.make_key("t1", tenants_pb2.SCOPE_DATA)
    with pytest.raises(Forbidden):
        await one.make_key("t1", tenants_pb2.SCOPE_OPERATOR)
    with pytest.raises(NotFound):
        await one.make_key("t2")
    with pytest.raises(InvalidInput, match="operator keys"):
        await guarded.make_key("t1", tenants_pb2.SCOPE_OPERATOR)
    with pytest.raises(InvalidInput, match="scope"):
        await one.make_key("t1", tenants_pb2.SCOPE_UNSPECIFIED)
    with pytest.raises(Forbidden):
        await one.call("CreateTenant", tenants_pb2.CreateTenantRequest(name="t9"))
    listed = (await one.call("ListKeys", tenants_pb2.ListKeysRequest(tenant="t1"))).keys
    assert len(listed) == 2
    assert own not in str(listed)
    await one.call("RevokeKey", tenants_pb2.RevokeKeyRequest(tenant="t1", id=listed[0].id))
    async with asyncio.timeout(1):
        while True:
            try:
                await one.call("ListAdapters", pb.ListAdaptersRequest())
                await asyncio.sleep(0.01)
            except Unauthenticated:
                break


async def test_a_push_needs_its_tenant_to_exist_where_keys_are_asked_for(
    guarded: Admin, admin: Admin, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    directory = make_adapter(tmp_path / "a")
    with pytest.raises(NotFound, match="no tenant 'nobody'"):
        await guarded.push(directory, "nobody/a")
    assert (await admin.push(directory, "nobody/a")).version.id


async def test_history_names_the_key_that_did_it(
    guarded: Admin, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    secret = await guarded.make_key("t1")
    one = await known(guarded.with_key(secret))
    await one.push(make_adapter(tmp_path / "a"), "t1/a")
    (entry,) = (await one.call("GetHistory", pb.GetHistoryRequest(name="t1/a"))).entries
    assert entry.actor == secret.split("_")[1]


# Resume.


async def parts_of(directory: Path, name: str) -> AsyncIterator[Any]:
    """A push that breaks off in the middle of its last file."""
    messages = list(push_messages(directory, name))
    for message in messages[:-1]:
        yield message
    yield pb.PushAdapterRequest(chunk=messages[-1].chunk[:1000])
    await asyncio.sleep(0.3)  # what was not sent by then would not be
    raise OSError("the connection was lost")


async def test_c08_a_push_that_broke_off_goes_on_where_it_was(
    admin: Admin, blobs: BlobStore, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    directory = make_adapter(tmp_path / "a", rank=8)
    header = next(push_messages(directory, "a")).header
    with pytest.raises((Unavailable, asyncio.CancelledError)):
        await admin.call("PushAdapter", parts_of(directory, "a"))
    plan = pb.PlanPushRequest(name="a", files=header.files)
    async with asyncio.timeout(5):
        while True:
            held = list((await admin.call("PlanPush", plan)).held_bytes)
            if all(held):
                break
            await asyncio.sleep(0.02)
    assert held == [header.files[0].size_bytes, 1000]
    pushed = await admin.push(directory, "a", held_bytes=held)
    assert not pushed.existed
    # Now the blobs are there: nothing need be sent again, and another tenant has nothing.
    held = list((await admin.call("PlanPush", plan)).held_bytes)
    assert held == [entry.size_bytes for entry in header.files]
    again = await admin.push(directory, "b", held_bytes=held)
    assert again.version.id == pushed.version.id
    other = pb.PlanPushRequest(name="other/a", files=header.files)
    assert list((await admin.call("PlanPush", other)).held_bytes) == [0, 0]


async def test_what_is_held_no_more_is_a_conflict_and_damage_is_found(
    admin: Admin, blobs: BlobStore, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    directory = make_adapter(tmp_path / "a", rank=8)
    with pytest.raises(Conflict, match="plan the push again"):
        await admin.push(directory, "a", held_bytes=[1, 1])
    with pytest.raises(InvalidInput, match="held_bytes"):
        await admin.push(directory, "a", held_bytes=[10**9, 0])
    with pytest.raises((Unavailable, asyncio.CancelledError)):
        await admin.call("PushAdapter", parts_of(directory, "a"))
    partials = tmp_path / "blobs" / "partial"
    async with asyncio.timeout(5):
        while not partials.is_dir() or len(list(partials.iterdir())) < 2:
            await asyncio.sleep(0.02)
    for partial in partials.iterdir():
        if partial.stat().st_size == 1000:
            partial.write_bytes(b"x" * 1000)
    header = next(push_messages(directory, "a")).header
    held = await admin.call("PlanPush", pb.PlanPushRequest(name="a", files=header.files))
    with pytest.raises(InvalidAdapter, match="sha256"):
        await admin.push(directory, "a", held_bytes=list(held.held_bytes))
    assert (await admin.push(directory, "a")).version.id


# Watch and verify.


async def test_a_watch_begins_with_everything_and_goes_on_from_its_cursor(
    admin: Admin, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    one, two = (make_adapter(tmp_path / str(i), seed=i) for i in range(2))
    await admin.push(one, "a")
    call = admin.method("Watch")(pb.WatchRequest())

    async def until_current(call: Any) -> tuple[list[Any], str]:
        events = []
        async for response in call:
            if response.WhichOneof("event") == "current":
                if events:
                    return events, response.cursor
            else:
                events.append(response)
        raise AssertionError

    events, cursor = await until_current(call)
    assert [event.WhichOneof("event") for event in events] == ["restart", "changed"]
    await admin.push(two, "b")
    await admin.call("DeleteAdapter", pb.DeleteAdapterRequest(name="a"))
    seen: dict[str, str] = {}
    while len(seen) < 2:
        events, _ = await until_current(call)
        for event in events:
            seen[event.deleted or event.changed.name] = event.WhichOneof("event")
    assert seen == {"a": "deleted", "b": "changed"}
    call.cancel()
    resumed = admin.method("Watch")(pb.WatchRequest(cursor=cursor))
    events, _ = await until_current(resumed)
    assert [event.WhichOneof("event") for event in events] == ["deleted", "changed"]
    resumed.cancel()
    for bad in ("x", "7-nowhere"):
        call = admin.method("Watch")(pb.WatchRequest(cursor=bad))
        if bad == "x":
            with pytest.raises(grpc.aio.AioRpcError, match="cursor"):
                await call.read()
        else:
            assert (await call.read()).restart
            call.cancel()


async def test_verify_names_the_file_that_was_damaged(
    admin: Admin, blobs: BlobStore, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    version = (await admin.push(make_adapter(tmp_path / "a"), "a")).version
    request = pb.VerifyRequest(name="a")
    (check,) = (await admin.call("Verify", request)).checks
    assert (check.version, list(check.problems)) == (version.id, [])
    path = blobs.path(version.files[1].sha256)
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (check,) = (await admin.call("Verify", request)).checks
    assert "adapter_model.safetensors: expected sha256" in check.problems[0]
    path.unlink()
    (check,) = (await admin.call("Verify", request)).checks
    assert "cannot be read" in check.problems[0]
    with pytest.raises(NotFound):
        await admin.call("Verify", pb.VerifyRequest(name="a", version=VERSION))


# Changes over the wire.


async def test_aliases_split_roll_back_and_are_removed_over_the_wire(
    admin: Admin, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    ids = [
        (await admin.push(make_adapter(tmp_path / str(i), seed=i), "a")).version.id
        for i in range(2)
    ]
    shares = [pb.Share(version=version, weight=w) for version, w in zip(ids, (9, 1), strict=True)]
    split = pb.SplitAliasRequest(name="a", alias="prod", shares=shares)
    adapter = (await admin.call("SplitAlias", split)).adapter
    assert list(adapter.aliases["prod"].shares) == shares
    stale = pb.Condition(if_revision=1)
    with pytest.raises(Conflict, match="revision"):
        await admin.call(
            "RemoveAlias", pb.RemoveAliasRequest(name="a", alias="prod", condition=stale)
        )
    for wrong in (
        [],
        [pb.Share(version=ids[0], weight=0)],
        [pb.Share(version=ids[0], weight=1)] * 2,
        [pb.Share(version="x", weight=1)],
    ):
        with pytest.raises(InvalidInput):
            await admin.call(
                "SplitAlias", pb.SplitAliasRequest(name="a", alias="prod", shares=wrong)
            )
    with pytest.raises(InvalidInput, match="latest"):
        await admin.call(
            "SplitAlias", pb.SplitAliasRequest(name="a", alias="latest", shares=shares)
        )
    back = await admin.call("Rollback", pb.RollbackRequest(name="a", alias="latest"))
    assert back.adapter.aliases["latest"].shares[0].version == ids[0]
    with pytest.raises(InvalidInput, match="split"):
        await admin.call("Pin", pb.PinRequest(name="a", version="prod", replicas=1))
    pinned = await admin.call("Pin", pb.PinRequest(name="a", replicas=2))
    assert dict(pinned.adapter.pins) == {ids[0]: 2}
    gone = await admin.call("RemoveAlias", pb.RemoveAliasRequest(name="a", alias="prod"))
    assert "prod" not in gone.adapter.aliases
    await admin.call("Prefetch", pb.PrefetchRequest(name="a", version=ids[1]))
    labelled = pb.SetLabelsRequest(name="a", labels={"team": "x"})
    assert dict((await admin.call("SetLabels", labelled)).adapter.labels) == {"team": "x"}
    for labels in ({"": "x"}, {"k": "x" * 300}, {f"k{i}": "" for i in range(65)}):
        with pytest.raises(InvalidInput, match="labels"):
            await admin.call("SetLabels", pb.SetLabelsRequest(name="a", labels=labels))


async def test_a_deleted_adapter_is_listed_apart_and_restored_over_the_wire(
    admin: Admin, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    version = (await admin.push(make_adapter(tmp_path / "a"), "a")).version
    deleted = await admin.call("DeleteAdapter", pb.DeleteAdapterRequest(name="a"))
    assert deleted.restorable_until.ToSeconds() > 0
    listed = await admin.call("ListAdapters", pb.ListAdaptersRequest(deleted=True))
    assert [adapter.name for adapter in listed.adapters] == ["a"]
    restored = (await admin.call("RestoreAdapter", pb.RestoreAdapterRequest(name="a"))).adapter
    assert [v.id for v in restored.versions] == [version.id]
    with pytest.raises(AlreadyExists):
        await admin.call("RestoreAdapter", pb.RestoreAdapterRequest(name="a"))


async def test_lists_are_filtered_over_the_wire(
    admin: Admin, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    directory = make_adapter(tmp_path / "a")
    for name in ("one", "org/one", "org/two"):
        await admin.push(directory, name, labels={"short": name[-3:]})

    async def names(**request: Any) -> list[str]:
        response = await admin.call("ListAdapters", pb.ListAdaptersRequest(**request))
        return [adapter.name for adapter in response.adapters]

    assert await names(tenant="org") == ["org/one", "org/two"]
    assert await names(search="one") == ["one", "org/one"]
    assert await names(labels={"short": "two"}) == ["org/two"]
    first = await admin.call("ListAdapters", pb.ListAdaptersRequest(search="o", page_size=2))
    assert first.next_page_token == "org/one"


# The process.


def test_an_operator_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "home" / "operator.key"
    secret = read_or_make_key(path)
    assert read_or_make_key(path) == secret
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert operator_key(secret).scope is Scope.OPERATOR
    assert [item.name for item in path.parent.iterdir()] == [path.name]


async def test_a_server_open_to_other_machines_must_ask_for_keys(
    tmp_path: Path, redis_server: EmbeddedRedis
) -> None:
    options = ServerOptions(
        redis_url=redis_server.url,
        blobs_dir=tmp_path / "blobs",
        model_dir=tmp_path,
        listen="0.0.0.0:0",
    )
    with pytest.raises(InvalidInput, match="operator-key-file"):
        await RegistryServer(options).start()


def test_anyone_is_an_operator_of_the_default_tenant() -> None:
    from lorafleet.core.tenant import ANYONE

    assert Principal(tenant=DEFAULT_TENANT, scope=Scope.OPERATOR) == ANYONE
