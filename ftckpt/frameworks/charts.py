"""Scalars for a framework's charts: the cost and number of this rank's snapshots."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ftckpt.session.checkpointer import Checkpointer

log = logging.getLogger("ftckpt")

_PREFIX = "ftckpt/"


def draw(checkpointer: Checkpointer, write: Callable[[dict[str, float]], None]) -> bool:
    """Passes ``Checkpointer.numbers`` since the last call to ``write``; False if that failed, so do not repeat."""
    try:
        write({f"{_PREFIX}{name}": value for name, value in checkpointer.numbers("charts").items()})
    except Exception as error:  # noqa: BLE001 - a full disk, or an unreachable service
        log.warning("ftckpt: writing scalars failed, none are written from now on: %s", error)
        return False
    return True
