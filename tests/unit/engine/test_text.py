"""Text comes out whole: characters, stop strings, templates."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.core.errors import InvalidInput, Unsupported
from lorafleet.engine.text import Detokenizer, TextCodec
from support.tiny import write_tiny


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(write_tiny(tmp_path_factory.mktemp("text") / "tiny4"))


def pieces(codec: TextCodec, text: str, stop: tuple[str, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(codec, stop)
    found = []
    for token in codec.encode(text):
        if not detokenizer.stopped:
            found.append(detokenizer.push(token))
    return [*found, detokenizer.flush()]


@given(st.text(max_size=40))
def test_streamed_text_is_the_text(codec: TextCodec, text: str) -> None:
    assert "".join(pieces(codec, text)) == text


def test_a_character_of_several_tokens_comes_out_whole(codec: TextCodec) -> None:
    assert len(codec.encode("🦜")) == 4
    assert [piece for piece in pieces(codec, "a🦜b") if piece] == ["a", "🦜", "b"]


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=3), max_size=2))
def test_text_ends_before_the_first_stop_string(
    codec: TextCodec, text: str, stops: list[str]
) -> None:
    found = "".join(pieces(codec, text, tuple(stops)))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert found == text
        return
    # What had been read when the first stop string was complete.
    seen = text[: min(ends)]
    assert found == seen[: min(seen.find(stop) for stop in stops if stop in seen)]


def test_a_template_that_refuses_is_an_input_error(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path)
    (directory / "chat_template.jinja").write_text("{{ raise_exception('no system turns') }}")
    with pytest.raises(InvalidInput, match="no system turns"):
        TextCodec(directory).chat([{"role": "system", "content": "x"}])


def test_templates_cannot_reach_out_of_their_sandbox(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path)
    (directory / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(InvalidInput):
        TextCodec(directory).chat([{"role": "user", "content": "x"}])


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path)
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(Unsupported, match="chat template"):
        TextCodec(directory).chat([{"role": "user", "content": "x"}])
