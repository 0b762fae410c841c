"""Golden files in ``tests/golden``: the whole output of a command, and the only place that holds its words.

After a change of wording ``FTCKPT_GOLDEN=1 pytest ...`` writes them anew, and the diff shows what users will read.
"""

from __future__ import annotations

import os
import re

from tests.support.repository import ROOT

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
