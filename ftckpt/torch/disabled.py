"""The checkpointer of a script that runs with ftckpt off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftckpt.errors import UnsupportedError


class DisabledCheckpointer:
    """Has the interface of ``Checkpointer``, does nothing, and is false in a condition."""

    off = True
    begun = -1
    committed = protected = persisted = None

    def __bool__(self) -> bool:
        return False

    def restore(self, *_: Any, **__: Any) -> None:
        """Restores nothing: the script starts from its own state."""

    def step(self, iteration: int) -> None:
        """Takes no snapshot."""

    def phase(self, kind: str) -> None:
        """Nothing to schedule."""

    def pause(self) -> None:
        """Nothing to pause."""

    def fence(self) -> None:
        """Nothing to wait for."""

    def numbers(self, who: str = "") -> dict[str, float]:
        """No metrics."""
        return {}

    def save_universal(self, path: Path, *_: Any, **__: Any) -> Path:
        """Raises UnsupportedError: there is no snapshot."""
        raise UnsupportedError(f"{path}: no snapshot to write, as ftckpt is off; add --ftckpt")

    def close(self, *_: Any, **__: Any) -> None:
        """Nothing to end."""
