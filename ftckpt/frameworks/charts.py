"""Scalars for the charts that a framework draws: what snapshots cost the rank that has them, and come to."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ftckpt.session.checkpointer import Checkpointer

log = logging.getLogger("ftckpt")

_PREFIX = "ftckpt/"


def draw(checkpointer: Checkpointer, write: Callable[[dict[str, float]], None]) -> bool:
    """Give ``write`` what ``Checkpointer.numbers`` says since the last call; whether to go on: a writer that fails is
    left alone, and training goes on."""
    try:
        write({f"{_PREFIX}{name}": value for name, value in checkpointer.numbers("charts").items()})
    except Exception as error:  # noqa: BLE001 - a disk that is full, or a service that is away
        log.warning("ftckpt: no more scalars are written: %s", error)
        return False
    return True
