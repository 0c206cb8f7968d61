"""Which key of a pattern option speaks for a module: PEFT's own answer, for keys it can read."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.adapters.patterns import compile_patterns
from lorafleet.adapters.regex import RegexError, Steps

PATHS = [
    f"{prefix}layers.{layer}.{module}"
    for prefix in ("model.", "", "model.language_model.")
    for layer in (1, 11)
    for module in ("self_attn.q_proj", "mlp.down_proj")
]
KEYS = [
    "q_proj",
    "proj",
    "self_attn.q_proj",
    "self_attn_q_proj",
    "self.attn.q.proj",
    "layers.1.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    r"^model\.layers\.1\.self_attn\.q_proj$",
    "^layers.1.mlp.down_proj",
    "q_proj|down_proj",
    r"layers\.\d+\.mlp\.(down|up)_proj",
    r".*\.layers\.(0|1)\..*",
    "layers.[2-9].mlp.*",
    ".*",
    "",
    "down_proj ",
    "mlp",
]


def pefts_answer(keys: list[str], path: str) -> str | None:
    """PEFT's `get_pattern_key`, which returns the path itself where no key matches."""
    return next((key for key in keys if re.match(rf"(.*\.)?({key})$", path)), None)


def our_answer(keys: list[str], path: str) -> str | None:
    found = compile_patterns({key: i for i, key in enumerate(keys)}).find(path, Steps(10**6))
    return None if found is None else keys[found]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(KEYS), unique=True, max_size=5), st.sampled_from(PATHS))
def test_the_first_key_that_matches_in_pefts_way_is_found(keys: list[str], path: str) -> None:
    assert our_answer(keys, path) == pefts_answer(keys, path)


def test_the_rule_is_the_installed_pefts() -> None:
    other = pytest.importorskip("peft.utils.other")
    for path in PATHS:
        for key in KEYS:
            assert other.get_pattern_key([key], path) == (pefts_answer([key], path) or path)


def test_a_key_that_cannot_be_read_is_named() -> None:
    with pytest.raises(RegexError) as caught:
        compile_patterns({"q_proj": 4, "k_proj(": 8})
    assert caught.value.key == "k_proj("


def test_a_key_for_each_of_many_modules_is_cheap() -> None:
    """EVA writes one for every module; 80 layers of 7."""
    paths = [f"model.layers.{i}.self_attn.p{j}_proj" for i in range(80) for j in range(7)]
    patterns = compile_patterns({path: i + 1 for i, path in enumerate(paths)})
    steps = Steps(1_000_000)
    started_s = time.process_time()
    assert [patterns.find(path, steps) for path in paths] == list(range(1, 561))
    assert time.process_time() - started_s < 5
