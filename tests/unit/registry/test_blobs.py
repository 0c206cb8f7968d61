"""The blob store: whole, verified, durable files under their digest, or nothing."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lorafleet.core.errors import Exhausted, InvalidAdapter, InvalidInput, Unavailable
from lorafleet.core.manifest import FileEntry, VersionManifest
from lorafleet.registry import BlobStore
from lorafleet.registry.staging import check_file_entry

WEIGHTS = b"weights" * 1000
CONFIG = b'{"r": 4}'

ManifestMaker = Callable[..., VersionManifest]


def _entry(data: bytes, name: str = "adapter_model.safetensors") -> FileEntry:
    return FileEntry(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _put(blobs: BlobStore, *files: tuple[str, bytes]) -> tuple[FileEntry, ...]:
    with blobs.open_staging() as staging:
        for name, data in files:
            with staging.file(_entry(data, name)) as file:
                file.write(data[:3])
                file.write(data[3:])
                file.finish()
        blobs.commit(staging)
        return staging.entries


def _put_adapter(blobs: BlobStore) -> tuple[FileEntry, ...]:
    return _put(blobs, ("adapter_config.json", CONFIG), ("adapter_model.safetensors", WEIGHTS))


def _files(root: Path) -> list[Path]:
    """Files but the lock and the notes of who owns what."""
    found = (path for path in root.rglob("*") if path.is_file() and path.name != ".lock")
    return [path for path in found if "owners" not in path.parts]


def test_a_committed_file_is_found_by_its_digest_and_is_read_only(blobs: BlobStore) -> None:
    _, weights = _put_adapter(blobs)
    path = blobs.path(weights.sha256)
    assert blobs.has(weights.sha256)
    assert path.read_bytes() == WEIGHTS
    assert path.stat().st_mode & 0o222 == 0
    assert path.parts[-3:] == (weights.sha256[:2], weights.sha256[2:4], weights.sha256)


def test_what_is_not_committed_leaves_nothing(blobs: BlobStore, tmp_path: Path) -> None:
    with blobs.open_staging() as staging, staging.file(_entry(WEIGHTS)) as file:
        file.write(WEIGHTS)
        file.finish()
    assert _files(tmp_path) == []
    assert list((tmp_path / "blobs" / "staging").iterdir()) == []


def test_a_file_that_was_not_finished_is_not_committed(blobs: BlobStore, tmp_path: Path) -> None:
    with blobs.open_staging() as staging:
        with staging.file(_entry(WEIGHTS)) as file:
            file.write(WEIGHTS)
        blobs.commit(staging)
    assert _files(tmp_path) == []


def test_a_wrong_digest_is_named(blobs: BlobStore) -> None:
    with blobs.open_staging() as staging, staging.file(_entry(WEIGHTS)) as file:
        file.write(b"W" + WEIGHTS[1:])
        with pytest.raises(InvalidAdapter, match="expected sha256") as caught:
            file.finish()
    assert caught.value.facts == {"file": "adapter_model.safetensors", "field": "sha256"}


def test_too_few_and_too_many_bytes_are_named(blobs: BlobStore) -> None:
    with blobs.open_staging() as staging, staging.file(_entry(WEIGHTS)) as file:
        file.write(WEIGHTS[:10])
        with pytest.raises(InvalidAdapter, match="expected 7000 bytes, got 10"):
            file.finish()
        with pytest.raises(InvalidAdapter, match="got at least 7010"):
            file.write(WEIGHTS)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "../adapter_config.json",
        "/etc/passwd",
        "sub/adapter_config.json",
        "adapter_config.json\x00",
        "adapter_model-1-of-2.safetensors",
        "README.md",
    ],
)
def test_only_an_adapters_own_file_names_are_accepted(blobs: BlobStore, name: str) -> None:
    with blobs.open_staging() as staging, pytest.raises(InvalidAdapter, match="not accepted"):
        staging.file(_entry(b"x", name))


def test_shards_and_their_index_are_accepted() -> None:
    check_file_entry(_entry(b"x", "adapter_model-00001-of-00002.safetensors"))
    check_file_entry(_entry(b"x", "adapter_model.safetensors.index.json"))


def test_a_pickle_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidAdapter, match="pickle runs code"):
        check_file_entry(_entry(b"x", "adapter_model.bin"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sha256": "A" * 64}, "sha256"),
        ({"sha256": "../" + "a" * 61}, "sha256"),
        ({"size_bytes": 0}, "size_bytes"),
        ({"name": "adapter_config.json", "size_bytes": 1 << 30}, "size_bytes"),
    ],
)
def test_malformed_entries_are_refused_by_field(change: dict[str, object], field: str) -> None:
    fields = {"name": "adapter_model.safetensors", "size_bytes": 1, "sha256": "a" * 64}
    with pytest.raises(InvalidAdapter) as caught:
        check_file_entry(FileEntry(**{**fields, **change}))
    assert caught.value.facts["field"] == field


def test_a_file_comes_once(blobs: BlobStore) -> None:
    with blobs.open_staging() as staging:
        with staging.file(_entry(WEIGHTS)) as file:
            file.write(WEIGHTS)
            file.finish()
        with pytest.raises(InvalidAdapter, match="twice"):
            staging.file(_entry(WEIGHTS))


def test_a_digest_that_is_none_makes_no_path(blobs: BlobStore) -> None:
    with pytest.raises(InvalidInput):
        blobs.path("../../etc/passwd")


def test_the_same_content_is_stored_once(blobs: BlobStore, tmp_path: Path) -> None:
    first = _put_adapter(blobs)
    inode = blobs.path(first[1].sha256).stat().st_ino
    assert _put_adapter(blobs) == first
    assert blobs.path(first[1].sha256).stat().st_ino == inode
    assert len(_files(tmp_path)) == 2


def test_a_truncated_blob_is_replaced_by_the_next_push(blobs: BlobStore) -> None:
    _, weights = _put_adapter(blobs)
    path = blobs.path(weights.sha256)
    path.chmod(0o644)
    path.write_bytes(b"half")
    _put_adapter(blobs)
    assert path.read_bytes() == WEIGHTS


def test_a_full_disk_is_exhausted(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with blobs.open_staging() as staging, staging.file(_entry(WEIGHTS)) as file:
        file.write(WEIGHTS)
        file.finish()
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(Exhausted, match="disk is full"):
            staging.sync()


# Materialising.


def _manifest(
    make: ManifestMaker, files: tuple[FileEntry, ...], number: int = 1
) -> VersionManifest:
    return make("a", number, files=files)


def test_a_version_is_a_directory_of_its_files_without_a_copy(
    blobs: BlobStore, make_manifest: ManifestMaker
) -> None:
    files = _put_adapter(blobs)
    directory = blobs.materialise(_manifest(make_manifest, files))
    assert {path.name for path in directory.iterdir()} == {entry.name for entry in files}
    weights = directory / "adapter_model.safetensors"
    assert weights.samefile(blobs.path(files[1].sha256))
    assert not weights.is_symlink()


def test_a_version_is_made_once_and_mended_when_spoilt(
    blobs: BlobStore, make_manifest: ManifestMaker
) -> None:
    manifest = _manifest(make_manifest, _put_adapter(blobs))
    directory = blobs.materialise(manifest)
    inode = directory.stat().st_ino
    assert blobs.materialise(manifest).stat().st_ino == inode
    (directory / "adapter_config.json").unlink()
    assert blobs.materialise(manifest) == directory
    assert (directory / "adapter_config.json").read_bytes() == CONFIG


def test_one_version_pushed_as_different_files_has_a_directory_for_each(
    blobs: BlobStore, make_manifest: ManifestMaker
) -> None:
    first = _manifest(make_manifest, _put_adapter(blobs))
    other = _put(
        blobs, ("adapter_config.json", CONFIG + b" "), ("adapter_model.safetensors", WEIGHTS)
    )
    assert blobs.materialise(first) != blobs.materialise(_manifest(make_manifest, other))


def test_a_missing_blob_makes_the_version_unavailable_here(
    blobs: BlobStore, make_manifest: ManifestMaker, tmp_path: Path
) -> None:
    files = _put_adapter(blobs)
    blobs.path(files[1].sha256).unlink()
    with pytest.raises(Unavailable, match=r"has no adapter_model\.safetensors"):
        blobs.materialise(_manifest(make_manifest, files))
    assert list((tmp_path / "blobs" / "versions").iterdir()) == []


def test_a_manifest_cannot_name_a_file_outside(
    blobs: BlobStore, make_manifest: ManifestMaker
) -> None:
    evil = (FileEntry(name="../../evil", size_bytes=1, sha256="a" * 64),)
    with pytest.raises(InvalidAdapter):
        blobs.materialise(_manifest(make_manifest, evil))
    with pytest.raises(InvalidInput):
        blobs.materialise(make_manifest("a", id="sha256:../../x"))


# Sweeping.


def _age(path: Path, seconds: float = 1000) -> None:
    stamp = time.time() - seconds
    os.utime(path, (stamp, stamp))


def test_a_sweep_removes_old_unreferenced_files_only(
    blobs: BlobStore, make_manifest: ManifestMaker, tmp_path: Path
) -> None:
    kept = _put_adapter(blobs)
    (old,) = _put(blobs, ("adapter_model.safetensors", b"old"))
    (young,) = _put(blobs, ("adapter_model.safetensors", b"young"))
    for entry in (*kept, old):
        _age(blobs.path(entry.sha256))
    removed_bytes = blobs.sweep({entry.sha256 for entry in kept}, set(), 100)
    assert removed_bytes == 3
    assert not blobs.has(old.sha256)
    assert blobs.has(young.sha256)
    assert all(blobs.has(entry.sha256) for entry in kept)


def test_a_push_of_an_old_unreferenced_blob_saves_it_from_the_sweep(blobs: BlobStore) -> None:
    (entry,) = _put(blobs, ("adapter_model.safetensors", b"old"))
    _age(blobs.path(entry.sha256))
    _put(blobs, ("adapter_model.safetensors", b"old"))
    assert blobs.sweep(set(), set(), 100) == 0
    assert blobs.has(entry.sha256)


def test_a_sweep_removes_what_crashed_pushes_and_deleted_versions_left(
    blobs: BlobStore, make_manifest: ManifestMaker, tmp_path: Path
) -> None:
    files = _put_adapter(blobs)
    registered = _manifest(make_manifest, files, 1)
    deleted = _manifest(make_manifest, files, 2)
    directories = [blobs.materialise(registered), blobs.materialise(deleted)]
    crashed = tmp_path / "blobs" / "staging" / "crashed"
    crashed.mkdir()
    (crashed / "adapter_model.safetensors").write_bytes(b"half")
    for path in (*directories, *(p for d in directories for p in d.iterdir())):
        _age(path)
    _age(crashed / "adapter_model.safetensors")
    _age(crashed)
    running = tmp_path / "blobs" / "staging" / "running"
    running.mkdir()
    blobs.sweep({entry.sha256 for entry in files}, {registered.id}, 100)
    assert [path.is_dir() for path in (*directories, crashed, running)] == [
        True,
        False,
        False,
        True,
    ]
