"""Names and versions: what is known is found, what is not is named."""

from __future__ import annotations

import math

import pytest

from lorafleet.adapters import LoraAdapter, load_adapter
from lorafleet.core.errors import InvalidInput, NotFound
from lorafleet.engine.book import AdapterBook
from support.adapters import tiny_base
from support.engine import many_adapters


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[LoraAdapter]:
    base = tiny_base()
    return [load_adapter(d, base) for d in many_adapters(tmp_path_factory.mktemp("book"), 2)]


def test_a_name_moves_to_the_newest_upload(two: list[LoraAdapter]) -> None:
    book = AdapterBook()
    old, new = two
    book.add(old, "x")
    assert book.resolve("x") == ((old.version, 1.0),)
    book.add(new, "x")
    assert book.resolve("x") == ((new.version, 1.0),)
    assert book.resolve(old.version) == ((old.version, 1.0),)  # who asks for it by id still gets it


def test_none_and_an_empty_mix_are_the_base() -> None:
    assert AdapterBook().resolve(None) == AdapterBook().resolve([]) == ()


def test_a_mix_keeps_order_and_scales(two: list[LoraAdapter]) -> None:
    book = AdapterBook()
    for name, adapter in zip("ab", two, strict=True):
        book.add(adapter, name)
    assert book.resolve([("b", -0.5), ("a", 2)]) == ((two[1].version, -0.5), (two[0].version, 2.0))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_not_finite_is_refused(two: list[LoraAdapter], scale: float) -> None:
    book = AdapterBook()
    book.add(two[0], "x")
    with pytest.raises(InvalidInput, match="finite scale"):
        book.resolve([("x", scale)])


@pytest.mark.parametrize("name", ["typo", "X", "x ", "", "sha256:0"])
def test_c41_unknown_names_are_named(two: list[LoraAdapter], name: str) -> None:
    book = AdapterBook()
    book.add(two[0], "x")
    with pytest.raises(NotFound) as caught:
        book.resolve(name)
    assert caught.value.facts["adapter"] == name


def test_a_forgotten_version_takes_its_names_with_it(two: list[LoraAdapter]) -> None:
    book = AdapterBook()
    for name, adapter in (("x", two[0]), ("also-x", two[0]), ("y", two[1])):
        book.add(adapter, name)
    book.forget(two[0].version)
    for gone in ("x", "also-x", two[0].version):
        with pytest.raises(NotFound):
            book.resolve(gone)
    assert book.resolve("y") == ((two[1].version, 1.0),)
    book.forget(two[0].version)  # twice is once


def test_with_a_source_unknown_versions_are_its_to_judge(two: list[LoraAdapter]) -> None:
    book = AdapterBook()
    book.add(two[0], "x")
    asked: list[str] = []

    def source(version: str) -> LoraAdapter:
        asked.append(version)
        return two[1]

    book.set_source(source)
    assert book.find(two[0].version) is two[0]
    assert book.resolve("other") == (("other", 1.0),)
    assert book.find("other") is two[1]
    assert asked == ["other"]
    book.set_source(None)
    with pytest.raises(NotFound, match="other"):
        book.find("other")
