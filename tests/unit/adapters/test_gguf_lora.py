"""GGUF LoRA files: there and back, and the order of rows that llama.cpp wants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from lorafleet.adapters import load_adapter
from lorafleet.adapters.gguf_lora import Heads, read_gguf, write_gguf
from lorafleet.adapters.modules import read_plain
from lorafleet.core.errors import AlreadyExists, InvalidAdapter, InvalidInput, Unsupported
from support.adapters import ALL_LINEARS, factors, path_of, tiny_base, write_adapter

BASE = tiny_base()
HEADS = Heads(query=4, key=2)


def write(path: Path, tensors: dict[str, np.ndarray], **fields: Any) -> Path:
    """A GGUF file made by hand."""
    writer = gguf.GGUFWriter(path, fields.pop("architecture", "llama"))
    writer.add_type(fields.pop("type", "adapter"))
    writer.add_string("adapter.type", fields.pop("kind", "lora"))
    if fields.pop("alpha", True):
        writer.add_float32("adapter.lora.alpha", 8.0)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 3, "up_proj": -1}},
        {"rank_pattern": {"down_proj": 9}},
    ],
)
def test_there_and_back_is_the_same_change(tmp_path: Path, config: dict[str, Any]) -> None:
    ranks = config.get("rank_pattern", {})
    tensors = factors(targets=ALL_LINEARS, ranks=ranks)
    directory = write_adapter(tmp_path / "peft", tensors, config)
    write_gguf(read_plain(directory), tmp_path / "a.gguf", HEADS)
    read_gguf(tmp_path / "a.gguf", HEADS).save(tmp_path / "back")
    before, after = load_adapter(directory, BASE), load_adapter(tmp_path / "back", BASE)
    for site in BASE.sites:
        np.testing.assert_allclose(after.delta(site.name), before.delta(site.name), atol=1e-5)


def test_rows_of_q_and_k_are_paired_as_llama_cpp_pairs_them(tmp_path: Path) -> None:
    """Row 2 i + h of a head in GGUF is row h D/2 + i of it in PEFT."""
    tensors = factors(targets=["q_proj", "k_proj", "v_proj"], layers=[0])
    write_gguf(read_plain(write_adapter(tmp_path / "peft", tensors)), tmp_path / "a.gguf", HEADS)
    found = {t.name: np.array(t.data) for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    for target, heads in (("q", 4), ("k", 2)):
        b = tensors[f"base_model.model.{path_of(0, f'{target}_proj')}.lora_B.weight"]
        paired = found[f"blk.0.attn_{target}.weight.lora_b"]
        for head in range(heads):
            for i in range(8):
                for half in range(2):
                    row = paired[head * 16 + 2 * i + half]
                    assert (row == b[head * 16 + half * 8 + i]).all()
    v = tensors[f"base_model.model.{path_of(0, 'v_proj')}.lora_B.weight"]
    assert (found["blk.0.attn_v.weight.lora_b"] == v).all()


def test_what_is_no_lora_of_a_llama_is_refused_by_name(tmp_path: Path) -> None:
    a, b = np.ones((4, 64), np.float32), np.ones((64, 4), np.float32)
    good = {"blk.0.attn_v.weight.lora_a": a, "blk.0.attn_v.weight.lora_b": b}
    cases: list[tuple[str, dict[str, Any], dict[str, np.ndarray]]] = [
        ("general.type", {"type": "model"}, good),
        ("adapter.type", {"kind": "x"}, good),
        ("general.architecture", {"architecture": "qwen2"}, good),
        ("token_embd", {}, {"token_embd.weight.lora_a": a}),
    ]
    for i, (name, fields, tensors) in enumerate(cases):
        with pytest.raises(Unsupported, match=name):
            read_gguf(write(tmp_path / f"{i}.gguf", tensors, **fields), HEADS)
    with pytest.raises(InvalidAdapter, match=r"adapter\.lora\.alpha"):
        read_gguf(write(tmp_path / "alpha.gguf", good, alpha=False), HEADS)
    half = write(tmp_path / "half.gguf", {"blk.0.attn_v.weight.lora_a": a})
    with pytest.raises(InvalidAdapter, match="alone"):
        read_gguf(half, HEADS)
    (tmp_path / "no.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(InvalidAdapter, match="not a valid GGUF"):
        read_gguf(tmp_path / "no.gguf", HEADS)


def test_layers_without_a_name_in_gguf_and_heads_that_do_not_fit_are_refused(
    tmp_path: Path,
) -> None:
    adapter = read_plain(write_adapter(tmp_path / "peft", factors(layers=[0])))
    with pytest.raises(InvalidInput, match="heads"):
        write_gguf(adapter, tmp_path / "a.gguf", Heads(query=7, key=2))
    assert not (tmp_path / "a.gguf").exists()
    odd = replace(adapter, modules={"model.layers.0.x": next(iter(adapter.modules.values()))})
    with pytest.raises(Unsupported, match="no name in GGUF"):
        write_gguf(odd, tmp_path / "a.gguf", HEADS)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(AlreadyExists):
        write_gguf(adapter, tmp_path / "a.gguf", HEADS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "peft"]
