"""Manifests and adapters survive the wire unchanged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lorafleet.core.manifest import FileEntry, VersionManifest
from lorafleet.core.record import AdapterRecord, HistoryEntry, Share, Target
from lorafleet.core.tenant import ApiKey, Quota, Scope, Tenant
from lorafleet.v1 import registry_pb2
from lorafleet.wire.messages import (
    adapter_from_proto,
    adapter_to_proto,
    history_from_proto,
    history_to_proto,
    key_from_proto,
    key_to_proto,
    tenant_from_proto,
    tenant_to_proto,
    version_from_proto,
    version_to_proto,
)

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_COUNT = st.integers(0, 2**32 - 1)
_BYTES = st.integers(0, 2**63)

_FILES = st.builds(FileEntry, name=_TEXT, size_bytes=_BYTES, sha256=_TEXT)
_VERSIONS = st.builds(
    VersionManifest,
    id=_TEXT,
    adapter=_TEXT,
    base_digest=_TEXT,
    max_rank=_COUNT,
    num_modules=_COUNT,
    target_modules=st.lists(_TEXT, max_size=3).map(tuple),
    weights_bytes=_BYTES,
    dtype=_TEXT,
    files=st.lists(_FILES, max_size=3).map(tuple),
    # A double holds microseconds of this century's seconds, not nanoseconds.
    created_at_s=st.integers(0, 4 * 10**15).map(lambda microseconds: microseconds / 1e6),
)
_TARGETS = st.lists(st.builds(Share, version=_TEXT, weight=_COUNT), min_size=1, max_size=3).map(
    lambda shares: Target(tuple(shares))
)
_RECORDS = st.builds(
    AdapterRecord,
    name=_TEXT,
    aliases=st.dictionaries(_TEXT, _TARGETS, max_size=3),
    versions=st.lists(_VERSIONS, max_size=3).map(tuple),
    labels=st.dictionaries(_TEXT, _TEXT, max_size=3),
    pins=st.dictionaries(_TEXT, _COUNT, max_size=3),
    revision=_BYTES,
)
# Doubles hold milliseconds of this century exactly enough to come back equal.
_TIMES = st.integers(0, 4 * 10**12).map(lambda milliseconds: milliseconds / 1e3)
_ENTRIES = st.builds(
    HistoryEntry,
    revision=_BYTES,
    action=_TEXT,
    alias=_TEXT,
    before=st.none() | _TARGETS,
    after=st.none() | _TARGETS,
    at_s=_TIMES,
    actor=_TEXT,
)
_TENANTS = st.builds(
    Tenant,
    name=_TEXT,
    quota=st.builds(Quota, adapters=_BYTES, tokens_per_minute=_BYTES),
    created_at_s=_TIMES,
    used_adapters=_BYTES,
    used_bytes=_BYTES,
)
_KEYS = st.builds(
    ApiKey,
    id=_TEXT,
    tenant=_TEXT,
    scope=st.sampled_from(Scope),
    secret_sha256=st.just(""),
    note=_TEXT,
    created_at_s=_TIMES,
    expires_at_s=st.none() | _TIMES,
)


@given(_VERSIONS)
def test_a_version_comes_back_equal(manifest: VersionManifest) -> None:
    data = version_to_proto(manifest).SerializeToString()
    assert version_from_proto(registry_pb2.Version.FromString(data)) == manifest


@given(_RECORDS)
def test_an_adapter_comes_back_equal(record: AdapterRecord) -> None:
    data = adapter_to_proto(record).SerializeToString()
    assert adapter_from_proto(registry_pb2.Adapter.FromString(data)) == record


def test_every_field_of_the_message_is_mapped() -> None:
    names = {field.name for field in registry_pb2.Version.DESCRIPTOR.fields}
    assert names == {name.removesuffix("_s") for name in VersionManifest.__dataclass_fields__}


@given(_ENTRIES)
def test_a_history_entry_comes_back_equal(entry: HistoryEntry) -> None:
    assert history_from_proto(history_to_proto(entry)) == entry


@given(_TENANTS)
def test_a_tenant_comes_back_equal(tenant: Tenant) -> None:
    assert tenant_from_proto(tenant_to_proto(tenant)) == tenant


@given(_KEYS)
def test_a_key_comes_back_equal_without_its_hash(key: ApiKey) -> None:
    assert key_from_proto(key_to_proto(key)) == key


def test_the_hash_of_a_secret_stays_behind() -> None:
    key = ApiKey(id="1", tenant="t", scope=Scope.DATA, secret_sha256="f" * 64)
    assert b"f" * 64 not in key_to_proto(key).SerializeToString()
