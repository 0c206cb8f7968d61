"""`adapter_config.json`: nothing in it is ignored that changes the output, and nothing crashes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lorafleet.adapters import read_config
from lorafleet.adapters.config import HARMLESS, HONOURED, REFUSED, LoraConfig, parse_config
from lorafleet.adapters.regex import Steps
from lorafleet.core.errors import InvalidAdapter, LorafleetError, Unsupported
from support.adapters import DEFAULT_CONFIG


def parsed(**options: Any) -> LoraConfig:
    return parse_config({**DEFAULT_CONFIG, **options})


def refusal(**options: Any) -> LorafleetError:
    with pytest.raises((InvalidAdapter, Unsupported)) as caught:
        parsed(**options)
    return caught.value


def test_every_option_is_of_one_kind() -> None:
    assert not HONOURED & HARMLESS
    assert not (HONOURED | HARMLESS) & set(REFUSED)


def test_every_option_of_the_installed_peft_is_known() -> None:
    """An option that PEFT adds must be judged, not met for the first time in somebody's adapter."""
    peft = pytest.importorskip("peft")
    fields = set(peft.LoraConfig.__dataclass_fields__)
    assert fields - HONOURED - HARMLESS - set(REFUSED) == set()


def test_a_config_of_the_installed_pefts_defaults_is_accepted(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]).save_pretrained(tmp_path)
    assert read_config(tmp_path / "adapter_config.json").r == 4


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_an_option_that_changes_the_output_is_refused_by_name(key: str) -> None:
    error = refusal(**{key: {"a": [1]}})
    assert isinstance(error, Unsupported)
    assert error.facts == {"file": "adapter_config.json", "field": key}
    for empty in (None, False, [], {}, ""):
        parsed(**{key: empty})


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("pissa_niter_16", "moved part of the base"),
        ("lora_ga", "moved part of the base"),
        ("corda", "moved part of the base"),
        ("next_years_init", "may have changed the base"),
        ({"a": 1}, "may have changed the base"),
    ],
)
def test_c20_initialisations_that_may_have_changed_the_base_are_refused(
    value: Any, why: str
) -> None:
    error = refusal(init_lora_weights=value)
    assert why in error.message
    assert error.facts["field"] == "init_lora_weights"


@pytest.mark.parametrize("value", [True, False, None, "true", "gaussian", "Gaussian", "mica"])
def test_c20_initialisations_that_leave_the_base_alone_are_accepted(value: Any) -> None:
    parsed(init_lora_weights=value)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"r": 0}, "r"),
        ({"r": 4.0}, "r"),
        ({"r": True}, "r"),
        ({"r": 10**400}, "r"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"rank_pattern": [8]}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj']"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj']"),
        ({"alpha_pattern": {"q_proj(": 8}}, "alpha_pattern['q_proj(']"),
        ({"base_model_name_or_path": ["tiny4"]}, "base_model_name_or_path"),
    ],
)
def test_values_of_the_wrong_form_are_refused_with_their_field(
    options: dict[str, Any], field: str
) -> None:
    error = refusal(**options)
    assert error.facts == {"file": "adapter_config.json", "field": field}
    assert len(error.message) < 300


def test_patterns_give_each_module_its_own_rank_and_alpha() -> None:
    config = parsed(
        r=8, lora_alpha=16, rank_pattern={"down_proj": 32}, alpha_pattern={r"layers\.1\..*": 0}
    )
    steps = Steps(1000)
    assert config.rank_of("model.layers.0.mlp.down_proj", steps) == 32
    assert config.rank_of("model.layers.0.mlp.up_down_proj", steps) == 8
    assert config.alpha_of("model.layers.1.mlp.up_proj", steps) == 0.0
    assert config.alpha_of("model.layers.2.mlp.up_proj", steps) == 16.0


def test_patterns_that_cost_too_much_are_refused_by_name() -> None:
    config = parsed(rank_pattern={"(a+)+X": 4})
    with pytest.raises(Unsupported, match="rank_pattern takes too many steps"):
        config.rank_of("a" * 80, Steps(50))


@pytest.mark.parametrize("depth", [200, 900, 990, 100_000])
def test_deep_json_is_refused(tmp_path: Path, depth: int) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text('{"peft_type": "LORA", "deep": ' + "[" * depth + "1" + "]" * depth + "}")
    assert depth < sys.getrecursionlimit() or depth == 100_000
    with pytest.raises((InvalidAdapter, Unsupported), match=r"adapter_config\.json"):
        read_config(file)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["LORA", "none", "(a+)+", "[", "pissa"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
KEYS = st.sampled_from(sorted(HONOURED | HARMLESS | set(REFUSED))) | st.text(max_size=5)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=6))
@example({"lora_alpha": 10**400})
@example({"\ud800": 1})
def test_any_json_object_is_a_config_or_a_refusal(options: dict[str, Any]) -> None:
    try:
        found = parsed(**options)
    except LorafleetError as error:
        assert error.message.startswith("adapter_config.json: ")
        json.dumps([error.message, error.facts]).encode()
        "".join([error.message, *error.facts.values()]).encode()
    else:
        assert found.rank_of("model.layers.0.self_attn.q_proj", Steps(10**6)) >= 1


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_config_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "adapter_config.json"
    file.write_bytes(content)
    with pytest.raises((InvalidAdapter, Unsupported)) as caught:
        read_config(file)  # none of these is a whole config
    assert caught.value.facts["file"] == "adapter_config.json"
