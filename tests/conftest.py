"""What all tests share: a home of their own, and `tiny4` compiled once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.tiny import write_tiny

os.environ.setdefault("TVM_NUM_THREADS", "2")


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny4` as a HuggingFace directory."""
    return write_tiny(tmp_path_factory.mktemp("tiny4") / "tiny4")


@pytest.fixture(scope="session")
def tiny_model(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny4` compiled with LoRA."""
    from lorafleet.compiler import compile_model

    out = tmp_path_factory.mktemp("models") / "tiny4"
    compile_model(tiny_source, out)
    return out


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A LORAFLEET_HOME of the test's own."""
    monkeypatch.setenv("LORAFLEET_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
