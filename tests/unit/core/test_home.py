"""Where files go."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorafleet.core import home


def test_everything_is_under_the_home_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAFLEET_HOME", str(tmp_path / "lf"))
    folders = [
        getattr(home, name)() for name in vars(home) if name.endswith("_dir") and name[0] != "_"
    ]
    assert len(folders) >= 5
    assert len(set(folders)) == len(folders)
    assert all(folder.parent == tmp_path / "lf" for folder in folders)
    assert not (tmp_path / "lf").exists()


def test_without_it_the_home_is_in_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAFLEET_HOME", raising=False)
    assert home.home() == Path.home() / ".lorafleet"
    monkeypatch.setenv("LORAFLEET_HOME", "relative")
    assert home.home().is_absolute()
