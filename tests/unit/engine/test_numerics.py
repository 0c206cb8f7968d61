"""The engine's numbers against transformers and PEFT in float32, and against itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorafleet.compiler import CompileOptions, compile_model
from lorafleet.engine import Engine, EngineOptions, Prompt, SamplingParams
from support.tiny import write_tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

PROMPT = [7, 100, 33, 250, 1, 64, 18]


@pytest.fixture(scope="module")
def oracle(tiny_source: Path, adapter_dirs: dict[str, Path]) -> Iterator[Any]:
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_source, dtype=torch.float32)
    model: Any = None
    for name, directory in adapter_dirs.items():
        if model is None:
            model = peft.PeftModel.from_pretrained(base, directory, adapter_name=name)
        else:
            model.load_adapter(directory, adapter_name=name)
    yield model.eval()


def expected_logits(oracle: Any, tokens: list[int], adapter: str | None) -> np.ndarray:
    with torch.inference_mode():
        if adapter is None:
            with oracle.disable_adapter():
                return oracle(torch.tensor([tokens])).logits[0, -1].numpy()
        oracle.set_adapter(adapter)
        return oracle(torch.tensor([tokens])).logits[0, -1].numpy()


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("adapter", [None, "small", "wide", "odd"])
def test_logits_are_those_of_peft(engine: Engine, oracle: Any, adapter: str | None) -> None:
    for length in (1, 2, 7):
        tokens = PROMPT[:length]
        found = engine.logits([(tokens, adapter)])[0]
        assert_close(found, expected_logits(oracle, tokens, adapter))


def test_the_adapters_are_loud_enough_to_tell_apart(engine: Engine) -> None:
    rows = engine.logits([(PROMPT, name) for name in (None, "small", "wide", "odd")])
    assert len({int(row.argmax()) for row in rows}) >= 3


def test_a_mixed_batch_is_each_row_alone(engine: Engine, oracle: Any) -> None:
    """C24: base rows beside adapters, in every batch size, bit by bit."""
    uses = [None, "wide", "small", None, "odd", "wide", None, "small", "odd"]
    for size in range(1, len(uses) + 1):
        batch = [(PROMPT[: 1 + i % 7], use) for i, use in enumerate(uses[:size])]
        mixed = engine.logits(batch)
        for row, one in zip(mixed, batch, strict=True):
            assert (row == engine.logits([one])[0]).all()
            assert_close(row, expected_logits(oracle, *one))


def test_base_rows_are_bit_equal_to_a_library_without_lora(
    engine: Engine, tiny_source: Path, tmp_path: Path
) -> None:
    compile_model(tiny_source, tmp_path / "stock", options=CompileOptions(lora=False))
    mixed = engine.logits([(PROMPT, "wide"), (PROMPT, None), (PROMPT[:3], None)])
    with Engine(tmp_path / "stock", options=EngineOptions(kv_tokens=1024)) as stock:
        plain = stock.logits([(PROMPT, None), (PROMPT[:3], None)])
    assert (mixed[1:] == plain).all()


def test_greedy_tokens_are_those_of_peft(engine: Engine, oracle: Any) -> None:
    for adapter in (None, "small", "wide", "odd"):
        tokens = list(PROMPT)
        for _ in range(24):
            tokens.append(int(expected_logits(oracle, tokens, adapter).argmax()))
        answer = engine.complete(
            Prompt(token_ids=PROMPT), SamplingParams(max_tokens=24), adapter=adapter
        )
        assert list(answer.token_ids) == tokens[len(PROMPT) :]


def test_a_mix_is_the_sum_of_scaled_deltas(engine: Engine, tiny_source: Path) -> None:
    """Any number of adapters with any scales, negative too, in one request."""
    mix = [("small", 0.7), ("wide", -0.4)]
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_source, dtype=torch.float32)
    with torch.no_grad():
        for site in engine.base.sites:
            delta = sum(scale * engine.get_lora_delta(name, site.name) for name, scale in mix)
            for part in site.parts:
                weight = model.get_submodule(part.source).weight
                weight += torch.tensor(delta[part.out_start : part.out_end])
        expected = model(torch.tensor([PROMPT])).logits[0, -1].numpy()
    found = engine.logits([(PROMPT, "odd"), (PROMPT, mix), (PROMPT, None)])[1]
    assert_close(found, expected)


def test_chunked_prefill_changes_no_bit(tiny_model: Path, adapter_dirs: dict[str, Path]) -> None:
    rng = np.random.default_rng(0)
    prompt = Prompt(token_ids=rng.integers(0, 256, 100).tolist())
    answers = set()
    for step_tokens in (4, 33, 256):
        options = EngineOptions(
            kv_tokens=512, num_adapter_pages=8, max_batch=4, max_step_tokens=step_tokens
        )
        with Engine(tiny_model, options=options) as engine:
            engine.upload_lora(adapter_dirs["wide"], name="wide")
            engine.set_lora("wide")
            answers.add(engine.complete(prompt, SamplingParams(max_tokens=32)).token_ids)
    assert len(answers) == 1


def test_a_tied_head_uses_the_embedding(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "src", tied=True)
    compile_model(source, tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1].numpy()
    with Engine(tmp_path / "model", options=EngineOptions(kv_tokens=512)) as engine:
        assert_close(engine.logits([(PROMPT, None)])[0], expected)
