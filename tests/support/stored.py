"""What lies on storage, as tests look at it."""

from __future__ import annotations

from ftckpt.persist.commit import checkpoints
from ftckpt.persist.storage import Storage


def committed(storage: Storage) -> list[int]:
    """The iterations of which there is a checkpoint under its own name, newest first."""
    return [name.iteration for name in checkpoints(storage) if not name.generation]
