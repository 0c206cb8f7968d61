"""Manifests survive being written down."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.core.manifest import FileEntry, VersionManifest

_TEXT = st.text(max_size=20)
_MANIFESTS = st.builds(
    VersionManifest,
    id=_TEXT,
    adapter=_TEXT,
    base_digest=_TEXT,
    max_rank=st.integers(0),
    num_modules=st.integers(0),
    target_modules=st.lists(_TEXT, max_size=3).map(tuple),
    weights_bytes=st.integers(0),
    dtype=_TEXT,
    files=st.lists(
        st.builds(FileEntry, name=_TEXT, size_bytes=st.integers(0), sha256=_TEXT), max_size=3
    ).map(tuple),
    created_at_s=st.floats(0, 1e10),
)


@given(_MANIFESTS)
def test_a_manifest_read_back_is_equal_and_writes_the_same_text(manifest: VersionManifest) -> None:
    text = manifest.to_json()
    back = VersionManifest.from_json(text)
    assert back == manifest
    assert back.to_json() == text
    assert VersionManifest.from_json(text.encode()) == manifest
    assert "\n" not in text


def test_a_manifest_cannot_be_changed() -> None:
    entry = FileEntry(name="a", size_bytes=1, sha256="b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.name = "c"  # type: ignore[misc]
