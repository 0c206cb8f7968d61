"""Log lines are JSON objects, whoever writes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from lorafleet.core.errors import InvalidInput
from lorafleet.core.log import configure, get_logger


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        if handler not in handlers:
            handler.close()
    root.setLevel(level)
    for handler in handlers:
        root.addHandler(handler)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_our_events_carry_their_facts(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "x.log"
    configure("registry", file=path)
    get_logger("lorafleet.test").info("adapter pushed", adapter="a", name="b", msg=1, path=path)
    (line,) = _lines(path)
    assert line["event"] == "adapter pushed"
    assert (line["adapter"], line["name"], line["msg"]) == ("a", "b", 1)
    assert (line["process"], line["level"]) == ("registry", "info")
    assert line["logger"] == "lorafleet.test"
    assert line["path"] == str(path)
    assert line["timestamp"].endswith("Z")


def test_other_libraries_lines_look_the_same(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    configure("gateway", file=path)
    logging.getLogger("grpc").warning("took %d ms", 5, extra={"peer": "x"})
    (line,) = _lines(path)
    assert (line["event"], line["level"], line["peer"]) == ("took 5 ms", "warning", "x")


def test_a_traceback_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    configure("gateway", file=path)
    log = get_logger("lorafleet.test")
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        log.exception("failed")
    log.error("failed", exc_info=KeyError("other"))
    first, second = _lines(path)
    assert "ValueError: bad" in first["exception"]
    assert "KeyError: 'other'" in second["exception"]


def test_the_level_filters_and_what_is_bound_stays(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    configure("gateway", file=path, level="warning")
    log = get_logger("lorafleet.test").bind(request="r1")
    log.info("quiet")
    with structlog.contextvars.bound_contextvars(tenant="t"):
        log.warning("loud")
    (line,) = _lines(path)
    assert (line["event"], line["request"], line["tenant"]) == ("loud", "r1", "t")


def test_configuring_again_replaces_the_file_and_appends(tmp_path: Path) -> None:
    log = get_logger("lorafleet.test")
    for name in ("a", "b", "a"):
        configure("x", file=tmp_path / name)
        log.info("event", file=name)
    assert [line["file"] for line in _lines(tmp_path / "a")] == ["a", "a"]
    assert [line["file"] for line in _lines(tmp_path / "b")] == ["b"]


def test_without_a_file_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    configure("x")
    get_logger("lorafleet.test").info("event")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["event"] == "event"


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'loud' is not known"):
        configure("x", level="loud")
