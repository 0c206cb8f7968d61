"""The one rule of names, and what a request's reference means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.core.errors import InvalidInput
from lorafleet.core.names import (
    AdapterRef,
    canonical_name,
    check_alias,
    is_version_id,
    parse_ref,
)

VERSION = "sha256:" + "0a" * 32

BAD_NAMES = [
    "",
    " ",
    "x ",
    " x",
    "a:b",
    "a@v1",
    "a%2Fb",
    "../../etc/x",
    "..",
    ".hidden",
    "-flag",
    "/abs",
    "a/",
    "a//b",
    "a/b/c",
    "a\x00b",
    "a\n",
    "a\\b",
    "\u00e9",  # composed
    "e\u0301",  # decomposed
    "\uff41",  # a full-width letter
    "x" * 65,
    "t" * 65 + "/x",
    "x" * 300,
]

_PART = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)


@pytest.mark.parametrize("name", ["a", "A", "0", "org/a", "org_a", "a.b-c_d", "x" * 64, "based"])
def test_a_good_name_is_its_own_canonical_form(name: str) -> None:
    assert canonical_name(name) == name


@pytest.mark.parametrize("name", BAD_NAMES)
def test_c42_a_bad_name_is_refused_with_the_rule(name: str) -> None:
    with pytest.raises(InvalidInput, match="expected `name` or `tenant/name`") as caught:
        canonical_name(name)
    assert caught.value.facts == {"field": "name"}
    with pytest.raises(InvalidInput):
        parse_ref(f"{name}@prod")


@pytest.mark.parametrize("name", ["base", "default/base"])
def test_c42_the_base_models_name_is_reserved(name: str) -> None:
    with pytest.raises(InvalidInput, match="reserved"):
        canonical_name(name)
    assert parse_ref(name) is None


def test_another_tenant_may_have_an_adapter_called_base() -> None:
    assert canonical_name("org/base") == "org/base"
    assert parse_ref("org/base") == AdapterRef(name="org/base", alias="latest")


def test_the_default_tenant_is_left_out() -> None:
    assert canonical_name("default/a") == "a"
    assert parse_ref("default/a") == parse_ref("a")
    with pytest.raises(InvalidInput):
        canonical_name("default/")


@given(st.one_of(_PART, st.tuples(_PART, _PART).map("/".join)))
def test_canonical_names_are_stable(text: str) -> None:
    try:
        name = canonical_name(text)
    except InvalidInput:
        assert text in ("base", "default/base")
        return
    assert canonical_name(name) == name
    assert text in (name, f"default/{name}")


@given(st.text(max_size=80))
def test_whatever_text_comes_it_is_refused_or_already_canonical(text: str) -> None:
    try:
        name = canonical_name(text)
    except InvalidInput:
        return
    assert name in (text, text.removeprefix("default/"))
    assert name.isascii()


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("a", AdapterRef(name="a", alias="latest")),
        ("a@latest", AdapterRef(name="a", alias="latest")),
        ("org/a@prod", AdapterRef(name="org/a", alias="prod")),
        (f"org/a@{VERSION}", AdapterRef(name="org/a", version=VERSION)),
    ],
)
def test_references_name_an_alias_or_a_version(text: str, ref: AdapterRef) -> None:
    assert parse_ref(text) == ref


def test_nothing_but_its_own_names_means_the_base_model() -> None:
    assert [parse_ref(text) for text in ("", "base", "default/base")] == [None] * 3
    assert parse_ref("Base") == AdapterRef(name="Base", alias="latest")
    with pytest.raises(InvalidInput):
        parse_ref("base@prod")


@pytest.mark.parametrize(
    "text", ["a@", "a@@b", "a@b@c", "a@sha256:12", "a@SHA256:" + "0" * 64, f"a@{VERSION.upper()}"]
)
def test_malformed_selectors_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_ref(text)
    assert caught.value.facts == {"field": "adapter"}


def test_aliases_follow_the_rule_of_a_part_and_latest_is_not_set_by_hand() -> None:
    assert check_alias("prod") == "prod"
    for alias in ("", "latest", "a/b", "a@b", "sha256:" + "0" * 64, "x" * 65):
        with pytest.raises(InvalidInput) as caught:
            check_alias(alias)
        assert caught.value.facts == {"field": "alias"}


def test_version_ids_have_one_form() -> None:
    assert is_version_id(VERSION)
    for text in ("", "sha256:", VERSION[:-1], VERSION + "0", VERSION.upper(), VERSION + "\n"):
        assert not is_version_id(text)
