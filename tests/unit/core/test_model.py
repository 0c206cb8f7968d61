"""A base model's description: read whole, or known to be incomplete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lorafleet.core.errors import InvalidInput
from lorafleet.core.model import DESCRIPTION_FILE, BaseModel, KvLayout, Site, SitePart

MODEL = BaseModel(
    name="tiny",
    digest="sha256:" + "a" * 64,
    library="lib/llvm.so",
    target="llvm",
    vocab_size=256,
    context_window=128,
    max_batch_tokens=64,
    page_rows=8,
    kv=KvLayout(
        num_layers=1, num_qo_heads=4, num_kv_heads=2, head_dim=4, rope_inv_freq=(1.0, 0.01)
    ),
    sites=(
        Site(
            name="model.layers.0.self_attn.qkv_proj",
            in_features=16,
            out_features=32,
            parts=(
                SitePart(source="model.layers.0.self_attn.q_proj", out_start=0, out_end=16),
                SitePart(source="model.layers.0.self_attn.k_proj", out_start=16, out_end=24),
                SitePart(source="model.layers.0.self_attn.v_proj", out_start=24, out_end=32),
            ),
        ),
    ),
    extra={"quantization": "q0f32"},
)


def test_a_description_read_back_is_equal() -> None:
    assert BaseModel.from_json(MODEL.to_json()) == MODEL
    assert [part.out_features for part in MODEL.sites[0].parts] == [16, 8, 8]


def test_a_model_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / DESCRIPTION_FILE).write_text(MODEL.to_json())
    assert BaseModel.read(tmp_path) == MODEL


def test_a_directory_without_a_description_is_incomplete(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is no compiled model") as caught:
        BaseModel.read(tmp_path)
    assert caught.value.facts["file"] == str(tmp_path / DESCRIPTION_FILE)


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_another_format_is_refused(version: object) -> None:
    data = {**json.loads(MODEL.to_json()), "format": version}
    with pytest.raises(InvalidInput, match="compile the model again"):
        BaseModel.from_json(json.dumps(data))
