"""The checkpointer of a script that runs with ftckpt off."""

from __future__ import annotations

from typing import Any

from ftckpt.errors import UnsupportedError


class DisabledCheckpointer:
    """Has the methods of ``Checkpointer``, does nothing, and is false in a condition."""

    off, begun, committed, protected, persisted = True, -1, None, None, None

    def __bool__(self) -> bool:
        return False

    def restore(self, *_: Any, **__: Any) -> None:
        """Do nothing, as all these."""

    step = phase = pause = fence = close = restore

    def numbers(self, who: str = "") -> dict[str, float]:
        """Return no metrics."""
        return {}

    def save_universal(self, *_: Any, **__: Any) -> None:
        """Raise UnsupportedError: a script that reads the result would fail later."""
        raise UnsupportedError("save_universal: no snapshot to write, as ftckpt is off; add --ftckpt")
