"""What a checkpointer does with the decisions of its state."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.config import Config
from ftckpt.job.agreement import AgreementError
from ftckpt.job.checkpointer import Checkpointer
from ftckpt.job.session import Guard, OldArenaRemoval, RankState, TargetMarks, TurnOff
from ftckpt.model.snapshot import SnapshotId

LINEAGE = b"l" * 16


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


class Lessened:
    """Protection whose last mode goes when the arenas are arranged, as where no replica set spans nodes any more."""

    def __init__(self) -> None:
        self.on = True
        self.marks: list[TargetMarks] = []

    def survey(self, arena: object, restored: SnapshotId | None) -> tuple[SnapshotId | None, SnapshotId | None]:
        return SnapshotId(LINEAGE, 4), restored

    def arrange(self, arena: object, node_dir: Path) -> None:
        self.on = False

    def mark(self, marks: TargetMarks) -> None:
        self.marks.append(marks)


@pytest.mark.parametrize("anew", [False, True], ids=["at start", "while training"])
def test_what_no_mode_guards_any_more_is_not_called_protected(anew: bool) -> None:
    protection = Lessened()
    checkpointer = Checkpointer.__new__(Checkpointer)
    checkpointer._state = RankState(Config(), protects=True)
    checkpointer._protection, checkpointer._protects = protection, True  # type: ignore[assignment]
    checkpointer._shard = SimpleNamespace(capture=SimpleNamespace(arena=object()))  # type: ignore[assignment]
    checkpointer._arenas = SimpleNamespace(path=Path())  # type: ignore[assignment]
    if anew:
        checkpointer._state.take_over(SnapshotId(LINEAGE, 4), SnapshotId(LINEAGE, 5))
        checkpointer._protect_anew()
    else:
        checkpointer._begin(LINEAGE, SnapshotId(LINEAGE, 5))
    assert protection.marks == [TargetMarks(None, None)], "nor does a mark of an earlier attempt stay in the arena"
    assert checkpointer.protected is None and not checkpointer._state.targets.interval


def test_a_rank_that_has_turned_off_gives_signs_of_life() -> None:
    """It trains; ``--ftckpt-on-hang abort`` must not end it."""
    beats: list[str] = []
    checkpointer = Checkpointer.__new__(Checkpointer)
    checkpointer._state = RankState(Config())
    checkpointer._closed, checkpointer._boundary = False, 2
    checkpointer._pacer = SimpleNamespace()  # type: ignore[assignment]
    checkpointer._protection = SimpleNamespace(beat=lambda _, kind: beats.append(kind))  # type: ignore[assignment]
    checkpointer._state.turn_off("why")
    checkpointer.fence()
    checkpointer.step(3)
    assert beats == ["fence", "start"]


def test_a_rank_that_turns_off_in_the_fence_comes_to_nothing_collective() -> None:
    """The others have done so at a boundary before: it would wait for them in a proof until the group's deadline."""
    entered: list[str] = []

    def unreachable(round_: object) -> None:
        raise AgreementError("a rank has gone")

    checkpointer = Checkpointer.__new__(Checkpointer)
    checkpointer.config = Config(error_limit=1)
    checkpointer._state = state = RankState(checkpointer.config)
    checkpointer._closed, checkpointer._shard = False, None
    checkpointer._pacer = SimpleNamespace(
        stretch=1, enter=lambda kind: None, boundary=lambda: entered.append("pacer")
    )  # type: ignore[assignment]
    checkpointer._protection = SimpleNamespace(beat=lambda *_: None, observe=lambda target: Guard())  # type: ignore[assignment]
    checkpointer._agreement = SimpleNamespace(post=unreachable)  # type: ignore[assignment]
    checkpointer.events = SimpleNamespace(emit=lambda event, **fields: entered.append(event))  # type: ignore[assignment]
    checkpointer._snapshot = lambda iteration, begin: entered.append("snapshot")  # type: ignore[method-assign]
    state.begin(LINEAGE, None, 0.0)
    state.boundary(1)
    state.learn([], 0.0)
    assert state.owes_round
    checkpointer.step(2)
    assert checkpointer.off and entered == ["snapshot_error", "turned_off", "fence"]
