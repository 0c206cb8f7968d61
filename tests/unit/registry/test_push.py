"""A push as messages: everything in order, in chunks, nothing read that need not be."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from lorafleet.core.errors import InvalidAdapter, InvalidInput, Unsupported
from lorafleet.registry.push import CHUNK_BYTES, push_messages


def test_the_header_says_what_the_chunks_carry(
    tmp_path: Path, make_adapter: Callable[..., Path]
) -> None:
    directory = make_adapter(tmp_path, rank=256, shape=(20, 128))
    first, *chunks = push_messages(directory, "default/a", if_new=True)
    assert first.header.name == "a"
    assert first.header.if_new
    assert [entry.name for entry in first.header.files] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert len(chunks) > 5
    assert max(len(message.chunk) for message in chunks) == CHUNK_BYTES
    data = b"".join(message.chunk for message in chunks)
    for entry in first.header.files:
        part, data = data[: entry.size_bytes], data[entry.size_bytes :]
        assert hashlib.sha256(part).hexdigest() == entry.sha256
    assert data == b""


def test_without_digests_in_the_header_each_follows_its_file(
    tmp_path: Path, make_adapter: Callable[..., Path]
) -> None:
    directory = make_adapter(tmp_path, rank=256, shape=(20, 128))
    first, *rest = push_messages(directory, "a", hashed=False)
    assert [entry.sha256 for entry in first.header.files] == ["", ""]
    kinds = [message.WhichOneof("part") for message in rest]
    assert kinds[:2] == ["chunk", "sha256"]
    assert kinds[-1] == "sha256"
    assert kinds.count("sha256") == 2
    digests = [message.sha256 for message in rest if message.sha256]
    hashed = push_messages(directory, "a")
    assert digests == [entry.sha256 for entry in next(hashed).header.files]


def test_progress_goes_from_nothing_to_all(
    tmp_path: Path, make_adapter: Callable[..., Path]
) -> None:
    seen: list[tuple[int, int]] = []
    directory = make_adapter(tmp_path, rank=256, shape=(20, 128))
    for _ in push_messages(directory, "a", progress=lambda *at: seen.append(at)):
        pass
    total_bytes = sum(path.stat().st_size for path in directory.iterdir())
    assert seen[0] == (0, total_bytes)
    assert seen[-1] == (total_bytes, total_bytes)
    assert seen == sorted(seen)


def test_name_and_directory_are_checked_at_once(
    tmp_path: Path, make_adapter: Callable[..., Path]
) -> None:
    directory = make_adapter(tmp_path / "good")
    with pytest.raises(InvalidInput, match="is not valid"):
        push_messages(directory, "a b")
    with pytest.raises(InvalidAdapter):
        push_messages(tmp_path / "nowhere", "a")
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(Unsupported, match=r"adapter_model\.bin"):
        push_messages(directory, "a")
