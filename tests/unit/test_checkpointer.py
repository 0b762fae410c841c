"""What a checkpointer does with the decisions of its state."""

from __future__ import annotations

from typing import Any

import pytest

from ftckpt.job.checkpointer import Checkpointer
from ftckpt.job.session import OldArenaRemoval, TurnOff


def test_an_action_that_fails_keeps_none_from_being_done() -> None:
    done = []

    def perform(action: Any) -> None:
        if isinstance(action, OldArenaRemoval):
            raise OSError("a file was made there meanwhile")
        done.append(action)

    checkpointer = Checkpointer.__new__(Checkpointer)
    checkpointer._perform = perform  # type: ignore[method-assign]
    with pytest.raises(OSError, match="made there"):
        checkpointer._execute([OldArenaRemoval(), TurnOff("why")])
    assert done == [TurnOff("why")]
