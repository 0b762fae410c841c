"""Writes the picture and the trace of a recording."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ftckpt.timeline.model import Recording
from ftckpt.timeline.picture import page
from ftckpt.timeline.trace import trace_of

HTML_NAME = "timeline.html"
TRACE_NAME = "timeline.json"


def write_timeline(recording: Recording, directory: Path) -> tuple[Path, Path]:
    """Write ``timeline.html`` and ``timeline.json`` into ``directory``, which is made if it is not there.

    Each file is replaced whole, so that whoever opens one never sees half of it. Returns both paths.

    Raises:
        OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    html, trace = directory / HTML_NAME, directory / TRACE_NAME
    _replace(html, page(recording))
    _replace(trace, json.dumps(trace_of(recording), separators=(",", ":"), allow_nan=False) + "\n")
    return html, trace


def remove_timeline(directory: Path) -> None:
    """Delete what ``write_timeline`` wrote into ``directory``, if it is there."""
    for name in (HTML_NAME, TRACE_NAME):
        (directory / name).unlink(missing_ok=True)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # What a file says in broken UTF-16 can be read from JSON, but not be encoded.
        temporary.write_text(text, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
