"""Where a client looks for the fleet, in order."""

from __future__ import annotations

import json

import pytest

from lorafleet.core.errors import Unavailable
from lorafleet.sdk import Client
from lorafleet.sdk.endpoints import find_address


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LORAFLEET_HOME", str(tmp_path))
    monkeypatch.delenv("LORAFLEET_GATEWAY", raising=False)
    monkeypatch.delenv("LORAFLEET_ADMIN", raising=False)
    (tmp_path / "run").mkdir()
    return tmp_path


def test_given_beats_environment_beats_the_fleet_on_this_machine(home, monkeypatch) -> None:
    (home / "run" / "fleet.json").write_text(json.dumps({"gateway": "a:1", "admin": "b:2"}))
    assert find_address("gateway", None) == "a:1"
    assert find_address("admin", None) == "b:2"
    monkeypatch.setenv("LORAFLEET_GATEWAY", "c:3")
    assert find_address("gateway", None) == "c:3"
    assert find_address("gateway", "d:4") == "d:4"


@pytest.mark.parametrize("content", [None, "", "[]", "{}", "not json"])
def test_without_any_the_remedy_is_told(home, content) -> None:
    if content is not None:
        (home / "run" / "fleet.json").write_text(content)
    with pytest.raises(Unavailable, match=r"lorafleet up.*LORAFLEET_ADMIN"):
        find_address("admin", None)


def test_a_client_looks_only_when_it_needs_to() -> None:
    with Client() as client, pytest.raises(Unavailable, match="LORAFLEET_GATEWAY"):
        client.generate("hi")
