"""A loaded adapter: its identity, its numbers, and that the two agree."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.adapters import LoraAdapter, load_adapter
from lorafleet.core.errors import InvalidAdapter, NotFound
from support.adapters import ALL_LINEARS, PREFIX, factors, path_of, tiny_base, write_adapter

BASE = tiny_base()
QKV = "model.layers.0.self_attn.qkv_proj"


def dense(tensors: Mapping[str, np.ndarray], adapter: LoraAdapter, site_name: str) -> np.ndarray:
    """The oracle: scale * B A of each part, in float64."""
    site = next(site for site in BASE.sites if site.name == site_name)
    delta = np.zeros((site.out_features, site.in_features))
    for module in adapter.modules:
        for part in site.parts:
            if part.source == module.source:
                a = tensors[f"{PREFIX}{module.source}.lora_A.weight"].astype(np.float64)
                b = tensors[f"{PREFIX}{module.source}.lora_B.weight"].astype(np.float64)
                delta[part.out_start : part.out_end] = module.scale * (b @ a)
    return delta


@settings(max_examples=30, deadline=None)
@given(
    targets=st.sets(st.sampled_from(ALL_LINEARS), min_size=1),
    layers=st.sets(st.integers(0, 3), min_size=1),
    rank=st.sampled_from([1, 3, 8, 17]),
    seed=st.integers(0, 9),
)
def test_c11_any_part_of_any_layers_gives_the_dense_delta(
    tmp_path_factory: pytest.TempPathFactory,
    targets: set[str],
    layers: set[int],
    rank: int,
    seed: int,
) -> None:
    tensors = factors(targets=sorted(targets), layers=sorted(layers), rank=rank, seed=seed)
    directory = write_adapter(tmp_path_factory.getbasetemp() / "any", tensors, {"r": rank})
    adapter = load_adapter(directory, BASE)
    for site in BASE.sites:
        expected = dense(tensors, adapter, site.name)
        np.testing.assert_allclose(adapter.delta(site.name), expected, rtol=1e-5, atol=1e-5)
    places = [(f.site, f.part) for f in adapter.factors()]
    assert len(set(places)) == len(places) == len(targets) * len(layers)
    assert [site for site, _ in places] == sorted(site for site, _ in places)


@pytest.mark.parametrize("zeros", ["lora_A", "lora_B"])
def test_c11_factors_of_zeros_are_an_adapter_that_changes_nothing(
    tmp_path: Path, zeros: str
) -> None:
    tensors = {name: value * (zeros not in name) for name, value in factors().items()}
    assert not load_adapter(write_adapter(tmp_path, tensors), BASE).delta(QKV).any()


def test_c19_a_square_layer_is_not_transposed(tmp_path: Path) -> None:
    tensors = factors(targets=["o_proj"])
    adapter = load_adapter(write_adapter(tmp_path, tensors), BASE)
    name = "model.layers.0.self_attn.o_proj"
    expected = dense(tensors, adapter, name)
    np.testing.assert_allclose(adapter.delta(name), expected, atol=1e-5)
    assert np.abs(adapter.delta(name) - expected.T).max() > 0.1


DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("a_dtype", DTYPES)
@pytest.mark.parametrize("b_dtype", DTYPES)
def test_c21_every_mix_of_float_dtypes_is_widened_exactly(
    tmp_path: Path, a_dtype: str, b_dtype: str
) -> None:
    tensors = {
        name: value.astype(DTYPES[a_dtype if "lora_A" in name else b_dtype])
        for name, value in factors().items()
    }
    adapter = load_adapter(write_adapter(tmp_path, tensors), BASE)
    assert adapter.dtype == (a_dtype if a_dtype == b_dtype else "mixed")
    first = next(iter(adapter.factors()))
    assert first.a.dtype == first.b_t.dtype == np.float32
    assert first.b_t.flags.c_contiguous
    source = BASE.sites[first.site].parts[first.part].source
    wide = {name: value.astype(np.float32) for name, value in tensors.items()}
    np.testing.assert_array_equal(first.a, wide[f"{PREFIX}{source}.lora_A.weight"])
    np.testing.assert_array_equal(first.b_t.T, wide[f"{PREFIX}{source}.lora_B.weight"] * 2)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_c22_halves_that_are_not_finite_are_refused(tmp_path: Path, dtype: type) -> None:
    tensors = {name: value.astype(dtype) for name, value in factors().items()}
    name = f"{PREFIX}{path_of(3, 'v_proj')}.lora_A.weight"
    tensors[name][0, 0] = np.inf
    with pytest.raises(InvalidAdapter) as caught:
        load_adapter(write_adapter(tmp_path, tensors), BASE)
    assert caught.value.facts["tensor"] == name


def test_c22_a_product_that_overflows_is_left_to_the_engine(tmp_path: Path) -> None:
    tensors = {name: value * np.float32(1e25) for name, value in factors().items()}
    assert load_adapter(write_adapter(tmp_path, tensors), BASE).num_modules == 8


@pytest.mark.filterwarnings("error")
@settings(max_examples=60, deadline=None)
@given(
    alpha=st.floats(allow_nan=False, allow_infinity=False),
    a=st.floats(width=32),
    b=st.floats(width=32),
)
def test_c22_what_is_accepted_is_finite(
    tmp_path_factory: pytest.TempPathFactory, alpha: float, a: float, b: float
) -> None:
    tensors = factors(targets=["q_proj"], layers=[0])
    for name, value in tensors.items():
        value[1, 1] = a if "lora_A" in name else b
    directory = tmp_path_factory.getbasetemp() / "finite"
    write_adapter(directory, tensors, {"lora_alpha": alpha})
    try:
        adapter = load_adapter(directory, BASE)
    except InvalidAdapter:
        return
    assert all(np.isfinite(f.a).all() and np.isfinite(f.b_t).all() for f in adapter.factors())


def test_the_version_is_of_weights_scales_and_base_alone(tmp_path: Path) -> None:
    first = load_adapter(write_adapter(tmp_path / "a"), BASE)
    described = {"lora_dropout": 0.1, "base_model_name_or_path": "other", "peft_version": "9"}
    same = load_adapter(write_adapter(tmp_path / "b", config=described), BASE)
    assert same.version == first.version
    halves = {name: value.astype(np.float16) for name, value in factors().items()}
    exact = {name: value.astype(np.float32) for name, value in halves.items()}
    versions = {
        first.version,
        load_adapter(write_adapter(tmp_path / "c", config={"use_rslora": True}), BASE).version,
        load_adapter(write_adapter(tmp_path / "d", factors(layers=[0])), BASE).version,
        load_adapter(write_adapter(tmp_path / "e", halves), BASE).version,
        load_adapter(write_adapter(tmp_path / "f", exact), BASE).version,
        load_adapter(tmp_path / "a", dataclasses.replace(BASE, digest="sha256:1")).version,
    }
    assert len(versions) == 6


def test_the_order_of_tensors_in_the_file_is_no_part_of_the_version(tmp_path: Path) -> None:
    first = load_adapter(write_adapter(tmp_path / "a"), BASE)
    config = {"alpha_pattern": {}, "r": 4}
    turned = dict(reversed(factors().items()))
    assert (
        load_adapter(write_adapter(tmp_path / "b", turned, config), BASE).version == first.version
    )


def test_swapped_layers_are_another_version(tmp_path: Path) -> None:
    tensors = factors(targets=["q_proj"], layers=[0, 1])
    swapped = {
        name.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1."): value
        for name, value in tensors.items()
    }
    versions = {
        load_adapter(write_adapter(tmp_path / str(i), each), BASE).version
        for i, each in enumerate((tensors, swapped))
    }
    assert len(versions) == 2


def test_the_manifest_says_what_the_registry_keeps(tmp_path: Path) -> None:
    adapter = load_adapter(write_adapter(tmp_path), BASE)
    manifest = adapter.manifest("org/a", 1.5)
    assert manifest.id == adapter.version
    assert (manifest.adapter, manifest.created_at_s) == ("org/a", 1.5)
    assert manifest.base_digest == BASE.digest
    assert (manifest.max_rank, manifest.num_modules) == (4, 8)
    assert manifest.target_modules == ("q_proj", "v_proj")
    # A of q and v, B of q and v, over 4 layers.
    assert manifest.weights_bytes == 4 * 4 * (4 * 64 + 4 * 64 + 64 * 4 + 32 * 4)
    assert manifest.dtype == "float32"
    assert [entry.name for entry in manifest.files] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_site_that_does_not_exist_is_not_found(tmp_path: Path) -> None:
    adapter = load_adapter(write_adapter(tmp_path), BASE)
    with pytest.raises(NotFound, match="no site 'nowhere'"):
        adapter.delta("nowhere")


def test_loading_holds_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    write_adapter(tmp_path, factors(targets=ALL_LINEARS, rank=256), {"r": 256})
    total = (tmp_path / "adapter_model.safetensors").stat().st_size
    load_adapter(tmp_path, BASE)  # what is imported and cached is not what is measured
    tracemalloc.start()
    try:
        load_adapter(tmp_path, BASE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < total / 4
