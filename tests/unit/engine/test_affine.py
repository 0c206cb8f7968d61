"""Adapters that rescale or shift a layer's output (DoRA, biases), against PEFT in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorafleet.adapters import load_adapter
from lorafleet.engine import Engine, EngineOptions
from support.adapters import ALL_LINEARS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:`lora_bias=True`")

PROMPT = [7, 100, 33, 250, 1, 64, 18]

CONFIGS: dict[str, dict[str, Any]] = {
    "dora": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "v_proj"]},
    "dora patterns": {
        "r": 8,
        "lora_alpha": 16,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": list(ALL_LINEARS),
        "rank_pattern": {"down_proj": 19},
        "alpha_pattern": {"up_proj": 5},
    },
    "lora_bias": {"r": 4, "lora_bias": True, "target_modules": ["k_proj", "o_proj", "up_proj"]},
    "plain": {"r": 8, "target_modules": list(ALL_LINEARS)},
}


@pytest.fixture(scope="module")
def saved(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each config's adapter, random as after training, saved by PEFT."""
    folder = tmp_path_factory.mktemp("affine")
    for seed, (name, options) in enumerate(CONFIGS.items()):
        torch.manual_seed(seed)
        base = transformers.AutoModelForCausalLM.from_pretrained(tiny_source, dtype=torch.float32)
        config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
        model = peft.get_peft_model(base, config)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if "magnitude" in key:
                    weight *= 0.6 + torch.rand(weight.shape)
                elif "lora_" in key:
                    weight.copy_(torch.randn(weight.shape) * 0.2)
        model.save_pretrained(folder / name)
    return {name: folder / name for name in CONFIGS}


@pytest.fixture(scope="module")
def oracle(tiny_source: Path, saved: dict[str, Path]) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_source, dtype=torch.float32)
    names = iter(saved.items())
    first, directory = next(names)
    model = peft.PeftModel.from_pretrained(base, directory, adapter_name=first.replace(" ", "_"))
    for name, directory in names:
        model.load_adapter(directory, adapter_name=name.replace(" ", "_"))
    return model.eval()


@pytest.fixture(scope="module")
def engine(tiny_model: Path, saved: dict[str, Path]) -> Iterator[Engine]:
    options = EngineOptions(kv_tokens=1024, num_adapter_pages=12)
    with Engine(tiny_model, options=options) as engine:
        for name, directory in saved.items():
            engine.upload_lora(directory, name)
        yield engine


def expected(oracle: Any, adapter: str | None) -> np.ndarray:
    with torch.inference_mode():
        if adapter is None:
            with oracle.disable_adapter():
                return oracle(torch.tensor([PROMPT])).logits[0, -1].numpy()
        oracle.set_adapter(adapter.replace(" ", "_"))
        return oracle(torch.tensor([PROMPT])).logits[0, -1].numpy()


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("adapter", CONFIGS)
def test_c17_c18_logits_are_those_of_peft(engine: Engine, oracle: Any, adapter: str) -> None:
    found = engine.logits([(PROMPT, adapter)])[0]
    assert_close(found, expected(oracle, adapter))
    # And far from what leaving the vectors out would give.
    assert np.abs(found - expected(oracle, None)).max() > 0.05 * np.abs(found).max()


def test_c17_base_lora_and_dora_rows_in_one_batch_are_each_alone(
    engine: Engine, oracle: Any
) -> None:
    uses = [None, "dora", "plain", "dora patterns", None, "lora_bias", "dora"]
    rows = engine.logits([(PROMPT, use) for use in uses])
    for row, use in zip(rows, uses, strict=True):
        assert (row == engine.logits([(PROMPT, use)])[0]).all()
        assert_close(row, expected(oracle, use))


def test_a_mix_adds_what_each_adapter_adds_to_the_base(
    engine: Engine, tiny_source: Path, saved: dict[str, Path]
) -> None:
    mix = [("dora", 0.5), ("dora patterns", -0.25), ("plain", 1.0)]
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_source, dtype=torch.float32)
    with torch.no_grad():
        for site in engine.base.sites:
            delta = sum(scale * engine.get_lora_delta(name, site.name) for name, scale in mix)
            for part in site.parts:
                weight = model.get_submodule(part.source).weight
                weight += torch.tensor(delta[part.out_start : part.out_end])
        wanted = model(torch.tensor([PROMPT])).logits[0, -1].numpy()
    assert_close(engine.logits([(PROMPT, mix)])[0], wanted)


def test_the_delta_of_dora_is_pefts_merged_weight_less_the_base(
    engine: Engine, tiny_source: Path, saved: dict[str, Path]
) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_source, dtype=torch.float32)
    before = {name: weight.detach().clone() for name, weight in base.named_parameters()}
    model = peft.PeftModel.from_pretrained(base, saved["dora patterns"]).merge_and_unload()
    for site in engine.base.sites:
        delta = engine.get_lora_delta("dora patterns", site.name)
        for part in site.parts:
            after = model.get_submodule(part.source).weight.detach()
            change = (after - before[f"{part.source}.weight"]).numpy()
            np.testing.assert_allclose(delta[part.out_start : part.out_end], change, atol=2e-5)


def test_one_page_more_holds_what_is_no_rank_row(engine: Engine, saved: dict[str, Path]) -> None:
    pages = {
        name: load_adapter(directory, engine.base).num_pages(8) for name, directory in saved.items()
    }
    assert pages == {"dora": 2, "dora patterns": 4, "lora_bias": 2, "plain": 1}


def test_c16_a_page_that_was_affine_serves_the_next_adapter_unharmed(
    tiny_model: Path, saved: dict[str, Path]
) -> None:
    """Two pages for all: each adapter takes those of the one before."""
    with Engine(tiny_model, options=EngineOptions(kv_tokens=512, num_adapter_pages=2)) as engine:
        for name in ("dora", "lora_bias", "plain"):
            engine.upload_lora(saved[name], name)
        first = {name: engine.logits([(PROMPT, name)])[0] for name in ("plain", "dora")}
        for name in ("lora_bias", "dora", "plain", "dora", "lora_bias", "plain"):
            row = engine.logits([(PROMPT, name)])[0]
            assert name not in first or (row == first[name]).all()
