"""An adapter's aliases and versions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.core.errors import NotFound
from lorafleet.core.manifest import VersionManifest
from lorafleet.core.names import AdapterRef, parse_ref
from lorafleet.core.record import AdapterRecord, Share, Target


def _manifest(number: int) -> VersionManifest:
    return VersionManifest(
        id=f"sha256:{number:064x}",
        adapter="org/a",
        base_digest="sha256:b",
        max_rank=8,
        num_modules=1,
        target_modules=("q_proj",),
        weights_bytes=1,
        dtype="float32",
        files=(),
        created_at_s=0.0,
    )


RECORD = AdapterRecord(
    name="org/a",
    aliases={"latest": Target.to(_manifest(2).id), "prod": Target.to(_manifest(1).id)},
    versions=(_manifest(1), _manifest(2)),
)


def _ref(text: str) -> AdapterRef:
    ref = parse_ref(text)
    assert ref is not None
    return ref


def test_references_mean_what_aliases_point_at() -> None:
    assert RECORD.latest == _manifest(2)
    assert RECORD.resolve(_ref("org/a")) == _manifest(2)
    assert RECORD.resolve(_ref("org/a@prod")) == _manifest(1)
    assert RECORD.resolve(_ref(f"org/a@{_manifest(1).id}")) == _manifest(1)


def test_what_it_does_not_have_is_not_found_by_name() -> None:
    with pytest.raises(NotFound, match="'canary': it has latest, prod") as caught:
        RECORD.resolve(_ref("org/a@canary"))
    assert caught.value.facts == {"adapter": "org/a", "alias": "canary"}
    with pytest.raises(NotFound) as caught:
        RECORD.resolve(_ref(f"org/a@{_manifest(3).id}"))
    assert caught.value.facts == {"adapter": "org/a", "version": _manifest(3).id}


@given(
    weights=st.lists(st.integers(1, 1000), min_size=1, max_size=5),
    keys=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=20),
)
def test_a_split_is_sticky_and_a_weight_that_grows_only_gains_keys(
    weights: list[int], keys: list[str]
) -> None:
    target = Target(
        tuple(Share(version=f"v{i}", weight=weight) for i, weight in enumerate(weights))
    )
    first, *rest = target.shares
    grown = Target((Share(version=first.version, weight=first.weight * 3), *rest))
    for key in keys:
        before = target.pick(key)
        assert before == target.pick(key)
        assert grown.pick(key) in (before, first.version)


def test_a_split_follows_its_weights_with_and_without_keys() -> None:
    target = Target((Share(version="a", weight=90), Share(version="b", weight=10)))
    for keys in ([f"user-{i}" for i in range(4000)], [""] * 4000):
        share = sum(target.pick(key) == "b" for key in keys) / len(keys)
        assert 0.07 < share < 0.13
