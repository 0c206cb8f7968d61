"""Changes beyond publishing: splits, rollbacks, labels, pins, deletion with grace, conditions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from lorafleet.core.errors import (
    AlreadyExists,
    Conflict,
    Exhausted,
    InvalidInput,
    LorafleetError,
    NotFound,
)
from lorafleet.core.manifest import VersionManifest
from lorafleet.core.record import Share, Target
from lorafleet.core.tenant import ApiKey, Quota, Scope
from lorafleet.registry import RegistryStore
from lorafleet.registry.feed import Cursor, Prefetch
from lorafleet.registry.store import Condition, Filter

ManifestMaker = Callable[..., VersionManifest]


@pytest.fixture
async def ids(store: RegistryStore, make_manifest: ManifestMaker) -> list[str]:
    """Adapter `a` with three versions."""
    manifests = [make_manifest("a", number) for number in (1, 2, 3)]
    for manifest in manifests:
        await store.publish_version(manifest)
    return [manifest.id for manifest in manifests]


def split(ids: list[str], *weights: int) -> Target:
    return Target(tuple(Share(version=v, weight=w) for v, w in zip(ids, weights, strict=False)))


async def test_a_split_alias_comes_back_as_it_was_set(store: RegistryStore, ids: list[str]) -> None:
    record = await store.set_alias("a", "prod", split(ids, 90, 10))
    assert record.aliases["prod"] == split(ids, 90, 10)
    assert record.aliases["prod"].version is None
    with pytest.raises(NotFound, match="no version"):
        await store.set_alias("a", "prod", split(["sha256:" + "e" * 64, *ids], 1, 1))
    assert (await store.get_adapter("a")).aliases["prod"] == split(ids, 90, 10)


async def test_a_rollback_goes_one_back_and_a_second_one_further(
    store: RegistryStore, ids: list[str]
) -> None:
    targets = [Target.to(ids[0]), split(ids, 1, 1), Target.to(ids[2])]
    for target in targets:
        await store.set_alias("a", "prod", target)
    assert (await store.rollback("a", "prod")).aliases["prod"] == targets[1]
    assert (await store.rollback("a", "prod")).aliases["prod"] == targets[0]
    with pytest.raises(Conflict, match="nothing before"):
        await store.rollback("a", "prod")
    # A new target is the newest change again.
    await store.set_alias("a", "prod", targets[2])
    assert (await store.rollback("a", "prod")).aliases["prod"] == targets[0]


async def test_latest_rolls_back_over_pushes(store: RegistryStore, ids: list[str]) -> None:
    assert (await store.rollback("a", "latest")).latest.id == ids[1]
    assert (await store.rollback("a", "latest")).latest.id == ids[0]


async def test_a_removed_alias_is_gone_and_a_rollback_brings_it_back(
    store: RegistryStore, ids: list[str]
) -> None:
    await store.set_alias("a", "prod", ids[0])
    assert "prod" not in (await store.remove_alias("a", "prod")).aliases
    with pytest.raises(NotFound, match="'prod'"):
        await store.remove_alias("a", "prod")
    assert (await store.rollback("a", "prod")).aliases["prod"] == Target.to(ids[0])


async def test_history_says_what_was_done_by_whom_newest_first(
    store: RegistryStore, ids: list[str]
) -> None:
    began_s = time.time()
    who = Condition(actor="key1")
    await store.set_alias("a", "prod", ids[0], who)
    await store.set_alias("a", "prod", split(ids, 1, 2), who)
    await store.set_alias("a", "prod", split(ids, 1, 2), who)  # changes nothing
    await store.rollback("a", "prod")
    await store.set_labels("a", {"team": "x"})
    await store.pin("a", ids[0], 2)
    entries = await store.history("a")
    assert [entry.action for entry in entries] == [
        *("pin", "set_labels", "rollback", "split_alias", "set_alias", "push", "push", "push")
    ]
    assert entries[3].before == Target.to(ids[0])
    assert entries[3].after == split(ids, 1, 2)
    assert [entry.actor for entry in entries[2:5]] == ["", "key1", "key1"]
    assert all(began_s - 5 < entry.at_s < time.time() + 5 for entry in entries)
    revisions = [entry.revision for entry in entries]
    assert revisions == sorted(revisions, reverse=True)
    assert (await store.get_adapter("a")).revision == revisions[0]
    assert await store.history("a", 2) == entries[:2]
    with pytest.raises(NotFound):
        await store.history("b")


async def test_labels_are_replaced_and_pushes_add_to_them(
    store: RegistryStore, make_manifest: ManifestMaker, ids: list[str]
) -> None:
    assert (await store.set_labels("a", {"x": "1", "y": "2"})).labels == {"x": "1", "y": "2"}
    assert (await store.set_labels("a", {"y": "3"})).labels == {"y": "3"}
    await store.publish_version(make_manifest("a", 3), labels={"z": "ü ; = "})
    assert (await store.get_adapter("a")).labels == {"y": "3", "z": "ü ; = "}
    assert (await store.set_labels("a", {})).labels == {}


async def test_pins_are_of_versions_and_zero_ends_them(
    store: RegistryStore, ids: list[str]
) -> None:
    assert (await store.pin("a", ids[0], 2)).pins == {ids[0]: 2}
    assert (await store.pin("a", ids[0], 0)).pins == {}
    with pytest.raises(NotFound, match="no version"):
        await store.pin("a", "sha256:" + "e" * 64, 1)


async def test_a_prefetch_is_heard_and_not_stored(store: RegistryStore, ids: list[str]) -> None:
    cursor = await store.cursor()
    before = await store.get_adapter("a")
    await store.prefetch("a", ids[1], 3)
    changes = await store.changes(cursor)
    assert changes.prefetches == (Prefetch(adapter="a", version=ids[1], replicas=3),)
    assert changes.names == frozenset()
    assert await store.get_adapter("a") == before


async def test_a_deleted_adapter_can_be_restored_with_all_it_had(
    store: RegistryStore, ids: list[str]
) -> None:
    await store.set_alias("a", "prod", split(ids, 1, 2))
    await store.set_labels("a", {"x": "1"})
    before = await store.get_adapter("a")
    until_s = await store.delete_adapter("a", grace_s=100)
    assert 90 < until_s - time.time() < 110
    assert await store.list_adapters(limit=9) == []
    (deleted,) = await store.list_adapters(limit=9, wanted=Filter(deleted=True))
    assert deleted.versions == before.versions
    assert (await store.history("a"))[0].action == "delete"
    restored = await store.restore_adapter("a")
    assert restored.versions == before.versions
    assert restored.aliases == before.aliases
    assert restored.labels == before.labels
    assert restored.revision > before.revision
    assert (await store.history("a"))[0].action == "restore"
    with pytest.raises(AlreadyExists):
        await store.restore_adapter("a")
    with pytest.raises(NotFound):
        await store.restore_adapter("never")


async def test_a_name_taken_since_is_not_overwritten_by_a_restore(
    store: RegistryStore, make_manifest: ManifestMaker, ids: list[str]
) -> None:
    await store.delete_adapter("a", grace_s=100)
    await store.publish_version(make_manifest("a", 9))
    with pytest.raises(AlreadyExists, match="anew"):
        await store.restore_adapter("a")
    assert (await store.get_adapter("a")).latest.id == make_manifest("a", 9).id


async def test_a_tombstone_is_purged_after_its_grace_and_not_before(
    store: RegistryStore, make_manifest: ManifestMaker, ids: list[str]
) -> None:
    await store.publish_version(make_manifest("b", 1))
    await store.delete_adapter("a", grace_s=0)
    await store.delete_adapter("b", grace_s=100)
    await asyncio.sleep(0.01)
    assert await store.expired(time.time()) == ["a"]
    assert await store.purge("a")
    assert not await store.purge("b")
    assert [record.name async for record in store.adapters(deleted=True)] == ["b"]
    with pytest.raises(NotFound):
        await store.restore_adapter("a")


CHANGES: dict[str, Callable[[RegistryStore, str, Condition], Any]] = {
    "set_alias": lambda store, version, c: store.set_alias("a", "x", version, c),
    "split": lambda store, version, c: store.set_alias("a", "x", split([version], 2), c),
    "set_labels": lambda store, version, c: store.set_labels("a", {"k": "v"}, c),
    "pin": lambda store, version, c: store.pin("a", version, 1, c),
    "rollback": lambda store, version, c: store.rollback("a", "latest", c),
    "delete": lambda store, version, c: store.delete_adapter("a", c),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_with_a_stale_revision_changes_nothing(
    store: RegistryStore, ids: list[str], change: str
) -> None:
    record = await store.get_adapter("a")
    stale = Condition(if_revision=record.revision - 1)
    with pytest.raises(Conflict, match="revision") as caught:
        await CHANGES[change](store, ids[0], stale)
    assert caught.value.facts["revision"] == str(record.revision)
    assert await store.get_adapter("a") == record
    await CHANGES[change](store, ids[0], Condition(if_revision=record.revision))


@pytest.mark.parametrize("change", CHANGES)
async def test_a_repeated_change_with_its_key_is_done_once(
    store: RegistryStore, ids: list[str], change: str
) -> None:
    once = Condition(idempotency_key="k1")
    await CHANGES[change](store, ids[0], once)
    cursor = await store.cursor()
    if change == "delete":
        until_s = await CHANGES[change](store, ids[0], once)
        assert until_s > time.time()
    else:
        await CHANGES[change](store, ids[0], once)
    assert await store.cursor() == cursor
    with pytest.raises(InvalidInput, match="idempotency_key"):
        await store.set_alias("a", "other", ids[1], once)


async def test_a_repeated_publish_with_its_key_says_what_the_first_said(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    once = Condition(idempotency_key="k")
    first = await store.publish_version(make_manifest("a", 1), condition=once)
    await store.publish_version(make_manifest("a", 2))
    again = await store.publish_version(make_manifest("a", 1, created_at_s=5.0), condition=once)
    assert again == first
    assert (await store.get_adapter("a")).latest.id == make_manifest("a", 2).id


async def test_of_concurrent_changes_at_one_revision_one_wins(
    store: RegistryStore, ids: list[str]
) -> None:
    at = Condition(if_revision=(await store.get_adapter("a")).revision)
    outcomes = await asyncio.gather(
        *(store.set_alias("a", f"x{i}", ids[i % 3], at) for i in range(12)), return_exceptions=True
    )
    assert sum(not isinstance(outcome, LorafleetError) for outcome in outcomes) == 1
    assert len((await store.get_adapter("a")).aliases) == 2


# Tenants.


async def test_quotas_of_adapters_and_bytes_hold_and_deletion_gives_back(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    await store.tenancy.create("org", Quota(adapters=2, bytes=30))  # 12 bytes each
    await store.publish_version(make_manifest("org/a", 1))
    await store.publish_version(make_manifest("org/a", 2))
    with pytest.raises(Exhausted, match="30 bytes"):
        await store.publish_version(make_manifest("org/b", 3))
    await store.tenancy.set_quota("org", Quota(adapters=2))
    await store.publish_version(make_manifest("org/b", 3))
    with pytest.raises(Exhausted, match="2 adapters") as caught:
        await store.publish_version(make_manifest("org/c", 4))
    assert caught.value.facts["quota"] == "adapters"
    await store.publish_version(make_manifest("org/b", 3))  # the same again costs nothing
    tenant = await store.tenancy.get("org")
    assert (tenant.used_adapters, tenant.used_bytes) == (2, 36)
    await store.delete_adapter("org/a")
    tenant = await store.tenancy.get("org")
    assert (tenant.used_adapters, tenant.used_bytes) == (1, 12)
    await store.publish_version(make_manifest("org/c", 4))
    with pytest.raises(Exhausted):
        await store.restore_adapter("org/a")


async def test_concurrent_publishes_do_not_break_a_quota(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    await store.tenancy.create("org", Quota(adapters=5))
    outcomes = await asyncio.gather(
        *(store.publish_version(make_manifest(f"org/a{i}", i)) for i in range(20)),
        return_exceptions=True,
    )
    assert sum(isinstance(outcome, Exhausted) for outcome in outcomes) == 15
    assert (await store.tenancy.get("org")).used_adapters == 5


async def test_a_tenant_is_made_by_a_push_only_where_that_is_allowed(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    with pytest.raises(NotFound, match="'org'"):
        await store.publish_version(make_manifest("org/a", 1), create_tenant=False)
    await store.publish_version(make_manifest("a", 1), create_tenant=False)
    await store.publish_version(make_manifest("org/a", 1))
    assert [tenant.name for tenant in await store.tenancy.page(after=None, limit=9)] == [
        "default",
        "org",
    ]


async def test_tenants_are_made_once_paged_and_deleted_when_empty(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    for name in ("t2", "t1"):
        await store.tenancy.create(name, Quota(tokens_per_minute=7))
    for name in ("t1", "default"):
        with pytest.raises(AlreadyExists):
            await store.tenancy.create(name, Quota())
    first = await store.tenancy.page(after=None, limit=2)
    assert [tenant.name for tenant in first] == ["default", "t1"]
    assert first[1].quota == Quota(tokens_per_minute=7)
    assert [t.name for t in await store.tenancy.page(after="t1", limit=9)] == ["t2"]
    await store.publish_version(make_manifest("t1/a", 1))
    for name, error in (("t1", Conflict), ("default", Conflict), ("t9", NotFound)):
        with pytest.raises(error):
            await store.tenancy.delete(name)
    await store.delete_adapter("t1/a")
    await store.tenancy.delete("t1")
    with pytest.raises(NotFound):
        await store.tenancy.get("t1")
    for call in (store.tenancy.set_quota("t1", Quota()), store.tenancy.keys_of("t1")):
        with pytest.raises(NotFound):
            await call


async def test_keys_are_listed_found_by_id_and_revoked(store: RegistryStore) -> None:
    await store.tenancy.create("t", Quota())
    key = ApiKey(
        id="0123",
        tenant="t",
        scope=Scope.ADMIN,
        secret_sha256="ab",
        note="ci",
        created_at_s=1.0,
        expires_at_s=2.5,
    )
    cursor = await store.cursor()
    await store.tenancy.create_key(key)
    assert (await store.changes(cursor)).keys == {"0123"}
    assert await store.tenancy.keys_of("t") == [key]
    assert await store.tenancy.keys_by_id(["0123", "none"]) == [key, None]
    await store.tenancy.revoke_key("other", "0123")  # not its own: nothing happens
    assert await store.tenancy.all_keys() == [key]
    for _ in range(2):
        await store.tenancy.revoke_key("t", "0123")
    assert await store.tenancy.all_keys() == []
    with pytest.raises(NotFound):
        await store.tenancy.create_key(
            ApiKey(id="1", tenant="no", scope=Scope.DATA, secret_sha256="")
        )


async def test_the_keys_of_a_deleted_tenant_end(store: RegistryStore) -> None:
    await store.tenancy.create("t", Quota())
    await store.tenancy.create_key(ApiKey(id="1", tenant="t", scope=Scope.DATA, secret_sha256=""))
    cursor = await store.cursor()
    await store.tenancy.delete("t")
    assert await store.tenancy.all_keys() == []
    changes = await store.changes(cursor)
    assert (changes.tenants, changes.keys) == ({"t"}, {"1"})


# Finding, and putting back.


async def test_adapters_are_found_by_tenant_text_and_labels_page_by_page(
    store: RegistryStore, make_manifest: ManifestMaker
) -> None:
    for number in range(40):
        tenant = ("", "org/", "zorg/")[number % 3]
        labels = {"parity": "even" if number % 2 == 0 else "odd"}
        await store.publish_version(make_manifest(f"{tenant}a{number:02d}", number), labels=labels)

    async def find(wanted: Filter) -> list[str]:
        names: list[str] = []
        while page := await store.list_adapters(
            after=names[-1] if names else None, limit=3, wanted=wanted
        ):
            names += [record.name for record in page]
        return names

    everything = [record.name async for record in store.adapters()]
    assert await find(Filter(tenants=["org"])) == [n for n in everything if n.startswith("org/")]
    assert await find(Filter(tenants=["default"])) == [n for n in everything if "/" not in n]
    assert await find(Filter(search="a1")) == [n for n in everything if "a1" in n]
    even = await find(Filter(labels={"parity": "even"}, tenants=["org", "default"]))
    assert even == [n for n in everything if not n.startswith("zorg") and int(n[-2:]) % 2 == 0]
    assert await find(Filter(search="nothing")) == []


def test_cursors_are_texts_for_clients() -> None:
    for cursor in (
        Cursor(generation=0, incarnation=None),
        Cursor(generation=7, incarnation="0123456789abcdef"),
    ):
        assert Cursor.parse(cursor.to_text()) == cursor
    for text in ("", "7", "x-y", "-", "9" * 99 + "-a"):
        with pytest.raises(InvalidInput, match="cursor"):
            Cursor.parse(text)
