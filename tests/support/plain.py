"""A job without a framework: each rank holds one row and a weight. And a recorder that replaces a checkpointer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from ftckpt.capture import copier
from ftckpt.config import Config
from ftckpt.errors import UnsupportedError
from ftckpt.group import Group
from ftckpt.memory.arena import Arena
from ftckpt.memory.launch_record import LauncherRun
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece
from ftckpt.session.checkpointer import Checkpointer
from tests.support.constants import configured

ROW = 1024


class PlainState:
    """``row`` is this rank's own; ``master`` and the bf16 ``weight`` derived from it are replicated."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.iteration = 0
        self.failing: dict[int, Exception] = {}
        self.row = torch.zeros(ROW)
        self.master, self.weight = torch.zeros(ROW), torch.zeros(ROW, dtype=torch.bfloat16)
        own = Fragment.whole("row", "F32", (world_size, ROW), Box((rank, 0), (1, ROW)))
        master = Fragment.whole("master/w", "F32", (ROW,), Box((0,), (ROW,)))
        weight = Fragment.whole("weight/w", "BF16", (ROW,), Box((0,), (ROW,)))
        pieces = (Piece(own, self.row), Piece(weight, self.weight, self.master), Piece(master, self.master))
        self.description = Description(pieces, ())

    def describe(self) -> Description:
        return self.description

    def save_objects(self) -> dict[str, Any]:
        if self.iteration in self.failing:
            raise self.failing[self.iteration]
        return {"iteration": self.iteration}

    def load_objects(self, objects: Any) -> None:
        self.iteration = objects["iteration"]

    def check_objects(self, objects: Any, is_reshaped: bool) -> None:
        pass

    def load_reshaped(self, objects: Any, iteration: int) -> None:
        raise UnsupportedError("this job keeps its layout")

    def finish_load(self) -> None:
        pass

    def advance(self, iteration: int, value: float) -> None:
        """Write all state, as an optimizer does."""
        self.iteration = iteration
        self.row.fill_(value)
        self.master.fill_(value)
        self.weight.copy_(self.master)


def make(
    rank: int, world_size: int, settings: dict[str, Any], nodes: list[str] | None = None, launch: str = ""
) -> tuple[Checkpointer, PlainState]:
    """A checkpointer for one rank; ``nodes[rank]`` names nodes, ``launch`` the launcher run."""
    names = nodes or ["node"] * world_size
    members = tuple(RankPlace({"dp": index}, names[index]) for index in range(world_size))
    state = PlainState(rank, world_size)
    config = Config(enabled=True, node=names[rank], **configured({"protect": "none", "interval": 1, **settings}))
    group = Group(config.start_timeout_secs)
    topology = Topology(rank, members, {"dp": world_size})
    return Checkpointer(config, state, topology, group=group, run=LauncherRun(launch)), state


def iterate(checkpointer: Checkpointer, state: PlainState, iteration: int, offset: float = 0.0) -> None:
    """One iteration, up to and with the boundary."""
    checkpointer.fence()
    state.advance(iteration, iteration + offset)
    checkpointer.step(iteration)


def restarted(*args: Any, **options: Any) -> tuple[Checkpointer, PlainState]:
    """``make``, restored from what there is."""
    checkpointer, state = make(*args, **options)
    checkpointer.restore()
    return checkpointer, state


def train(checkpointer: Checkpointer, state: PlainState, iterations: Iterable[int], offset: float = 0.0) -> None:
    """One iteration after the other."""
    for iteration in iterations:
        iterate(checkpointer, state, iteration, offset)


def sealed(settings: dict[str, Any], rank: int) -> set[int]:
    """Iterations for which this rank has a sealed slot."""
    found = set()
    for path in Path(settings["arena"]).glob(f"ftckpt-*/*/dp{rank}.*"):
        with closing(Arena.open(path)) as arena:
            found |= {snapshot.iteration for snapshot in arena.snapshots()}
    return found


def before_each_copy(action: Callable[[], None]) -> None:
    """Call ``action`` on the copy thread before each chunk."""
    original = copier.copy_chunk

    def copy_chunk(*args: Any, **kwargs: Any) -> None:
        action()
        original(*args, **kwargs)

    copier.copy_chunk = copy_chunk


def die() -> None:
    """SIGKILL to this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def restored(rank: int, world_size: int, settings: dict[str, Any], nodes: list[str] | None = None) -> Any:
    """(iteration, iteration in the objects, values of the row, of the weight) after a restart."""
    checkpointer, state = make(rank, world_size, settings, nodes)
    start = checkpointer.restore()
    return start, state.iteration, state.row.unique().tolist(), state.weight.unique().tolist()


class Recorder:
    """``log`` has an entry for each call, in order; a place of the schedule by its kind."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def fence(self) -> None:
        self.log.append("fence")

    def phase(self, kind: str) -> None:
        self.log.append(kind)

    def pause(self) -> None:
        self.log.append("pause")

    def step(self, iteration: int) -> None:
        self.log.append(f"step {iteration}")

    def close(self) -> None:
        self.log.append("close")


def merged(log: Sequence[str]) -> list[str]:
    """The log with consecutive reports of one place merged."""
    return [word for index, word in enumerate(log) if index == 0 or word != log[index - 1]]
