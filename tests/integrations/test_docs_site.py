"""The documentation site builds, and no link of a page leads nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

pytestmark = pytest.mark.slow


def packages() -> list[str]:
    """What the extra ``docs`` installs."""
    found = re.search(r"^docs = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return re.findall(r'"([^"]+)"', found[1])


def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    folder, site = tmp_path / "packages", tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *packages()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    if run.returncode:
        pytest.skip(f"mkdocs cannot be installed here: {run.stderr[-300:]}")
    env = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-f", str(ROOT / "docs/mkdocs.yml"), "-d", str(site)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "What it survives" in (site / "index.html").read_text()
    assert "init_process_group" in (site / "reference" / "index.html").read_text()
