"""Tests look at files of the repository alone, not at what pip or a run has left in its folders."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.repository import repository_files


@pytest.mark.parametrize("has_git", [True, False])
def test_files_that_git_ignores_are_none_of_the_repository(tmp_path: Path, has_git: bool) -> None:
    files = {".gitignore": "build/\n", "page.md": "", "new/module.py": "", "build/lib/page.md": ""}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if has_git:
        subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
        subprocess.run(["git", "-C", str(tmp_path), "add", "page.md"], check=True)
    names = {str(path.relative_to(tmp_path)) for path in repository_files(tmp_path)}
    assert names == {name for name in files if not has_git or not name.startswith("build/")}
