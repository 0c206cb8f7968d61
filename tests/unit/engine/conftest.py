"""A running engine over `tiny4`, and adapters for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lorafleet.engine import Engine, EngineOptions
from support.adapters import ALL_LINEARS, factors, write_adapter

ADAPTERS = {
    "small": {"targets": ("q_proj", "v_proj"), "rank": 4, "seed": 1},
    "wide": {"targets": ALL_LINEARS, "rank": 16, "seed": 2},
    "odd": {"targets": ("k_proj", "up_proj", "down_proj"), "rank": 3, "seed": 3},
}


@pytest.fixture(scope="session")
def adapter_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(
            folder / name,
            factors(**made),  # type: ignore[arg-type]
            {
                "r": made["rank"],
                "use_rslora": name == "wide",
                "target_modules": list(made["targets"]),  # type: ignore[call-overload]
            },
        )
        for name, made in ADAPTERS.items()
    }


@pytest.fixture(scope="session")
def shared_engine(tiny_model: Path, adapter_dirs: dict[str, Path]) -> Iterator[Engine]:
    with Engine(tiny_model, options=EngineOptions(kv_tokens=8192, num_adapter_pages=32)) as engine:
        for name, directory in adapter_dirs.items():
            engine.upload_lora(directory, name=name)
            engine.ensure_resident(name)
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The shared engine; nothing may be lost when the test ends."""
    yield shared_engine
    shared_engine.set_lora(None)
    shared_engine.set_source(None)
    shared_engine.check()
