"""Where an adapter's modules go, and which ones go nowhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorafleet.adapters import LoraAdapter, load_adapter
from lorafleet.adapters.place import Target
from lorafleet.core.errors import InvalidAdapter, LorafleetError, Unsupported
from support.adapters import ALL_LINEARS, PREFIX, factors, path_of, tiny_base, write_adapter

BASE = tiny_base()
QKV = "model.layers.0.self_attn.qkv_proj"
GATE_UP = "model.layers.0.mlp.gate_up_proj"


def refusal(directory: Path, **options: Any) -> LorafleetError:
    with pytest.raises((InvalidAdapter, Unsupported)) as caught:
        load_adapter(directory, BASE, **options)
    return caught.value


def pair(module: str, rows: int, rank: int = 4, columns: int = 64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    return {
        f"{PREFIX}{module}.lora_A.weight": rng.standard_normal((rank, columns)).astype("f4"),
        f"{PREFIX}{module}.lora_B.weight": rng.standard_normal((rows, rank)).astype("f4"),
    }


def module_of(adapter: LoraAdapter, source: str) -> Any:
    return next(module for module in adapter.modules if module.source == source)


def test_modules_are_in_the_order_of_the_sites(tmp_path: Path) -> None:
    adapter = load_adapter(write_adapter(tmp_path, factors(targets=ALL_LINEARS)), BASE)
    sites = [module.targets[0].site for module in adapter.modules]
    assert sites == sorted(sites)
    assert len(adapter.modules) == 28


def test_the_table_of_modules_says_what_is_served(tmp_path: Path) -> None:
    tensors = factors(targets=["v_proj"], rank=16)
    write_adapter(tmp_path, tensors, {"r": 16, "lora_alpha": 16, "use_rslora": True})
    module = load_adapter(tmp_path, BASE).modules[0]
    assert module.source == "model.layers.0.self_attn.v_proj"
    assert (module.rank, module.alpha, module.scale) == (16, 16.0, 4.0)
    assert (module.in_features, module.out_features, module.dtype) == (64, 32, "float32")
    assert module.targets == (Target(site=0, part=2, b_start=0, b_end=32),)


def test_c12_a_fused_layer_goes_to_its_parts_in_order(tmp_path: Path) -> None:
    write_adapter(tmp_path, pair(QKV, 128) | pair(GATE_UP, 256))
    adapter = load_adapter(tmp_path, BASE)
    ends = [(t.part, t.b_start, t.b_end) for t in module_of(adapter, QKV).targets]
    assert ends == [(0, 0, 64), (1, 64, 96), (2, 96, 128)]
    ends = [(t.part, t.b_start, t.b_end) for t in module_of(adapter, GATE_UP).targets]
    assert ends == [(0, 0, 128), (1, 128, 256)]


def test_c12_a_fused_layer_of_other_heads_is_refused_with_both_shapes(tmp_path: Path) -> None:
    error = refusal(write_adapter(tmp_path, pair(QKV, 192)))
    assert "[192, 4]" in error.message
    assert "[128, 4]" in error.message
    assert error.facts["tensor"] == f"{PREFIX}{QKV}.lora_B.weight"


def test_c12_a_fused_layer_and_one_of_its_parts_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, pair(QKV, 128) | pair(path_of(0, "k_proj"), 32))
    assert "adapts a layer that" in refusal(tmp_path).message


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_c03_lora_on_head_and_embedding_is_refused_by_name(tmp_path: Path, name: str) -> None:
    error = refusal(write_adapter(tmp_path, factors() | pair(name, 256)))
    assert isinstance(error, Unsupported)
    assert "embedding or the head" in error.message
    assert error.facts["tensor"] == f"{PREFIX}{name}.lora_A.weight"


def test_a_base_without_lora_says_so(tmp_path: Path) -> None:
    bare = dataclasses.replace(BASE, sites=())
    with pytest.raises(Unsupported, match="compiled without LoRA"):
        load_adapter(write_adapter(tmp_path), bare)


@pytest.mark.parametrize("rank", [1, 8, 64, 256])
def test_c16_any_rank_up_to_the_limit_is_accepted(tmp_path: Path, rank: int) -> None:
    adapter = load_adapter(write_adapter(tmp_path, factors(rank=rank), {"r": rank}), BASE)
    assert adapter.max_rank == rank
    assert adapter.num_pages(8) == -(-rank // 8)


def test_c16_the_limit_can_be_set_and_is_named(tmp_path: Path) -> None:
    write_adapter(tmp_path, factors(rank=16), {"r": 16})
    assert load_adapter(tmp_path, BASE, max_rank=16).max_rank == 16
    error = refusal(tmp_path, max_rank=15)
    assert isinstance(error, Unsupported)
    assert "rank 16; the limit is 15" in error.message


def test_c16_the_limit_holds_for_one_module_of_a_pattern(tmp_path: Path) -> None:
    tensors = factors(targets=["q_proj", "down_proj"], ranks={"down_proj": 300})
    write_adapter(tmp_path, tensors, {"rank_pattern": {"down_proj": 300}})
    assert "down_proj.lora_A" in refusal(tmp_path).facts["tensor"]


@pytest.mark.parametrize("alpha", [1e300, -1e300, 1e-60])
def test_c22_scales_that_float32_does_not_hold_are_refused(tmp_path: Path, alpha: float) -> None:
    """Times a B of zeros an infinite scale is NaN; a vanishing one would be a silent no-op."""
    tensors = {name: value * ("lora_A" in name) for name, value in factors().items()}
    error = refusal(write_adapter(tmp_path, tensors, {"lora_alpha": alpha}))
    assert "out of float32's range" in error.message


def test_an_alpha_of_zero_is_no_error(tmp_path: Path) -> None:
    adapter = load_adapter(write_adapter(tmp_path, config={"lora_alpha": 0}), BASE)
    assert not adapter.delta(QKV).any()


@pytest.mark.parametrize("kind", ["A", "B"])
def test_a_factor_without_its_partner_is_named(tmp_path: Path, kind: str) -> None:
    tensors = factors()
    del tensors[f"{PREFIX}{path_of(2, 'q_proj')}.lora_{kind}.weight"]
    error = refusal(write_adapter(tmp_path, tensors))
    other = "B" if kind == "A" else "A"
    assert f"has no lora_{kind}" in error.message
    assert error.facts["tensor"] == f"{PREFIX}{path_of(2, 'q_proj')}.lora_{other}.weight"


@pytest.mark.parametrize("shape", [(4,), (4, 64, 1), (64, 4), (8, 64)])
def test_c10_shapes_of_any_kind_are_refused_with_both(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    tensors = factors()
    name = f"{PREFIX}{path_of(1, 'q_proj')}.lora_A.weight"
    tensors[name] = np.zeros(shape, np.float32)
    error = refusal(write_adapter(tmp_path, tensors))
    assert f"{list(shape)}, expected [4, 64]" in error.message
    assert error.facts["tensor"] == name


def test_c01_patterns_that_mean_another_spelling_are_refused(tmp_path: Path) -> None:
    """PEFT matches the trainer's paths: after a renaming of one of both, the scale is a guess."""
    nested = {
        name.replace(f"{PREFIX}model.", f"{PREFIX}model.language_model."): value
        for name, value in factors().items()
    }
    anchored = {"alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 16}}
    error = refusal(write_adapter(tmp_path / "a", nested, anchored))
    assert "ambiguous" in error.message
    assert "alpha 16" in error.message
    free = {"alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 16}}
    adapter = load_adapter(write_adapter(tmp_path / "b", nested, free), BASE)
    assert [m.scale for m in adapter.modules if m.source.endswith("q_proj")] == [4, 2, 2, 2]


def test_patterns_that_would_hang_are_matched(tmp_path: Path) -> None:
    config = {"alpha_pattern": {"(([a-z._0-9]+)+)+X": 4}, "rank_pattern": {"(a|a)*X": 4}}
    assert load_adapter(write_adapter(tmp_path, config=config), BASE).num_modules == 8


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.float64, np.int32, np.bool_])
def test_c21_other_dtypes_are_refused_by_name(tmp_path: Path, dtype: type) -> None:
    tensors = {name: value.astype(dtype) for name, value in factors().items()}
    error = refusal(write_adapter(tmp_path, tensors))
    assert isinstance(error, Unsupported)
    assert "expected F32, BF16 or F16" in error.message
