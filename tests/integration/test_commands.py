"""The command line against a running fleet, as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.adapters import write_adapter


class Shell:
    """Runs `lorafleet` with a home of its own."""

    def __init__(self, home: Path) -> None:
        self.environment = {**os.environ, "LORAFLEET_HOME": str(home), "COLUMNS": "200"}

    def __call__(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "lorafleet.cli", *arguments],
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 or "--json" in arguments else done.stderr

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code))


@pytest.fixture(scope="module")
def shell(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("home"))
    ports = ("--port", "0", "--admin-port", "0")
    output = shell("up", "--detach", "--model", str(tiny_model), "--replicas", "1", *ports)
    assert "gateway   127.0.0.1:" in output
    try:
        yield shell
    finally:
        before = psutil.pids()
        assert shell("down") == "stopped\n"
        left = [
            process
            for process in psutil.process_iter()
            if process.pid in before and shell.environment["LORAFLEET_HOME"] in _cmdline(process)
        ]
        assert not left
        assert shell("down") == "no fleet is running\n"


def _cmdline(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_push_list_generate_status(shell: Shell, tmp_path: Path) -> None:
    pushed = shell.json("adapter", "push", str(write_adapter(tmp_path / "x")), "--name", "x")
    assert pushed["id"].startswith("sha256:")
    assert not pushed["existed"]
    assert [adapter["name"] for adapter in shell.json("adapter", "list")] == ["x"]
    assert "q_proj, v_proj" in shell("adapter", "list")
    assert pushed["id"] in shell("adapter", "show", "x")

    answer = shell.json("generate", "Hello", "--adapter", "x", "--greedy", "--max-tokens", "5")
    assert set(answer) == {
        "text", "token_ids", "finish_reason", "version", "replica", "resident", "ttft_s",
        "tokens_per_s",
    }  # fmt: skip
    assert answer["version"] == pushed["id"]
    assert len(answer["token_ids"]) == 5
    assert answer["finish_reason"] == "length"
    base = shell.json("generate", "Hello", "--greedy", "--max-tokens", "5")
    assert base["token_ids"] != answer["token_ids"]
    assert base["version"] == ""
    shell("generate", "Hello", "--chat", "--adapter", "x", "--max-tokens", "5")

    status = shell.json("status")
    assert status["num_adapters"] == 1
    assert pushed["id"] in status["replicas"][0]["resident"]
    shell("adapter", "alias", "x", "prod", pushed["id"])
    shell("adapter", "delete", "x")
    assert shell.json("adapter", "list") == []


def test_errors_are_one_line_or_json_and_an_exit_code(shell: Shell, tmp_path: Path) -> None:
    assert "typo" in shell("generate", "Hello", "--adapter", "typo", code=1)
    error = shell.json("generate", "Hello", "--adapter", "typo", code=1)["error"]
    assert error["code"] == "NOT_FOUND"
    assert "typo" in error["message"]
    missing = shell.json("adapter", "push", str(tmp_path / "none"), "--name", "x", code=1)["error"]
    assert missing["code"] == "INVALID_ARGUMENT"
    shell("generate", code=2)


def test_a_second_fleet_in_the_same_home_is_refused(shell: Shell, tiny_model: Path) -> None:
    message = shell("up", "--model", str(tiny_model), "--port", "0", "--admin-port", "0", code=1)
    assert "running already" in message


def test_help_teaches_every_command() -> None:
    shell = Shell(Path("unused"))
    assert "adapter push DIR --name NAME" in shell("--help")
    for command in ("compile", "up", "down", "status", "generate", "chat", "demo", "bench"):
        assert "Usage" in shell(command, "--help")
    for command in ("push", "list", "show", "alias", "delete", "inspect"):
        assert "Usage" in shell("adapter", command, "--help")


def test_without_a_fleet_the_remedy_is_named(tmp_path: Path) -> None:
    assert "lorafleet up" in Shell(tmp_path)("status", code=1)
