"""The house's own rules, as tests: arrows point down, files fit in a head, nothing is forgotten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES, MAX_TEST_LINES = 400, 600

# Files over the budget, each with its reason.
LONGER: dict[str, str] = {
    "cpp/src/ffi/exports.cc": "the one list of what crosses the FFI",
}


def sources(folder: str, *suffixes: str) -> list[Path]:
    generated = ROOT / "cluster" / "lorafleet" / "v1"
    return [
        path
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in suffixes and generated not in path.parents
    ]


def test_imports_point_down() -> None:
    pytest.importorskip("importlinter")
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run([sys.executable, "-c", lint], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("folder", ["cluster", "kernels", "cpp"])
def test_files_fit_in_a_head(folder: str) -> None:
    limit = {True: MAX_TEST_LINES, False: MAX_LINES}
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources(folder, ".py", ".cc", ".h")
        if (lines := len(path.read_text().splitlines())) > limit["tests" in path.parts]
    }
    assert set(long) <= set(LONGER), long


def test_test_files_fit_in_a_head() -> None:
    long = {
        path.name: lines
        for path in sources("tests", ".py")
        if (lines := len(path.read_text().splitlines())) > MAX_TEST_LINES
    }
    assert not long


def test_every_package_has_tests() -> None:
    packages = {path.parent.name for path in (ROOT / "cluster/lorafleet").glob("*/__init__.py")}
    tested = {path.name for path in (ROOT / "tests/unit").iterdir()}
    # Whole processes are tested whole, in tests/integration.
    assert packages - {"v1", "bench", "fleet", "cli"} <= tested
