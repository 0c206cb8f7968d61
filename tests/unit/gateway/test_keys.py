"""A gateway that asks for keys: who gets in, whose adapters exist for whom, and their quotas."""

from __future__ import annotations

import asyncio

import grpc
import pytest
import redis

from gateway_support import BASE, House
from lorafleet.core.record import Share, Target
from lorafleet.core.tenant import ApiKey, Quota, Scope, new_secret, secret_sha256
from lorafleet.registry.keyring import read_or_make_key
from lorafleet.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2
from lorafleet.wire.auth import bearer


@pytest.fixture
async def guarded(house: House, tmp_path):
    await house.replica("only")
    for name in ("public", "acme/secret", "rival/secret"):
        await house.publish(name)
    house.operator = read_or_make_key(tmp_path / "operator.key")
    await house.open(require_keys=True, operator_key_file=tmp_path / "operator.key")
    await house.ready(1)
    return house


async def key(house: House, tenant: str = "acme", scope: Scope = Scope.DATA) -> str:
    key_id, secret = new_secret()
    await house.store.tenancy.create_key(
        ApiKey(id=key_id, tenant=tenant, scope=scope, secret_sha256=secret_sha256(secret))
    )
    await eventually_known(house, secret)
    return secret


async def eventually_known(house: House, secret: str) -> None:
    async with asyncio.timeout(5):
        while True:
            try:
                await house.ask(metadata=bearer(secret))
                return
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                await asyncio.sleep(0.01)


async def code(house: House, adapter: str, secret: str | None) -> str:
    try:
        await house.ask(adapter, metadata=bearer(secret))
        return "OK"
    except grpc.aio.AioRpcError as error:
        return error.code().name


async def test_without_a_key_nothing_is_served(guarded):
    assert await code(guarded, "", None) == "UNAUTHENTICATED"
    assert await code(guarded, "public", "lf_0123456789abcdef_" + "x" * 43) == "UNAUTHENTICATED"
    assert await code(guarded, "public", "nonsense") == "UNAUTHENTICATED"
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await guarded.stub.ListModels(inference_pb2.ListModelsRequest())
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_tenant_sees_its_own_and_the_defaults_adapters_alone(guarded):
    secret = await key(guarded)
    assert await code(guarded, "", secret) == "OK"
    assert await code(guarded, "public", secret) == "OK"
    assert await code(guarded, "acme/secret", secret) == "OK"
    assert await code(guarded, "rival/secret", secret) == "NOT_FOUND"
    listed = await guarded.stub.ListModels(
        inference_pb2.ListModelsRequest(), metadata=bearer(secret)
    )
    assert [model.name for model in listed.models] == ["base", "acme/secret", "public"]


async def test_an_unseen_adapter_answers_as_one_that_is_not_there(guarded):
    secret = await key(guarded)
    texts = []
    for name in ("rival/secret", "rival/nothing"):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await guarded.ask(name, metadata=bearer(secret))
        texts.append(raised.value.details().replace(name, "NAME"))
    assert texts[0] == texts[1]


async def test_the_operator_sees_everything_and_the_fleets_state(guarded):
    assert await code(guarded, "rival/secret", guarded.operator) == "OK"
    fleet = fleet_pb2_grpc.FleetStub(guarded.channel)
    status = await fleet.GetStatus(fleet_pb2.GetStatusRequest(), metadata=bearer(guarded.operator))
    assert status.base_digest == BASE.digest
    secret = await key(guarded, scope=Scope.ADMIN)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await fleet.GetStatus(fleet_pb2.GetStatusRequest(), metadata=bearer(secret))
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_revoked_key_ends_within_a_second(guarded):
    secret = await key(guarded)
    await guarded.store.tenancy.revoke_key("acme", secret.split("_")[1])
    async with asyncio.timeout(1):
        while await code(guarded, "", secret) != "UNAUTHENTICATED":
            await asyncio.sleep(0.02)


async def test_the_quota_of_requests_is_kept_and_said(guarded):
    secret = await key(guarded)
    await guarded.store.tenancy.set_quota("acme", Quota(requests_per_minute=3))
    await asyncio.sleep(0.3)
    codes = [await code(guarded, "public", secret) for _ in range(5)]
    assert codes == ["OK"] * 3 + ["RESOURCE_EXHAUSTED"] * 2
    assert await code(guarded, "public", guarded.operator) == "OK"


async def test_known_keys_and_adapters_serve_while_redis_is_away(guarded, redis_server):
    secret = await key(guarded)
    with redis.Redis.from_url(redis_server) as client:
        client.execute_command("CLIENT", "PAUSE", 1500, "ALL")
    assert await code(guarded, "acme/secret", secret) == "OK"


async def test_requests_with_one_sticky_key_get_one_version(house: House):
    """A split alias: the same key the same version, and over many keys about its weights."""
    await house.replica("only")
    old = await house.publish("pirate", content="old")
    new = await house.publish("pirate", content="new")
    target = Target((Share(version=old, weight=3), Share(version=new, weight=1)))
    await house.store.set_alias("pirate", "canary", target)
    await (await house.open()).ready(1)

    async def served(sticky_key: str) -> str:
        request = inference_pb2.GenerateRequest(
            adapter="pirate@canary", text="hi", sticky_key=sticky_key
        )
        events = [event async for event in house.stub.Generate(request)]
        return events[0].started.version

    for user in range(5):
        assert len({await served(f"user-{user}") for _ in range(4)}) == 1
    versions = [await served(f"user-{user}") for user in range(80)]
    assert set(versions) == {old, new}
    assert 40 <= versions.count(old) <= 76


async def test_a_sticky_key_that_is_too_long_is_refused_by_name(house: House):
    await house.replica("only")
    await (await house.open()).ready(1)
    request = inference_pb2.GenerateRequest(text="hi", sticky_key="ü" * 129)
    with pytest.raises(grpc.aio.AioRpcError, match="sticky_key has 258 bytes"):
        _ = [event async for event in house.stub.Generate(request)]
