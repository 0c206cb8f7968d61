"""Commands that make adapters and models as files, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from lorafleet.adapters import load_adapter
from lorafleet.cli.app import app
from lorafleet.core.errors import InvalidInput, Unsupported
from support.adapters import factors, tiny_base, write_adapter

RUNNER = CliRunner()


def test_mix_writes_a_directory_and_says_what_is_in_it(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_adapter(tmp_path / f"a{seed}", factors(seed=seed))
    arguments = ["adapter", "mix", f"{tmp_path}/a1=0.7", f"{tmp_path}/a2=-1"]
    result = RUNNER.invoke(app, [*arguments, "--out", f"{tmp_path}/mixed", "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said == {"directory": f"{tmp_path}/mixed", "modules": 8, "ranks": [8]}
    assert json.loads((tmp_path / "mixed" / "adapter_config.json").read_text())["r"] == 8


def test_merge_writes_a_model_that_the_compiler_reads(tmp_path: Path, tiny_source: Path) -> None:
    write_adapter(tmp_path / "a")
    arguments = ["merge", str(tiny_source), "--adapter", f"{tmp_path}/a=0.5"]
    result = RUNNER.invoke(app, [*arguments, "--out", f"{tmp_path}/merged", "--dtype", "float16"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "merged" / "config.json").is_file()
    assert "lorafleet compile" in result.stdout


def test_convert_goes_to_gguf_and_back_and_reads_pickles_only_when_told(
    tmp_path: Path, tiny_source: Path
) -> None:
    torch = pytest.importorskip("torch")
    write_adapter(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    tensors = {name: torch.tensor(value) for name, value in factors().items()}
    torch.save(tensors, tmp_path / "a" / "adapter_model.bin")
    base = ["--model", str(tiny_source)]

    def convert(source: str, target: str, *options: str) -> Result:
        paths = [f"{tmp_path}/{source}", "--out", f"{tmp_path}/{target}"]
        return RUNNER.invoke(app, ["adapter", "convert", *paths, *base, *options])

    assert isinstance(convert("a", "b.gguf").exception, Unsupported)
    assert convert("a", "b.gguf", "--allow-pickle").exit_code == 0
    assert convert("b.gguf", "c").exit_code == 0
    write_adapter(tmp_path / "plain")
    before, after = (load_adapter(tmp_path / name, tiny_base()) for name in ("plain", "c"))
    for site in tiny_base().sites:
        np.testing.assert_allclose(after.delta(site.name), before.delta(site.name), atol=1e-5)


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["adapter", "mix", "a=much", "--out", f"{tmp_path}/mixed"])
    assert isinstance(result.exception, InvalidInput)
    assert "a=much" in result.exception.message


@pytest.mark.parametrize("command", [["adapter", "mix"], ["adapter", "convert"], ["merge"]])
def test_help_teaches_with_an_example(command: list[str]) -> None:
    assert "Example" in RUNNER.invoke(app, [*command, "--help"]).output
