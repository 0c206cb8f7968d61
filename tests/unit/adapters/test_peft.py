"""PEFT itself as the oracle: what it saves is loaded, and its deltas are ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorafleet.adapters import load_adapter
from lorafleet.core.errors import Unsupported
from support.adapters import ALL_LINEARS, tiny_base
from support.tiny import CONFIG

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

# PEFT warns of what some of these adapters are made for: to be refused.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{warning}")
    for warning in (
        "The following alpha_pattern",
        "`lora_bias=True`",
        "Adapter 'default'",
        "Setting",
    )
]

BASE = tiny_base()


def trained(config: Any) -> Any:
    """A PEFT model on tiny4 whose factors are random, as after training."""
    torch.manual_seed(0)
    options = {key: value for key, value in CONFIG.items() if key not in ("architectures",)}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape) * 0.3)
    return model


def pefts_deltas(model: Any) -> dict[str, np.ndarray]:
    """PEFT's own merged weight minus the base's, by module path."""
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach().numpy()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight") and "default" in module.lora_A
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "c05 all-linear": {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"},
    "c05 regex": {"r": 4, "target_modules": r".*\.(q_proj|up_proj)"},
    "c05 exclude": {"r": 4, "target_modules": list(ALL_LINEARS), "exclude_modules": ["k_proj"]},
    "c11 layers": {
        "r": 4,
        "target_modules": ["q_proj", "k_proj"],
        "layers_to_transform": [0, 3],
        "layers_pattern": "layers",
    },
    "c15 rslora": {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ["o_proj"]},
    "c16 patterns": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": list(ALL_LINEARS),
        "rank_pattern": {"down_proj": 32, r"^model\.layers\.1\.self_attn\.q_proj": 2},
        "alpha_pattern": {r"layers\.[02]\..*": 4, "self_attn.k_proj": 3, "proj": 99},
    },
    "c16 patterns with rslora": {
        "r": 8,
        "lora_alpha": 16,
        "use_rslora": True,
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"q_proj|v_proj": 3},
        "alpha_pattern": {r"model.layers.2.mlp.down_proj": 1},
    },
    "c20 orthogonal": {"r": 4, "init_lora_weights": "orthogonal", "target_modules": ["q_proj"]},
    "c20 mica": {"r": 4, "init_lora_weights": "mica", "target_modules": ["q_proj"]},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_peft_saves_has_pefts_deltas(tmp_path: Path, name: str) -> None:
    model = trained(peft.LoraConfig(task_type="CAUSAL_LM", **CONFIGS[name]))
    model.save_pretrained(tmp_path)
    adapter = load_adapter(tmp_path, BASE)
    expected = pefts_deltas(model)
    assert {module.source for module in adapter.modules} == set(expected)
    for site in BASE.sites:
        delta = adapter.delta(site.name)
        for part in site.parts:
            found = delta[part.out_start : part.out_end]
            wanted = expected.get(part.source, np.zeros_like(found))
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=part.source)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"alora_invocation_tokens": [7, 8]}, "alora_invocation_tokens"),
        ({"layer_replication": [(0, 3), (1, 4)]}, "layer_replication"),
    ],
)
def test_what_peft_saves_with_options_we_do_not_honour_is_refused(
    tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    """C03, C06, C13, C20: as PEFT writes them, not as we imagine them."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    trained(config).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=field) as caught:
        load_adapter(tmp_path, BASE)
    assert caught.value.facts == {"file": "adapter_config.json", "field": field}


def test_c03_lora_on_the_embedding_is_refused_as_peft_writes_it(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"])
    trained(config).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="embedding"):
        load_adapter(tmp_path, BASE)


@pytest.mark.parametrize(
    "family", ["AdaLoraConfig", "LoHaConfig", "LoKrConfig", "VeraConfig", "IA3Config"]
)
def test_c09_other_families_are_refused_as_peft_writes_them(tmp_path: Path, family: str) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj"]}
    options |= {"feedforward_modules": []} if family == "IA3Config" else {}
    options |= {"total_step": 10} if family == "AdaLoraConfig" else {}
    getattr(peft, family)(**options).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(Unsupported, match=family.removesuffix("Config").upper()):
        load_adapter(tmp_path, BASE)
