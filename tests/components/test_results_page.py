"""Pages with results are what the committed rows say, and what the survey names is there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import results_page
from ftckpt.config import Config
from tests.support.repository import ROOT

POINTS = results_page.survey()["point"]


def test_pages_and_charts_are_what_the_rows_say() -> None:
    pages = results_page.pages()
    assert {path.name for path in pages} >= {"RESULTS.md", "README.md"}
    differing = [path.name for path, text in pages.items() if not path.exists() or path.read_text() != text]
    assert not differing, "run python benchmarks/results_page.py"


def test_a_changed_row_changes_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "recovery-cpu-2core.json"
    before = results_page.pages()
    rows = results_page.rows_of(name)
    one = rows["tables"]["megatron/rank"][results_page.recovery.OURS]
    monkeypatch.setitem(one, "secs", 123.4)
    after = results_page.pages()
    changed = {path.name for path, text in after.items() if text != before[path]}
    assert changed == {"RESULTS.md", "README.md", "recovery-cpu-2core.svg"}


@pytest.mark.parametrize("point", POINTS, ids=lambda point: str(point["idea"])[:40])
def test_a_point_of_the_survey_names_a_test_and_settings_that_are_there(point: dict[str, str]) -> None:
    assert "def test_" in Path(ROOT, point["test"]).read_text()
    named = {word for word in re.findall(r"`(\w+)`", point["setting"])}
    assert named <= {setting.name for setting in fields(Config)}
