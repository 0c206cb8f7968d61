"""The reading half of the failure catalogue: each kind of broken or exotic adapter, by its case id.

The oracle is dense float64: delta = scale * B A for each module.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lorafleet.adapters import load_adapter, read_config
from lorafleet.core.errors import InvalidAdapter, LorafleetError, Unsupported
from support.adapters import ALL_LINEARS, PREFIX, factors, path_of, tiny_base, write_adapter

BASE = tiny_base()
Tensors = dict[str, np.ndarray]


def renamed(tensors: Mapping[str, np.ndarray], old: str, new: str) -> Tensors:
    return {name.replace(old, new): value for name, value in tensors.items()}


def dense(tensors: Mapping[str, np.ndarray], layer: int, target: str, scale: float) -> np.ndarray:
    name = PREFIX + path_of(layer, target)
    a = tensors[f"{name}.lora_A.weight"].astype(np.float64)
    b = tensors[f"{name}.lora_B.weight"].astype(np.float64)
    return scale * (b @ a)


def delta_of(directory: Path, layer: int, target: str) -> np.ndarray:
    adapter = load_adapter(directory, BASE)
    for site in BASE.sites:
        for part in site.parts:
            if part.source == path_of(layer, target):
                return adapter.delta(site.name)[part.out_start : part.out_end]
    raise AssertionError(target)


def refusal(directory: Path) -> LorafleetError:
    with pytest.raises((InvalidAdapter, Unsupported)) as caught:
        load_adapter(directory, BASE)
    return caught.value


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        (".lora_A.", ".lora_A.default."),
        (PREFIX, ""),
        (f"{PREFIX}model.", f"{PREFIX}model.language_model."),
        (f"{PREFIX}model.", f"{PREFIX}language_model.model."),
        (".weight", ".mine.weight"),
        (PREFIX, f"_orig_mod.{PREFIX}"),
        (f"{PREFIX}model.", f"{PREFIX}_orig_mod.model."),
        (".self_attn.", "._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn."),
        (PREFIX, f"module.{PREFIX}"),
    ],
)
def test_c01_spellings_of_names_give_the_same_version(tmp_path: Path, old: str, new: str) -> None:
    canonical = load_adapter(write_adapter(tmp_path / "a"), BASE)
    other = load_adapter(write_adapter(tmp_path / "b", renamed(factors(), old, new)), BASE)
    assert other.version == canonical.version
    assert other.num_modules == 8


def test_c01_a_tensor_of_no_layer_is_refused_by_name(tmp_path: Path) -> None:
    stray = renamed(factors(layers=[3]), "layers.3", "layers.9")
    error = refusal(write_adapter(tmp_path, factors() | stray))
    assert "model.layers.9.self_attn.q_proj" in error.message
    assert error.facts["tensor"].startswith(PREFIX)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_c01_mlx_layout_is_transposed_and_gives_the_same_version(
    tmp_path: Path, dtype: type
) -> None:
    tensors = {name: value.astype(dtype) for name, value in factors().items()}
    mlx = {
        name.removeprefix(PREFIX)
        .replace("lora_A.weight", "lora_a")
        .replace("lora_B.weight", "lora_b"): value.T
        for name, value in tensors.items()
    }
    canonical = load_adapter(write_adapter(tmp_path / "a", tensors), BASE)
    other = load_adapter(write_adapter(tmp_path / "b", mlx), BASE)
    assert other.version == canonical.version
    site = BASE.sites[0].name
    assert (other.delta(site) == canonical.delta(site)).all()


def test_c01_mlx_factors_that_are_not_transposed_are_refused_with_both_shapes(
    tmp_path: Path,
) -> None:
    tensors = {"model.layers.0.self_attn.q_proj.lora_a": np.zeros((4, 64), np.float32)}
    tensors["model.layers.0.self_attn.q_proj.lora_b"] = np.zeros((64, 4), np.float32)
    error = refusal(write_adapter(tmp_path, tensors))
    assert "[64, 4]" in error.message
    assert "[4, 64]" in error.message


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.lm_head.weight",
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.lm_head.base_layer.weight",
        "base_model.model.lm_head.modules_to_save.default.weight",
    ],
)
def test_c03_whole_matrices_are_refused_by_name(tmp_path: Path, name: str) -> None:
    extra = {name: np.zeros((256, 64), np.float32)}
    error = refusal(write_adapter(tmp_path, factors() | extra))
    assert name in error.message
    assert "modules_to_save" in error.message


def test_c03_modules_to_save_is_refused_in_the_config(tmp_path: Path) -> None:
    error = refusal(write_adapter(tmp_path, config={"modules_to_save": ["lm_head"]}))
    assert error.facts["field"] == "modules_to_save"


@pytest.mark.parametrize(
    "targets", ["all-linear", r".*\.(q_proj|v_proj)", ["q_proj", "v_proj"], ["q_proj", "k_proj"]]
)
def test_c05_tensors_are_the_truth_about_targets(tmp_path: Path, targets: Any) -> None:
    config = {"target_modules": targets, "exclude_modules": ["k_proj"]}
    adapter = load_adapter(write_adapter(tmp_path / "a", config=config), BASE)
    assert adapter.target_modules == ("q_proj", "v_proj")
    assert adapter.version == load_adapter(write_adapter(tmp_path / "b"), BASE).version


def test_c06_empty_options_of_newer_trainers_are_accepted(tmp_path: Path) -> None:
    config = {
        "eva_config": None,
        "corda_config": None,
        "exclude_modules": None,
        "lora_bias": False,
        "qalora_group_size": 16,
        "some_future_key": None,
    }
    assert load_adapter(write_adapter(tmp_path, config=config), BASE).num_modules == 8


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_replication", [[0, 3], [1, 4]]),
        ("megatron_config", {"a": 1}),
        ("some_future_key", {"x": 1}),
        ("trainable_token_indices", [1]),
        ("fan_in_fan_out", True),
        ("alora_invocation_tokens", [7, 8]),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
    ],
)
def test_options_that_change_the_output_are_refused_by_name(
    tmp_path: Path, key: str, value: Any
) -> None:
    """C06, C13, C19, C20."""
    error = refusal(write_adapter(tmp_path, config={key: value}))
    assert isinstance(error, Unsupported)
    assert error.facts == {"file": "adapter_config.json", "field": key}


@pytest.mark.parametrize("value", [True, False, "gaussian", "eva", "orthogonal"])
def test_c20_neutral_initialisations_load(tmp_path: Path, value: Any) -> None:
    assert load_adapter(write_adapter(tmp_path, config={"init_lora_weights": value}), BASE)


@pytest.mark.parametrize("key", ["r", "lora_alpha", "peft_type"])
def test_c06_missing_required_keys_are_named(tmp_path: Path, key: str) -> None:
    assert refusal(write_adapter(tmp_path, drop=[key])).facts["field"] == key


def test_c08_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = write_adapter(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 6 // 10])
    assert refusal(tmp_path).facts["file"] == "adapter_model.safetensors"


def test_c08_a_header_of_ten_gigabytes_is_refused(tmp_path: Path) -> None:
    file = write_adapter(tmp_path) / "adapter_model.safetensors"
    file.write_bytes((10 * 2**30).to_bytes(8, "little") + b"{}")
    assert "10737418240" in refusal(tmp_path).message


def test_c08_all_shards_are_read_or_the_missing_one_is_named(tmp_path: Path) -> None:
    whole = load_adapter(write_adapter(tmp_path / "whole"), BASE)
    tensors = factors()
    names = [f"adapter_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    sharded = write_adapter(tmp_path / "sharded")
    (sharded / "adapter_model.safetensors").unlink()
    keys = sorted(tensors)
    weight_map = {key: names[i % 2] for i, key in enumerate(keys)}
    for name in names:
        save_file({k: tensors[k] for k in keys if weight_map[k] == name}, sharded / name)
    index = sharded / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert load_adapter(sharded, BASE).version == whole.version
    (sharded / names[1]).unlink()
    assert names[1] in refusal(sharded).message


@pytest.mark.parametrize("family", ["ADALORA", "LOHA", "LOKR", "VERA", "IA3", "lora"])
def test_c09_other_families_are_refused_by_name(tmp_path: Path, family: str) -> None:
    error = refusal(write_adapter(tmp_path, config={"peft_type": family}))
    assert repr(family) in error.message


@pytest.mark.parametrize("suffix", ["hada_w1_a", "lora_E", "lora_A", "vera_lambda_b", "ia3_l"])
def test_c09_tensors_of_other_families_are_refused_by_name(tmp_path: Path, suffix: str) -> None:
    name = f"{PREFIX}{path_of(0, 'q_proj')}.{suffix}"
    error = refusal(write_adapter(tmp_path, {name: np.ones((4, 64), np.float32)}))
    assert error.facts["tensor"] == name


def test_c10_shapes_of_another_base_are_refused_with_both_shapes(tmp_path: Path) -> None:
    tensors = factors()
    name = f"{PREFIX}{path_of(0, 'q_proj')}.lora_A.weight"
    tensors[name] = np.zeros((4, 128), np.float32)
    message = refusal(write_adapter(tmp_path, tensors)).message
    assert "[4, 128]" in message
    assert "[4, 64]" in message
    assert name in message


def test_c10_another_base_name_with_fitting_shapes_loads(tmp_path: Path) -> None:
    config = {"base_model_name_or_path": "other/model-bnb-4bit"}
    assert load_adapter(write_adapter(tmp_path, config=config), BASE)


@pytest.mark.parametrize(
    "targets", [("q_proj",), ("v_proj",), ("k_proj",), ("gate_proj",), ("up_proj",), ALL_LINEARS]
)
def test_c11_part_of_a_packed_projection(tmp_path: Path, targets: tuple[str, ...]) -> None:
    tensors = factors(targets=targets, layers=[0, 3])
    write_adapter(tmp_path, tensors)
    for target in ALL_LINEARS:
        for layer in (0, 1):
            found = delta_of(tmp_path, layer, target)
            if target in targets and layer == 0:
                expected = dense(tensors, layer, target, 2.0)
                np.testing.assert_allclose(found, expected, atol=1e-5)
            else:
                assert not found.any()


def test_c12_an_adapter_of_a_fused_layer_is_split_by_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    name = f"{PREFIX}model.layers.0.self_attn.qkv_proj"
    a, b = rng.standard_normal((4, 64)), rng.standard_normal((128, 4))
    tensors = {
        f"{name}.lora_A.weight": a.astype(np.float32),
        f"{name}.lora_B.weight": b.astype(np.float32),
    }
    adapter = load_adapter(write_adapter(tmp_path, tensors), BASE)
    delta = adapter.delta("model.layers.0.self_attn.qkv_proj")
    np.testing.assert_allclose(delta, 2.0 * b @ a, rtol=1e-5, atol=1e-5)


def test_c12_a_fused_layer_of_other_heads_is_refused(tmp_path: Path) -> None:
    name = f"{PREFIX}model.layers.0.self_attn.qkv_proj"
    tensors = {
        f"{name}.lora_A.weight": np.ones((4, 64), np.float32),
        f"{name}.lora_B.weight": np.ones((192, 4), np.float32),
    }
    assert "[192, 4]" in refusal(write_adapter(tmp_path, tensors)).message


@pytest.mark.parametrize("rank", [1, 16, 64, 256])
def test_c15_rslora_divides_by_the_root_of_the_rank(tmp_path: Path, rank: int) -> None:
    tensors = factors(targets=["q_proj"], rank=rank)
    write_adapter(tmp_path, tensors, {"r": rank, "lora_alpha": 16, "use_rslora": True})
    expected = dense(tensors, 0, "q_proj", 16 / math.sqrt(rank))
    np.testing.assert_allclose(delta_of(tmp_path, 0, "q_proj"), expected, rtol=1e-4, atol=1e-4)


def test_c16_each_module_has_its_own_rank_and_scale(tmp_path: Path) -> None:
    tensors = factors(targets=["q_proj", "down_proj"], rank=8, ranks={"down_proj": 32})
    config = {
        "r": 8,
        "lora_alpha": 16,
        "rank_pattern": {"down_proj": 32},
        "alpha_pattern": {r"layers\.1\..*q_proj": 4},
    }
    write_adapter(tmp_path, tensors, config)
    for layer, target, scale in ((0, "q_proj", 2.0), (1, "q_proj", 0.5), (0, "down_proj", 0.5)):
        expected = dense(tensors, layer, target, scale)
        np.testing.assert_allclose(delta_of(tmp_path, layer, target), expected, atol=1e-4)
    adapter = load_adapter(tmp_path, BASE)
    assert adapter.max_rank == 32
    assert adapter.num_pages(8) == 4


def test_c16_a_rank_above_the_limit_is_refused_with_the_limit(tmp_path: Path) -> None:
    write_adapter(tmp_path, factors(rank=300), {"r": 300})
    error = refusal(tmp_path)
    assert "300" in error.message
    assert "256" in error.message


def test_a_rank_other_than_the_configured_one_is_refused(tmp_path: Path) -> None:
    assert "[8, 64]" in refusal(write_adapter(tmp_path, factors(rank=8))).message


MODULE = f"{PREFIX}model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("suffix", "option"),
    [
        ("bias", {"bias": "none"}),
        ("base_layer.bias", {"bias": "all"}),  # and this base has none there
        ("lora_B.bias", {"lora_bias": False}),
        ("lora_magnitude_vector", {"use_dora": False}),
    ],
)
def test_c17_c18_vectors_that_the_config_or_the_base_does_not_know_are_refused_by_name(
    tmp_path: Path, suffix: str, option: dict[str, Any]
) -> None:
    tensor = f"{MODULE}.{suffix}"
    extra = {tensor: np.ones(64, np.float32)}
    error = refusal(write_adapter(tmp_path, factors() | extra, option))
    assert error.facts["tensor"] == tensor


@pytest.mark.parametrize(
    ("option", "missing"), [("use_dora", "lora_magnitude_vector"), ("lora_bias", "lora_B.bias")]
)
def test_c17_c18_a_config_that_speaks_of_vectors_which_are_not_there_is_refused(
    tmp_path: Path, option: str, missing: str
) -> None:
    error = refusal(write_adapter(tmp_path, config={option: True}))
    assert missing in error.message
    assert option in error.message


def test_c18_a_bias_of_a_norm_is_refused_by_name(tmp_path: Path) -> None:
    tensor = f"{PREFIX}model.layers.0.input_layernorm.bias"
    extra = {tensor: np.ones(64, np.float32)}
    error = refusal(write_adapter(tmp_path, factors() | extra, {"bias": "all"}))
    assert error.facts["tensor"] == tensor
    assert "carries no LoRA" in error.message


def test_c17_magnitudes_of_another_length_are_refused(tmp_path: Path) -> None:
    vectors = {
        name.replace("lora_A.weight", "lora_magnitude_vector"): np.ones(63, np.float32)
        for name in factors()
        if "lora_A" in name
    }
    error = refusal(write_adapter(tmp_path, factors() | vectors, {"use_dora": True}))
    assert "[63]" in error.message


def test_c20_a_converted_pissa_adapter_is_a_plain_lora_of_twice_the_rank(tmp_path: Path) -> None:
    start, end = factors(seed=1), factors(seed=2)
    tensors = {
        name: np.concatenate(
            [end[name], start[name] if "lora_A" in name else -start[name]],
            axis=0 if "lora_A" in name else 1,
        )
        for name in end
    }
    write_adapter(tmp_path, tensors, {"r": 8, "lora_alpha": 16})
    expected = dense(end, 0, "q_proj", 2.0) - dense(start, 0, "q_proj", 2.0)
    np.testing.assert_allclose(delta_of(tmp_path, 0, "q_proj"), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_c21_half_precision_is_widened_exactly(tmp_path: Path, dtype: type) -> None:
    tensors = {name: value.astype(dtype) for name, value in factors().items()}
    write_adapter(tmp_path, tensors)
    expected = dense(tensors, 0, "q_proj", 2.0)
    np.testing.assert_allclose(delta_of(tmp_path, 0, "q_proj"), expected, atol=1e-5)


def test_c21_integer_weights_are_refused_by_dtype(tmp_path: Path) -> None:
    tensors = {name: value.astype(np.int8) for name, value in factors().items()}
    assert "I8" in refusal(write_adapter(tmp_path, tensors)).message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_c22_values_that_are_not_finite_are_refused_by_tensor(tmp_path: Path, value: float) -> None:
    tensors = factors()
    name = f"{PREFIX}{path_of(3, 'v_proj')}.lora_B.weight"
    tensors[name][3, 1] = value
    assert refusal(write_adapter(tmp_path, tensors)).facts["tensor"] == name


def test_c22_overflow_by_scaling_is_refused(tmp_path: Path) -> None:
    tensors = {name: value * 1e30 for name, value in factors().items()}
    assert "overflows" in refusal(write_adapter(tmp_path, tensors, {"lora_alpha": 1e12})).message


def test_c51_pickles_are_never_opened(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[Path]]:
            return Path.touch, (tmp_path / "sprung",)

    write_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(Trap()))
    assert refusal(tmp_path).facts["file"] == "adapter_model.bin"
    (tmp_path / "adapter_model.bin").rename(tmp_path / "adapter_model.safetensors")
    assert refusal(tmp_path).facts["file"] == "adapter_model.safetensors"
    assert not (tmp_path / "sprung").exists()


def test_c51_safetensors_win_over_a_pickle_beside_them(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"not even a pickle")
    assert load_adapter(tmp_path, BASE)


def test_a_factor_without_its_partner_is_refused(tmp_path: Path) -> None:
    tensors = factors()
    del tensors[f"{PREFIX}{path_of(2, 'q_proj')}.lora_B.weight"]
    assert "lora_B" in refusal(write_adapter(tmp_path, tensors)).message


def test_two_spellings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    twice = renamed(factors(), PREFIX, "")
    assert "same module" in refusal(write_adapter(tmp_path, factors() | twice)).message


def test_bad_json_names_file_line_and_column(tmp_path: Path) -> None:
    (write_adapter(tmp_path) / "adapter_config.json").write_text('{"r": 4,\n "lora_alpha" 8}')
    message = refusal(tmp_path).message
    assert message.startswith("adapter_config.json")
    assert "line 2" in message


def test_versions_depend_on_weights_scale_and_base_but_not_on_the_path(tmp_path: Path) -> None:
    first = load_adapter(write_adapter(tmp_path / "a"), BASE).version
    assert load_adapter(write_adapter(tmp_path / "b"), BASE).version == first
    scaled = write_adapter(tmp_path / "c", config={"lora_alpha": 9})
    assert load_adapter(scaled, BASE).version != first
    other = write_adapter(tmp_path / "d", factors(seed=5))
    assert load_adapter(other, BASE).version != first


def test_no_json_value_makes_the_config_reader_crash(tmp_path: Path) -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    values = st.recursive(
        scalars, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=4
    )
    keys = st.sampled_from(
        ["peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "bias", "use_rslora", "x"]
    )
    file = tmp_path / "adapter_config.json"

    @settings(max_examples=200, deadline=None)
    @given(st.dictionaries(keys, values), st.booleans())
    def check(config: dict[str, Any], valid_base: bool) -> None:
        base = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} if valid_base else {}
        file.write_text(json.dumps(base | config))
        try:
            read_config(file)
        except LorafleetError as error:
            assert "adapter_config.json" in error.message

    check()
