"""A fleet that asks for keys, from the command line: tenants, keys, splits, pins, quotas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorafleet.core.errors import Exhausted, NotFound, Unauthenticated
from lorafleet.sdk import Client, Sampling
from support.adapters import factors, write_adapter

SHORT = Sampling(max_tokens=2)

Shell = Callable[..., Any]


@pytest.fixture(scope="module")
def shell(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """`lorafleet ... --json` as the operator of a fleet with one replica."""
    environment = {**os.environ, "LORAFLEET_HOME": str(tmp_path_factory.mktemp("home"))}

    def run(*arguments: str, code: int = 0, **extra: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "lorafleet.cli", *arguments, "--json"],
            capture_output=True,
            text=True,
            env={**environment, **extra},
            timeout=180,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)

    ports = ("--port", "0", "--admin-port", "0", "--replicas", "1")
    run.address = run("up", "--detach", "--model", str(tiny_model), "--require-keys", *ports)[
        "gateway"
    ]
    try:
        yield run
    finally:
        run("down")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / str(seed), factors(rank=4, seed=seed)) for seed in (1, 2)]


def test_a_tenants_life(shell: Shell, directories: list[Path]) -> None:
    """From its creation to its revoked key, as an operator and a user of it see it."""
    shell("tenant", "create", "acme", "--requests-per-minute", "1000")
    versions = [
        shell("adapter", "push", str(directory), "--name", "acme/bot")["id"]
        for directory in directories
    ]
    admin_key = shell("key", "create", "acme", "--scope", "admin")["secret"]
    data = shell("key", "create", "acme")

    shares = [f"{versions[0]}=1", f"{versions[1]}=1"]
    own = {"LORAFLEET_KEY": admin_key}
    time.sleep(0.5)
    shell("adapter", "split", "acme/bot", "prod", *shares, **own)
    shell("adapter", "pin", "acme/bot", "prod", code=1, **own)
    shell("adapter", "pin", "acme/bot", versions[0], **own)
    history = shell("adapter", "history", "acme/bot", **own)
    assert [entry["action"] for entry in history] == ["pin", "split_alias", "push", "push"]
    shell("tenant", "list", code=1, **own)

    address = shell.address  # type: ignore[attr-defined]
    with Client(gateway=address, key=data["secret"]) as client:
        assert [model.name for model in client.list_models()] == ["base", "acme/bot"]
        served = {
            client.complete(
                "a", adapter="acme/bot@prod", sampling=SHORT, sticky_key=str(user)
            ).version
            for user in range(12)
        }
        assert served == set(versions)
        with pytest.raises(NotFound):
            client.complete("a", adapter="rival/bot", sampling=SHORT)
        shell("tenant", "quota", "acme", "--requests-per-minute", "1")
        time.sleep(0.5)
        with pytest.raises(Exhausted, match="requests per minute"):
            client.complete("a", sampling=SHORT)
        shell("key", "revoke", "acme", data["id"])
        time.sleep(1.0)
        with pytest.raises(Unauthenticated):
            client.complete("a", sampling=SHORT)
    with Client(gateway=address) as anonymous, pytest.raises(Unauthenticated):
        anonymous.complete("a", sampling=SHORT)
