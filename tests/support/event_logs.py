"""Event logs, read and checked against the table of events."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ftckpt.events import EVENTS

COMMON = {"time", "event", "pid"}


def read_events(directory: Path, name: str = "", of: str = "rank*") -> list[dict[str, Any]]:
    """Events in the order of their times, of all processes whose file is called like ``of``; by ``name`` if given.

    A last line that is still being written is left out. An event, a field or a ``name`` that is not in the table is
    an error.
    """
    assert name in ("", *EVENTS), f"{name}: no such event"
    events = []
    for path in sorted(directory.glob(f"{of}.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                events.append(_checked(json.loads(line)))
    found = [event for event in events if name in ("", event["event"])]
    return sorted(found, key=lambda event: event["time"])


def logged(level: int = logging.INFO) -> list[str]:
    """The messages of this level or above that ftckpt logs in this process from now on, as they come."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ftckpt")
    logger.addHandler(handler)
    logger.setLevel(level)
    return lines


def _checked(event: dict[str, Any]) -> dict[str, Any]:
    fields = set(event) - COMMON - {"rank", "process"}
    assert fields == set(EVENTS[event["event"]].fields), f"{event['event']}: other fields in the table: {event}"
    return event
