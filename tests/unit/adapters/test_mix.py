"""Mixing adapters, against PEFT's add_weighted_adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.adapters import load_adapter
from lorafleet.adapters.combine import truncated, truncated_whole
from lorafleet.adapters.mix import METHODS, MixOptions, mix
from lorafleet.adapters.modules import PlainAdapter, read_plain
from lorafleet.core.errors import AlreadyExists, InvalidInput, Unsupported
from support.adapters import factors, path_of, tiny_base, write_adapter
from support.tiny import CONFIG

BASE = tiny_base()
WEIGHTS = (0.7, -0.4, 1.5)
EXACT_RANK = 12


def three(tmp_path: Path, *, rank: int = 4) -> list[Path]:
    """Three adapters of one rank; the second lacks v_proj, the third is rsLoRA."""
    options: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("q_proj", "v_proj"), {}),
        (("q_proj",), {"lora_alpha": 3}),
        (("q_proj", "v_proj"), {"use_rslora": True}),
    ]
    return [
        write_adapter(
            tmp_path / f"adapter{seed}",
            factors(targets=targets, rank=rank, seed=seed),
            {"r": rank, "target_modules": list(targets), **config},
        )
        for seed, (targets, config) in enumerate(options)
    ]


def deltas(directory: Path) -> dict[str, np.ndarray]:
    """By module path, zero where not adapted."""
    adapter = load_adapter(directory, BASE)
    return {
        part.source: adapter.delta(site.name)[part.out_start : part.out_end]
        for site in BASE.sites
        for part in site.parts
    }


def pefts(directories: list[Path], options: MixOptions) -> Mapping[str, np.ndarray]:
    """PEFT's mix, as deltas by module path."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    sizes = {key: value for key, value in CONFIG.items() if key != "architectures"}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model = peft.PeftModel.from_pretrained(base, directories[0], adapter_name="a0")
    for i, directory in enumerate(directories[1:], 1):
        model.load_adapter(directory, adapter_name=f"a{i}")
    names = [f"a{i}" for i in range(len(directories))]
    model.add_weighted_adapter(
        names,
        list(WEIGHTS),
        "mix",
        combination_type=options.method,
        svd_rank=options.rank,
        density=options.density,
        majority_sign_method=options.sign,
    )
    with torch.no_grad():
        return {
            name.removeprefix("base_model.model."): module.get_delta_weight("mix").numpy()
            for name, module in model.named_modules()
            if hasattr(module, "get_delta_weight") and "mix" in module.lora_A
        }


@pytest.mark.parametrize(
    "options",
    [
        MixOptions(method="cat"),
        MixOptions(method="svd", rank=EXACT_RANK),
        MixOptions(method="svd", rank=3),
        MixOptions(method="linear"),
        MixOptions(method="magnitude_prune", density=0.4),
        MixOptions(method="ties", density=0.5),
        MixOptions(method="ties", density=0.3, sign="frequency"),
        MixOptions(method="ties_svd", density=0.5, rank=6),
        MixOptions(method="magnitude_prune_svd", density=0.4, rank=6),
    ],
    ids=lambda options: f"{options.method}-{options.sign}-{options.rank}",
)
def test_a_mix_is_pefts(tmp_path: Path, options: MixOptions) -> None:
    directories = three(tmp_path)
    mix([read_plain(d) for d in directories], WEIGHTS, options).save(tmp_path / "mixed")
    found = deltas(tmp_path / "mixed")
    expected = pefts(directories, options)
    for name, wanted in expected.items():
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(found[name], wanted, atol=2e-5 * scale, err_msg=name)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties", "dare_linear_svd", "dare_ties_svd"])
def test_dare_is_pefts_with_the_same_coins(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT walks over modules, and A before B, in another order: one module, same order."""
    torch = pytest.importorskip("torch")
    directories = [
        write_adapter(
            tmp_path / f"a{seed}",
            factors(targets=["q_proj"], layers=[0], seed=seed),
            {"target_modules": ["model.layers.0.self_attn.q_proj"]},
        )
        for seed in range(3)
    ]
    options = MixOptions(method=method, density=0.6, rank=12, seed=5)
    mix([read_plain(d) for d in directories], WEIGHTS, options).save(tmp_path / "mixed")
    coins = np.random.default_rng(5)
    monkeypatch.setattr(
        torch,
        "bernoulli",
        lambda input: torch.tensor(coins.random(input.shape) < 0.6, dtype=input.dtype),
    )
    (wanted,) = pefts(directories, options).values()
    found = deltas(tmp_path / "mixed")[path_of(0, "q_proj")]
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


def test_cat_is_the_weighted_sum_whatever_the_ranks(tmp_path: Path) -> None:
    ranks = (1, 4, 9)
    directories = [
        write_adapter(tmp_path / f"r{r}", factors(rank=r, seed=r), {"r": r}) for r in ranks
    ]
    mix([read_plain(d) for d in directories], WEIGHTS, MixOptions()).save(tmp_path / "mixed")
    each = [deltas(d) for d in directories]
    for name, found in deltas(tmp_path / "mixed").items():
        wanted = sum(w * delta[name] for w, delta in zip(WEIGHTS, each, strict=True))
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert load_adapter(tmp_path / "mixed", BASE).max_rank == sum(ranks)


@settings(max_examples=25, deadline=None)
@given(
    rank=st.integers(1, 9), total=st.integers(1, 9), out=st.integers(9, 30), seed=st.integers(0, 9)
)
def test_the_truncation_of_a_product_is_that_of_the_whole(
    rank: int, total: int, out: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    b, a = rng.standard_normal((out, total)), rng.standard_normal((total, 17))
    left, right = truncated(b, a, rank)
    left_whole, right_whole = truncated_whole(b @ a, rank)
    np.testing.assert_allclose(left @ right, left_whole @ right_whole, atol=1e-4)


def test_half_precision_stays_half_precision(tmp_path: Path) -> None:
    tensors = {name: value.astype(np.float16) for name, value in factors().items()}
    directory = write_adapter(tmp_path / "half", tensors)
    mix([read_plain(directory)], [0.5], MixOptions()).save(tmp_path / "mixed")
    assert load_adapter(tmp_path / "mixed", BASE).dtype == "float16"


def test_what_cannot_be_mixed_is_refused_by_name(tmp_path: Path) -> None:
    one, two = (
        read_plain(write_adapter(tmp_path / f"{r}", factors(rank=r), {"r": r})) for r in (4, 8)
    )
    with pytest.raises(InvalidInput, match="equal ranks"):
        mix([one, two], [1, 1], MixOptions(method="linear"))
    with pytest.raises(InvalidInput, match="as many weights"):
        mix([one, two], [1], MixOptions())
    with pytest.raises(InvalidInput, match="finite"):
        mix([one], [float("nan")], MixOptions())
    for options in ({"method": "slerp"}, {"sign": "x"}, {"rank": 0}):
        with pytest.raises(InvalidInput, match=next(iter(options))):
            MixOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="density"):
        mix([one], [1], MixOptions(method="ties", density=0))


def test_dora_cannot_be_mixed(tmp_path: Path) -> None:
    vectors = {
        name.replace("lora_A.weight", "lora_magnitude_vector"): np.ones(64, np.float32)
        for name in factors(targets=["q_proj"])
        if "lora_A" in name
    }
    directory = write_adapter(tmp_path, factors(targets=["q_proj"]) | vectors, {"use_dora": True})
    with pytest.raises(Unsupported, match="magnitude"):
        read_plain(directory)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    adapter: PlainAdapter = read_plain(write_adapter(tmp_path / "a"))
    with pytest.raises(AlreadyExists):
        adapter.save(tmp_path / "a")


def test_all_methods_are_pefts() -> None:
    assert set(METHODS) == {
        *("svd", "linear", "cat", "ties", "ties_svd", "dare_ties", "dare_linear"),
        *("dare_ties_svd", "dare_linear_svd", "magnitude_prune", "magnitude_prune_svd"),
    }
