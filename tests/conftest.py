"""Fixtures of all tests: the path of scripts, and a job that must leave nothing behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from ftckpt import errors
from tests.support import constants
from tests.support.mounting import in_memory

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "launch")]

# No deadline for one example: machines that run tests are busy. ``launch/test.sh --all`` takes "longer"; for
# "thorough" give ``--hypothesis-profile thorough``.
for profile, num_examples in (("usual", 60), ("longer", 200), ("thorough", 5000)):
    hypothesis.settings.register_profile(profile, max_examples=num_examples, deadline=None, print_blob=True)
hypothesis.settings.load_profile("usual")

# Iterations of tests take milliseconds, and most tests count their snapshots: none is skipped because copies have had
# no core yet, neither here nor in the processes that tests start.
os.environ[constants.VARIABLE] = constants.PATIENT
constants.from_environment()


@pytest.fixture(autouse=True)
def settings_as_in_python() -> Iterator[None]:
    """Integrations and commands set for their process how users write settings; a test may be several of them."""
    yield
    errors._writing.clear()


@pytest.fixture
def as_flags() -> None:
    """Texts name settings as those who give flags write them."""
    errors.settings_are_written(errors.SettingSyntax.FLAG)


@pytest.fixture
def arena_root() -> Iterator[Path]:
    """A directory of its own on a tmpfs."""
    with in_memory() as root:
        yield root


@pytest.fixture(scope="module")
def module_root() -> Iterator[Path]:
    """A directory on a tmpfs that the tests of a module share."""
    with in_memory() as root:
        yield root


@pytest.fixture
def settings(arena_root: Path, tmp_path: Path) -> dict[str, object]:
    """Configuration fields for one job; events go to ``tmp_path/events``."""
    folders = {"arena": str(arena_root), "events": str(tmp_path / "events")}
    # Iterations of tests are so short that the fence of a loaded machine exceeds any share of them.
    each = {"interval": 1, "overhead_budget": 0.0}
    return {"job": "test", "start_timeout_secs": 60.0, **each, **folders}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With -v (pyproject.toml has -q), what passed of conformance, a row for each configuration."""
    table: dict[str, dict[str, str]] = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            _, _, case = report.nodeid.partition("::test_conformance[")
            if case:
                row, _, check = case.removesuffix("]").rpartition("-")
                table.setdefault(row, {})[check] = outcome
    if not table or terminalreporter.verbosity < 0:
        return
    checks = list(dict.fromkeys(check for row in table.values() for check in row))
    terminalreporter.section("conformance")
    terminalreporter.write_line(" " * 24 + "  ".join(checks))
    for name, row in table.items():
        cells = (row.get(check, "").ljust(len(check)) for check in checks)
        terminalreporter.write_line(name.ljust(24) + "  ".join(cells))
