"""A real fleet over `tiny4`: Redis, the registry, Ray with two replicas, the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lorafleet.fleet import FleetOptions, Supervisor
from lorafleet.sdk import Client
from support.adapters import ALL_LINEARS, factors, write_adapter
from support.fleet import Fleet


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(
            folder / name,
            factors(targets=ALL_LINEARS, rank=rank, seed=rank),
            {"r": rank, "target_modules": list(ALL_LINEARS)},
        )
        for name, rank in (("one", 4), ("two", 8), ("three", 16))
    }


@pytest.fixture(scope="module")
def fleet(
    tiny_model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORAFLEET_HOME", str(home))
        supervisor = Supervisor(
            FleetOptions(
                model_dir=tiny_model,
                replicas=2,
                gateway="127.0.0.1:0",
                admin="127.0.0.1:0",
                engine={"kv_tokens": 4096, "num_adapter_pages": 8},
            )
        )
        state = supervisor.start()
        try:
            with Client(gateway=state.gateway, admin=state.admin) as client:
                for name, directory in adapters.items():
                    client.push_adapter(directory, name=name)
                yield Fleet(supervisor, state, client, home)
        finally:
            supervisor.stop()
