"""Manifests and adapters survive the wire unchanged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lorafleet.core.manifest import FileEntry, VersionManifest
from lorafleet.core.record import AdapterRecord
from lorafleet.v1 import registry_pb2
from lorafleet.wire.messages import (
    adapter_from_proto,
    adapter_to_proto,
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
_RECORDS = st.builds(
    AdapterRecord,
    name=_TEXT,
    aliases=st.dictionaries(_TEXT, _TEXT, max_size=3),
    versions=st.lists(_VERSIONS, max_size=3).map(tuple),
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
