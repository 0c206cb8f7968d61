"""The names of tensors: which module and which factor, or what they are instead."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lorafleet.adapters.checkpoint import Factor, read_factors
from lorafleet.adapters.files import find_files
from lorafleet.core.errors import InvalidAdapter, LorafleetError, Unsupported
from support.adapters import PREFIX, path_of, write_adapter

MODULE = path_of(0, "q_proj")


def read(directory: Path, *names: str) -> list[Factor]:
    tensors = {name: np.zeros((4, 64), np.float32) for name in names}
    return read_factors(find_files(write_adapter(directory, tensors)))


def refusal(directory: Path, *names: str) -> LorafleetError:
    with pytest.raises((InvalidAdapter, Unsupported)) as caught:
        read(directory, *names)
    return caught.value


@pytest.mark.parametrize(
    ("name", "module"),
    [
        (f"{PREFIX}{MODULE}.lora_A.weight", MODULE),
        (f"{PREFIX}{MODULE}.lora_A.default.weight", MODULE),
        (f"{MODULE}.lora_A.weight", MODULE),
        (f"{PREFIX}{PREFIX}{MODULE}.lora_A.weight", f"{PREFIX}{MODULE}"),
    ],
)
def test_a_factor_knows_its_module(tmp_path: Path, name: str, module: str) -> None:
    (factor,) = read(tmp_path, name)
    assert (factor.module, factor.kind, factor.tensor) == (module, "A", name)
    assert (factor.dtype, factor.shape) == ("F32", (4, 64))


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [
        ("lora_A.weight", "A"),
        ("lora_B.default.weight", "B"),
        ("lora_A.mine.weight", "A"),
        ("lora_a", "A"),
        ("lora_b", "B"),
        ("lora_magnitude_vector", "magnitude"),
        ("lora_magnitude_vector.weight", "magnitude"),
        ("lora_magnitude_vector.default.weight", "magnitude"),
        ("lora_B.bias", "lora_bias"),
        ("lora_B.default.bias", "lora_bias"),
        ("bias", "bias"),
        ("base_layer.bias", "bias"),
    ],
)
def test_a_tensor_is_of_one_kind(tmp_path: Path, suffix: str, kind: str) -> None:
    (factor,) = read(tmp_path, f"{PREFIX}{MODULE}.{suffix}")
    assert (factor.module, factor.kind) == (MODULE, kind)


@pytest.mark.parametrize(
    ("suffix", "what"),
    [
        ("lora_embedding_A", "LoRA on an embedding"),
        ("lora_embedding_B.default", "LoRA on an embedding"),
        ("lora_E", "AdaLoRA"),
        ("lora_A", "AdaLoRA"),
        ("hada_w1_a", "LoHa"),
        ("lokr_w1", "LoKr"),
        ("vera_lambda_b", "VeRA"),
        ("ia3_l", "IA3"),
        ("token_adapter.trainable_tokens_delta", "trainable_token_indices"),
        ("weight", "modules_to_save"),
        ("base_layer.weight", "LoRA on an embedding"),
        ("modules_to_save.default.weight", "modules_to_save"),
        ("oft_r", "no LoRA factor"),
    ],
)
def test_what_is_no_factor_is_called_by_its_name(tmp_path: Path, suffix: str, what: str) -> None:
    """C03, C09: with the shape, so that the user knows which matrix it is."""
    name = f"{PREFIX}{MODULE}.{suffix}"
    error = refusal(tmp_path, name)
    assert what in error.message
    assert "[4, 64]" in error.message
    assert error.facts == {"file": "adapter_model.safetensors", "tensor": name}


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    """C01: zero matched modules are never a success."""
    assert "no tensors" in refusal(tmp_path).message


def test_names_of_kilobytes_are_refused_at_once(tmp_path: Path) -> None:
    error = refusal(tmp_path, "x.lora_B." * 20_000 + "bias")
    assert len(error.message) < 400
    assert len(error.facts["tensor"]) <= 200


def test_factors_of_two_adapters_in_one_file_are_refused(tmp_path: Path) -> None:
    names = [f"{PREFIX}{MODULE}.lora_{factor}.{own}.weight" for factor, own in ("Ay", "Bx")]
    error = refusal(tmp_path, *names)
    assert "another adapter" in error.message
    assert error.facts["tensor"] == names[1]
