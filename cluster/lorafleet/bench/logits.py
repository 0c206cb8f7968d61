"""First-step logits and greedy tokens against PEFT + PyTorch in float32."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lorafleet.bench.examples import QUESTIONS, example_adapters
from lorafleet.bench.figure import Measurement
from lorafleet.bench.oracle import PeftOracle
from lorafleet.bench.random_adapter import write_random_adapter
from lorafleet.compiler import CompileOptions, default_source, ensure_compiled
from lorafleet.engine import Engine, EngineOptions, Prompt, SamplingParams

_GOAL = 1e-4
_GREEDY_TOKENS = 64
_OPTIONS = EngineOptions(kv_tokens=4096, num_adapter_pages=64)


def measure_logits(report: Callable[[str], None]) -> Measurement:
    """Compare every adapter, alone and in one mixed batch; see the figure's goal."""
    report("compiling the model with and without LoRA")
    model_dir = ensure_compiled()
    stock_dir = ensure_compiled(options=CompileOptions(lora=False))
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine(model_dir, options=_OPTIONS) as engine,
        Engine(stock_dir, options=_OPTIONS) as stock,
    ):
        adapters = example_adapters()
        for rank in (8, 64):
            name = f"random-{rank}"
            adapters[name] = write_random_adapter(
                Path(folder) / name, engine.base, rank=rank, seed=rank
            )
        for name, directory in adapters.items():
            engine.upload_lora(directory, name=name)
        report("loading the oracle")
        oracle = PeftOracle(default_source(), adapters)
        prompts = [
            engine.tokenize(Prompt(messages=[{"role": "user", "content": question}]))
            for question in QUESTIONS
        ]
        return _compare(engine, stock, oracle, list(adapters), prompts, report)


def _compare(
    engine: Engine,
    stock: Engine,
    oracle: PeftOracle,
    names: list[str],
    prompts: list[list[int]],
    report: Callable[[str], None],
) -> Measurement:
    uses: list[str | None] = [None, *names]
    # Every adapter on two prompts, base rows in between: one step.
    batch = [(prompts[(i + j) % len(prompts)], use) for j in range(2) for i, use in enumerate(uses)]
    report(f"one step of {len(batch)} mixed rows, and each row alone")
    mixed = engine.logits(batch)
    errors: dict[str, float] = {}
    same_alone = True
    for row, (prompt, use) in enumerate(batch):
        expected = oracle.first_logits(prompt, use)
        alone = engine.logits([(prompt, use)])[0]
        same_alone &= bool((alone == mixed[row]).all())
        error = float(np.abs(mixed[row] - expected).max() / np.abs(expected).max())
        errors[use or "base"] = max(error, errors.get(use or "base", 0.0))
    base_rows = [row for row, (_, use) in enumerate(batch) if use is None]
    plain = stock.logits([(batch[row][0], None) for row in base_rows])
    bit_equal = bool((mixed[base_rows] == plain).all())

    report(f"{_GREEDY_TOKENS} greedy tokens of each")
    sampling = SamplingParams(max_tokens=_GREEDY_TOKENS, ignore_eos=True)
    differing = [
        use or "base"
        for use in uses
        if list(engine.complete(Prompt(token_ids=prompts[0]), sampling, adapter=use).token_ids)
        != oracle.greedy(prompts[0], use, _GREEDY_TOKENS)
    ]
    worst = max(errors.values())
    return Measurement(
        value=worst,
        baseline=0.0,
        holds=worst <= _GOAL and not differing and bit_equal and same_alone,
        details={
            "error by adapter": {name: float(f"{error:.2e}") for name, error in errors.items()},
            "greedy tokens differ for": differing or "none",
            "base rows bit-equal to the stock library": bit_equal,
            "mixed rows bit-equal to each alone": same_alone,
        },
    )
