"""Constants of ftckpt that a test sets for its process, such as deadlines that pass soon.

A test names them among the settings of its job; a script that is launched finds them in the environment.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from typing import Any

VARIABLE = "FTCKPT_TEST_CONSTANTS"
PATIENT = '{"earlier_secs": 30}'
"""A boundary waits for the snapshot before."""
PLACES = {
    "fence_secs": "ftckpt.session.deadlines.FENCE_SECS",
    "earlier_secs": "ftckpt.session.deadlines.EARLIER_SECS",
    "vote_secs": "ftckpt.session.deadlines.VOTE_SECS",
    "lock_secs": "ftckpt.session.deadlines.LOCK_SECS",
    "flush_secs": "ftckpt.persist.commit.FLUSH_SECS",
    "error_limit": "ftckpt.session.session.ERROR_LIMIT",
    "timeline_every": "ftckpt.schedule.window_scheduler.TIMELINE_EVERY",
}


def configured(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among ``settings``; the constants among them have their values from now on."""
    for name in settings.keys() & PLACES.keys():
        module, _, constant = PLACES[name].rpartition(".")
        setattr(importlib.import_module(module), constant, settings[name])
    return {name: value for name, value in settings.items() if name not in PLACES}


def from_environment() -> None:
    """For a process that a test has started."""
    configured(json.loads(os.environ.get(VARIABLE, "{}")))
