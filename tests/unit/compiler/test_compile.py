"""Compiling: whole or not at all, stock functions untouched, sites found by probing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lorafleet.compiler import CompileOptions, compile_model, ensure_compiled, open_checkpoint
from lorafleet.compiler.probe import find_site
from lorafleet.compiler.weights import Origin
from lorafleet.core.errors import AlreadyExists, InvalidInput, Unsupported
from lorafleet.core.model import BaseModel
from support.tiny import write_tiny


def test_a_model_directory_has_the_format_of_mlc(tiny_model: Path) -> None:
    config = json.loads((tiny_model / "mlc-chat-config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization"] == "q0f32"
    cache = json.loads((tiny_model / "tensor-cache.json").read_text())
    records = [tensor for shard in cache["records"] for tensor in shard["records"]]
    names = {tensor["name"] for tensor in records}
    assert "model.layers.0.self_attn.qkv_proj.weight" in names
    assert cache["metadata"]["ParamSize"] == len(records) == len(names)
    assert (tiny_model / "tokenizer.json").is_file()


def test_sites_name_the_rows_of_their_sources(tiny_model: Path) -> None:
    base = BaseModel.read(tiny_model)
    assert len(base.sites) == 16
    qkv = base.sites[0]
    assert qkv.name == "model.layers.0.self_attn.qkv_proj"
    rows = [(part.source.rsplit(".", 1)[-1], part.out_start, part.out_end) for part in qkv.parts]
    assert rows == [("q_proj", 0, 64), ("k_proj", 64, 96), ("v_proj", 96, 128)]
    assert [site.name.rsplit(".", 1)[-1] for site in base.sites[:4]] == [
        "qkv_proj", "o_proj", "gate_up_proj", "down_proj",
    ]  # fmt: skip


def test_the_digest_is_of_the_weights_not_of_the_library(tiny_source: Path, tmp_path: Path) -> None:
    plain = compile_model(tiny_source, tmp_path / "plain", options=CompileOptions(lora=False))
    lora = compile_model(tiny_source, tmp_path / "lora")
    assert plain.digest == lora.digest
    assert plain.sites == ()
    other = compile_model(write_tiny(tmp_path / "src", seed=1), tmp_path / "other")
    assert other.digest != lora.digest


def test_stock_functions_are_those_of_a_library_without_lora(tiny_source: Path) -> None:
    import tvm

    from lorafleet.compiler.build import export
    from lorafleet.compiler.zoo import family

    checkpoint = open_checkpoint(tiny_source)
    model = family(checkpoint.config)
    stock = export(model, checkpoint, lora=False, page_rows=8).module
    lora = export(model, checkpoint, lora=True, page_rows=8).module
    names = {var.name_hint if hasattr(var, "name_hint") else var.name for var in lora.functions}
    for name in ("embed", "batch_prefill", "batch_decode", "batch_verify"):
        tvm.ir.assert_structural_equal(stock[name], lora[name])
    assert {"batch_prefill_lora", "batch_decode_lora", "batch_verify_lora"} <= names


def test_an_existing_directory_is_never_written_to(tiny_source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(AlreadyExists):
        compile_model(tiny_source, tmp_path / "out")


def test_a_failed_compile_leaves_nothing(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "src")
    (source / "tokenizer.json").unlink()
    with pytest.raises(InvalidInput, match=r"tokenizer\.json"):
        compile_model(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_killed_compile_is_never_mistaken_for_a_finished_one(
    tiny_source: Path, home: Path
) -> None:
    code = (
        "import sys, time; from lorafleet.compiler import ensure_compiled; "
        "ensure_compiled(sys.argv[1], progress=lambda stage, done: "
        "(print(stage, flush=True), time.sleep(60)) if stage == 'compiling' else None)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tiny_source)],
        stdout=subprocess.PIPE,
        env={**os.environ, "LORAFLEET_HOME": str(home)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"compiling\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert len(list((home / "models").glob(".*.partial"))) == 1

    directory = ensure_compiled(tiny_source)
    assert BaseModel.read(directory).name == "tiny4"
    assert not list((home / "models").glob(".*.partial"))
    began_s = time.monotonic()
    assert ensure_compiled(tiny_source) == directory
    assert time.monotonic() - began_s < 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("sliding_window", 128),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("model_type", "mamba"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_field(
    tmp_path: Path, key: str, value: object
) -> None:
    source = write_tiny(tmp_path / "src")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(Unsupported) as caught:
        compile_model(source, tmp_path / "out")
    assert caught.value.facts["field"] == key


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no base model"):
        compile_model(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w.T,
        lambda w: w[::-1],
        lambda w: w[:, ::-1],
        lambda w: w.reshape(2, 2, 2, 8).swapaxes(0, 1).reshape(8, 8),
    ],
    ids=["transposed", "rows reversed", "columns reversed", "heads swapped"],
)
def test_a_mapping_that_lora_does_not_follow_is_refused_by_site(make: object) -> None:
    origin = Origin(sources=("q.weight",), make=make)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="site q"):
        find_site("q", (8, 8), origin, lambda name: (8, 8))


def test_parts_follow_the_mapping_whatever_its_order() -> None:
    origin = Origin(sources=("a.weight", "b.weight"), make=lambda a, b: np.concatenate([b, a]))
    site = find_site("ab", (6, 4), origin, {"a.weight": (2, 4), "b.weight": (4, 4)}.__getitem__)
    assert [(part.source, part.out_start, part.out_end) for part in site.parts] == [
        ("b", 0, 4),
        ("a", 4, 6),
    ]
