"""Merged checkpoints against PEFT's merge_and_unload, and served against adapters at run time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lorafleet.adapters import load_adapter
from lorafleet.adapters.merge import Merger
from lorafleet.compiler import compile_model, open_checkpoint
from lorafleet.compiler.merge import describe, write_checkpoint
from lorafleet.core.errors import AlreadyExists, InvalidInput
from lorafleet.core.model import BaseModel
from lorafleet.engine import Engine, EngineOptions
from support.adapters import ALL_LINEARS, factors, tiny_base, write_adapter

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

PROMPT = [7, 100, 33, 250, 1, 64, 18]


def merge(source: Path, out: Path, *adapters: tuple[Path, float], dtype: str = "float32") -> Path:
    checkpoint, base = open_checkpoint(source), tiny_base()
    terms = [(load_adapter(directory, base), scale) for directory, scale in adapters]
    merger = Merger(terms, checkpoint.read)
    write_checkpoint(checkpoint, out, merger.change, dtype=dtype)
    return out


@pytest.fixture
def dora(tiny_source: Path, tmp_path: Path) -> Path:
    torch.manual_seed(3)
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_source, dtype=torch.float32)
    config = peft.LoraConfig(r=4, use_dora=True, target_modules=list(ALL_LINEARS))
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "magnitude" in key:
                weight *= 0.6 + torch.rand(weight.shape)
            elif "lora_" in key:
                weight.copy_(torch.randn(weight.shape) * 0.2)
    model.save_pretrained(tmp_path / "dora")
    return tmp_path / "dora"


def test_the_layers_of_a_checkpoint_are_found_without_compiling(
    tiny_source: Path, tiny_model: Path
) -> None:
    assert describe(open_checkpoint(tiny_source)).sites == BaseModel.read(tiny_model).sites


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_merged_checkpoint_is_pefts(
    tiny_source: Path, tmp_path: Path, dora: Path, kind: str
) -> None:
    config = {"target_modules": list(ALL_LINEARS)}
    plain = write_adapter(tmp_path / "lora", factors(targets=ALL_LINEARS, seed=5), config)
    adapter = dora if kind == "dora" else plain
    merge(tiny_source, tmp_path / "out", (adapter, 1.0))
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_source, dtype=torch.float32)
    expected = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    ).state_dict()
    assert set(found) == set(expected)
    for name, weight in found.items():
        np.testing.assert_allclose(weight, expected[name], atol=2e-5, err_msg=name)


def test_a_merged_model_answers_as_the_mix_does_at_run_time(
    tiny_source: Path, tiny_model: Path, tmp_path: Path, dora: Path
) -> None:
    plain = write_adapter(tmp_path / "lora", factors(seed=5))
    scales = {plain: 0.5, dora: -0.3}
    merged = merge(tiny_source, tmp_path / "merged", *scales.items())
    compile_model(merged, tmp_path / "model")
    options = EngineOptions(kv_tokens=512, num_adapter_pages=8)
    with Engine(tmp_path / "model", options=options) as engine:
        found = engine.logits([(PROMPT, None)])[0]
    with Engine(tiny_model, options=options) as engine:
        mix = [(engine.upload_lora(adapter), scale) for adapter, scale in scales.items()]
        expected = engine.logits([(PROMPT, mix)])[0]
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def test_half_precision_and_shards_are_read_back(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorafleet.compiler.merge.SHARD_BYTES", 100_000)
    adapter = write_adapter(tmp_path / "lora", factors())
    merge(tiny_source, tmp_path / "out", (adapter, 1.0), dtype="bfloat16")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    before, after = (open_checkpoint(path) for path in (tiny_source, tmp_path / "out"))
    assert sorted(after.names()) == sorted(before.names())
    name = "model.layers.0.self_attn.k_proj.weight"  # not adapted
    np.testing.assert_allclose(after.read(name), before.read(name), rtol=2**-8)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16


def test_nothing_is_overwritten_and_nothing_half_written_stays(
    tiny_source: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(tiny_source)
    (tmp_path / "there").mkdir()
    with pytest.raises(AlreadyExists):
        write_checkpoint(checkpoint, tmp_path / "there", lambda name, values: values)
    with pytest.raises(InvalidInput, match="dtype"):
        write_checkpoint(checkpoint, tmp_path / "x", lambda name, values: values, dtype="int3")

    def fail(name: str, values: np.ndarray) -> np.ndarray:
        raise RuntimeError(name)

    with pytest.raises(RuntimeError):
        write_checkpoint(checkpoint, tmp_path / "x", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    adapter = load_adapter(write_adapter(tmp_path), tiny_base())
    with pytest.raises(InvalidInput, match="scale"):
        Merger([(adapter, float("inf"))], lambda name: np.zeros(0))
