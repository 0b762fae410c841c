"""The files of the repository, and approved outputs in tests/golden."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def repository_files(root: Path = ROOT) -> tuple[Path, ...]:
    """All that git tracks, or would add, as it is in the working tree; without git all that is there."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    found = [root / name for name in listed.stdout.split("\0") if name] or root.rglob("*")
    return tuple(sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts))


def files_in(folder: str, suffix: str = "") -> list[Path]:
    """Files below a folder of the repository."""
    return [path for path in repository_files() if path.is_relative_to(ROOT / folder) and path.name.endswith(suffix)]


FOLDER = ROOT / "tests" / "golden"
_VARYING = (
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?"), "<time>"),
    (re.compile(r"\b[\d.]+ ?([KMG]i?B)/s"), "<rate>"),
    (re.compile(r"(?<![\w.])\d+(\.\d+)? ?(ms|s)\b"), "<secs>"),
)


def is_golden(name: str, text: str, **values: object) -> None:
    """Compare ``text`` with the golden file, in which ``<key>`` stands for a value that differs between runs."""
    for key, value in values.items():
        text = text.replace(str(value), f"<{key}>")
    for pattern, mark in _VARYING:
        text = pattern.sub(mark, text)
    path = FOLDER / f"{name}.txt"
    if os.environ.get("FTCKPT_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name}: not as approved; FTCKPT_GOLDEN=1 writes it anew"
