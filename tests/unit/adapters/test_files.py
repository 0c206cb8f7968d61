"""The files of an adapter directory: whole, its own, and never a pickle."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lorafleet.adapters import load_adapter, scan_directory
from lorafleet.adapters.files import MAX_JSON_BYTES, find_files, read_json
from lorafleet.core.errors import InvalidAdapter, LorafleetError, Unsupported
from support.adapters import factors, tiny_base, write_adapter

BASE = tiny_base()
SHARDS = [f"adapter_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
INDEX = "adapter_model.safetensors.index.json"


def refusal(directory: Path) -> LorafleetError:
    with pytest.raises((InvalidAdapter, Unsupported)) as caught:
        load_adapter(directory, BASE)
    return caught.value


def write_sharded(directory: Path) -> dict[str, str]:
    """An adapter whose last layer is in a shard of its own; returns its weight_map."""
    write_adapter(directory)
    (directory / "adapter_model.safetensors").unlink()
    tensors = factors()
    weight_map = {name: SHARDS["layers.3." in name] for name in tensors}
    for shard in SHARDS:
        held = {name: tensors[name] for name in tensors if weight_map[name] == shard}
        save_file(held, directory / shard)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_a_scan_lists_what_a_push_sends(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    (tmp_path / "README.md").write_text("not part of it")
    (tmp_path / INDEX).write_text("stale, since the weights are in one file")
    entries = {entry.name: entry for entry in scan_directory(tmp_path)}
    assert list(entries) == ["adapter_config.json", "adapter_model.safetensors"]
    for name, entry in entries.items():
        content = (tmp_path / name).read_bytes()
        assert entry.size_bytes == len(content)
        assert entry.sha256 == hashlib.sha256(content).hexdigest()


def test_a_scan_of_shards_lists_them_and_their_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    names = [entry.name for entry in scan_directory(tmp_path)]
    assert names == ["adapter_config.json", *SHARDS, INDEX]


def test_c08_a_shard_that_lacks_what_the_index_says_is_refused(tmp_path: Path) -> None:
    weight_map = write_sharded(tmp_path)
    gone = next(name for name in weight_map if "layers.3." in name and "v_proj" in name)
    kept = {n: v for n, v in factors().items() if weight_map[n] == SHARDS[1] and n != gone}
    save_file(kept, tmp_path / SHARDS[1])
    error = refusal(tmp_path)
    assert error.facts == {"file": SHARDS[1], "tensor": gone}


def test_c08_a_shard_that_lacks_a_whole_module_is_refused(tmp_path: Path) -> None:
    """Without the index it would pass as an adapter of fewer modules."""
    weight_map = write_sharded(tmp_path)
    held = {n: v for n, v in factors().items() if weight_map[n] == SHARDS[1] and "q_proj" in n}
    save_file(held, tmp_path / SHARDS[1])
    assert "is missing" in refusal(tmp_path).message


def test_c08_tensors_that_the_index_does_not_know_are_refused(tmp_path: Path) -> None:
    weight_map = write_sharded(tmp_path)
    extra = next(iter(weight_map))
    write_index(tmp_path, {k: v for k, v in weight_map.items() if k != extra})
    assert refusal(tmp_path).facts == {"file": SHARDS[0], "tensor": extra}


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        {},
        [],
        {"a": 1},
        {"a": ["x"]},
        {"a": "../../etc/passwd"},
        {"a": "adapter_model.safetensors"},
        {"a": "adapter_model-00001-of-00000.safetensors"},
        {"a": SHARDS[0]},
        {"a": SHARDS[0], "b": "adapter_model-00002-of-00003.safetensors"},
    ],
)
def test_c08_an_index_that_names_other_than_all_shards_is_refused(
    tmp_path: Path, weight_map: object
) -> None:
    write_sharded(tmp_path)
    write_index(tmp_path, weight_map)
    error = refusal(tmp_path)
    assert error.facts["file"] == INDEX
    assert error.facts["field"] == "weight_map"


def test_c08_shards_without_their_index_are_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    error = refusal(tmp_path)
    assert error.facts["file"] == INDEX
    assert SHARDS[0] in error.message


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_links_out_of_the_directory_are_not_followed(tmp_path: Path, name: str) -> None:
    """Else an unpacked archive could make a push send any file of the machine."""
    directory = write_adapter(tmp_path / "adapter")
    (directory / name).rename(tmp_path / "secret")
    (directory / name).symlink_to("../secret")
    for read in (scan_directory, lambda d: load_adapter(d, BASE)):
        with pytest.raises(InvalidAdapter, match="link out of") as caught:
            read(directory)
        assert caught.value.facts["file"] == name


def test_links_inside_the_directory_are_followed(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.rename(weights.with_name("weights-of-today"))
    weights.symlink_to("weights-of-today")
    (tmp_path / "link").symlink_to("adapter")  # the directory itself is the user's own choice
    assert load_adapter(tmp_path / "link", BASE).num_modules == 8


def test_the_hubs_cache_can_be_read(tmp_path: Path) -> None:
    """It keeps snapshots/<revision>/<file> as links to blobs/<hash>."""
    snapshot = write_adapter(tmp_path / "models--a--b" / "snapshots" / "0123")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for i, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(i))
        file.symlink_to(f"../../blobs/{i}")
    assert load_adapter(snapshot, BASE).num_modules == 8
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    assert "link out of" in refusal(snapshot).message


@pytest.mark.parametrize("target", ["nothing", "adapter_model.safetensors"])
def test_broken_and_circular_links_are_named(tmp_path: Path, target: str) -> None:
    weights = write_adapter(tmp_path) / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(target)
    error = refusal(tmp_path)
    assert "link to nothing" in error.message
    assert error.facts["file"] == weights.name


def test_what_is_no_file_is_never_opened(tmp_path: Path) -> None:
    weights = write_adapter(tmp_path) / "adapter_model.safetensors"
    weights.unlink()
    os.mkfifo(weights)  # opening it would wait for ever
    assert "is no file" in refusal(tmp_path).message


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    (write_adapter(tmp_path) / missing).unlink()
    assert refusal(tmp_path).facts == {"file": missing}


def test_c51_an_archive_is_no_adapter(tmp_path: Path) -> None:
    archive = tmp_path / "adapter.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("adapter_model.bin", b"pickle")
    assert "not a directory" in refusal(archive).message
    (tmp_path / "inside").mkdir()
    write_adapter(tmp_path / "inside", {"unused": np.zeros(1, np.float32)})
    archive.rename(tmp_path / "inside" / "adapter_model.safetensors")
    assert refusal(tmp_path / "inside").facts["file"] == "adapter_model.safetensors"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.pt", "adapter_model.pth"])
def test_c51_pickles_of_any_name_are_refused(tmp_path: Path, name: str) -> None:
    write_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / name)
    error = refusal(tmp_path)
    assert isinstance(error, Unsupported)
    assert error.facts["file"] == name


def test_json_of_megabytes_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    with file.open("wb") as stream:
        stream.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(InvalidAdapter, match=str(MAX_JSON_BYTES)):
        read_json(file)


@pytest.mark.parametrize(
    "text", ["[]", "3", '"LORA"', "null", "", "\ufeff{}", '{"r": ' + "9" * 5000]
)
def test_json_that_is_no_object_is_refused_with_the_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(text)
    with pytest.raises(InvalidAdapter) as caught:
        read_json(file)
    assert caught.value.facts == {"file": "adapter_config.json"}


def test_a_file_that_goes_away_is_a_refusal(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapter, match="cannot be read"):
        read_json(tmp_path / "adapter_config.json")


def test_paths_may_be_strings(tmp_path: Path) -> None:
    assert find_files(str(write_adapter(tmp_path))).index is None  # type: ignore[arg-type]
