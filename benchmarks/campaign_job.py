"""What a rank of the fault campaign trains: state that is a pure function of rank and iteration, so that any instant
of it can be checked without another run."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ftckpt.config import Config
from ftckpt.errors import UnsupportedError
from ftckpt.group import Group
from ftckpt.job.checkpointer import Checkpointer
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece
from ftckpt.store.outcome import LauncherRun, launcher_run
from tests.support.mounting import move_into_a_container

SHARED, PRIVATE, SMALL = 60_000, 50_000, 100
"""Elements of what all ranks hold alike, of what each holds alone, and of a tensor that changes anywhere."""

# Long enough for an SMP to check and cover some snapshots on a few cores, not all of them.
_ITERATION_SECS = 0.03


@dataclass(frozen=True)
class Plan:
    """One attempt: ``nodes[rank]`` names nodes; it trains ``iterations`` from where it starts, or until killed, and
    on until all ranks know of as many snapshots that have come to be ``protected``.

    ``progress`` gets a file ``rank{R}`` once its rank has trained an iteration. Rank ``stray`` is on a machine of its
    own that has its node's name. Rank ``crashing`` is aborted once it has closed; how it ended is in ``ended{R}``.
    """

    settings: Mapping[str, Any]
    nodes: Sequence[str]
    iterations: int
    progress: Path
    stray: int | None = None
    crashing: int | None = None
    protected: int = 0


@dataclass(frozen=True)
class Ended:
    """The iteration that was restored (None: from the beginning), and tensors that were not as they must be.

    ``finished``: an attempt before this one had ended the job, and nothing was trained.
    """

    start: int | None
    wrong: tuple[str, ...]
    finished: bool = False


class KnownState:
    """Tensors and objects whose every bit follows from rank and iteration."""

    reshapes = False

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self.iteration = 0
        self.shared, self.private = torch.zeros(SHARED), torch.zeros(PRIVATE)
        self.small = torch.zeros(SMALL, dtype=torch.int64)
        self.weight = torch.zeros(SHARED, dtype=torch.bfloat16)
        whole = Fragment.whole("master/shared", "F32", (SHARED,), Box((0,), (SHARED,)))
        weight = Fragment.whole("weight/shared", "BF16", (SHARED,), Box((0,), (SHARED,)))
        own = Fragment.whole("master/own", "F32", (world_size, PRIVATE), Box((rank, 0), (1, PRIVATE)))
        small = Fragment.whole("small", "I64", (SMALL,), Box((0,), (SMALL,)))
        stepped = (Piece(own, self.private), Piece(weight, self.weight, self.shared), Piece(whole, self.shared))
        self._described = Description(stepped, (Piece(small, self.small),))
        self.advance(0)

    def describe(self) -> Description:
        """See TrainingState."""
        return self._described

    def save_objects(self) -> dict[str, Any]:
        """See TrainingState."""
        return {"iteration": self.iteration, "note": f"rank {self._rank} at {self.iteration}"}

    def load_objects(self, objects: Any) -> None:
        """See TrainingState."""
        self.iteration = objects["iteration"]
        assert objects["note"] == f"rank {self._rank} at {self.iteration}"

    def load_reshaped(self, objects: Any, iteration: int) -> None:
        """See TrainingState."""
        raise UnsupportedError("this job keeps its layout")

    def finish_load(self) -> None:
        """See TrainingState."""

    def advance(self, iteration: int) -> None:
        """What optimizer and script do in an iteration."""
        self.iteration = iteration
        for tensor, expected in zip(self._tensors(), self._expected(iteration), strict=True):
            tensor.copy_(expected)

    def wrong(self, iteration: int) -> tuple[str, ...]:
        """Names of tensors that are not, bit for bit, those of ``iteration``."""
        names = ("private", "shared", "weight", "small")
        pairs = zip(names, self._tensors(), self._expected(iteration), strict=True)
        bad = [name for name, actual, expected in pairs if not torch.equal(actual, expected)]
        return (*bad, *(["objects"] if self.iteration != iteration else []))

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.private, self.shared, self.weight, self.small

    def _expected(self, iteration: int) -> tuple[torch.Tensor, ...]:
        private, shared = _values(PRIVATE, 31 * self._rank + iteration), _values(SHARED, 7919 + iteration)
        small = torch.arange(SMALL) * (self._rank + 1) + iteration
        return private, shared, shared.to(torch.bfloat16), small


def _values(count: int, salt: int) -> torch.Tensor:
    # Below 2**24 a float32 has every integer: bits follow from rank and iteration alone. 65521 is the largest prime
    # below 2**16.
    return ((torch.arange(count) * 48271 + salt * 69621) % 65521).to(torch.float32)


def train(rank: int, world_size: int, plan: Plan) -> Ended:
    """Restore, check every bit, train, end well."""
    logging.getLogger("ftckpt").setLevel(logging.CRITICAL)  # what happens here is meant to happen
    node = plan.nodes[rank]
    os.environ["FTCKPT_NODE"] = node  # of which launcher runs are told apart
    tempfile.tempdir = None  # drawn anew from this attempt's environment
    if rank == plan.stray:
        move_into_a_container(Path(plan.settings["arena"]), shares_memory=False)
    run = launcher_run(os.environ)
    if run.read().code == 0:
        return Ended(None, (), finished=True)
    members = tuple(RankPlace({"dp": index}, plan.nodes[index]) for index in range(world_size))
    state = KnownState(rank, world_size)
    config = Config(enabled=True, node=node, **plan.settings)
    topology = Topology(rank, members, {"dp": world_size})
    # One rank of those that a launcher started on a machine speaks for all of them.
    speaker = run if plan.nodes.index(node) == rank else LauncherRun("")
    checkpointer = Checkpointer(config, state, topology, group=Group(config.start_timeout_secs), run=speaker)
    start = checkpointer.restore()
    wrong = state.wrong(start or 0)
    iteration, fewest, protected = start or 0, torch.zeros(1, dtype=torch.int64), set[SnapshotId]()
    last = iteration + plan.iterations
    while iteration < last or int(fewest) < plan.protected:
        iteration += 1
        checkpointer.phase("forward")
        time.sleep(_ITERATION_SECS)
        checkpointer.fence()
        protected |= {checkpointer.protected} - {None}
        fewest.fill_(len(protected))
        dist.all_reduce(fewest, dist.ReduceOp.MIN)  # as gradients are: all ranks end in the same iteration
        state.advance(iteration)
        checkpointer.step(iteration)
        (plan.progress / f"rank{rank}").write_text(str(iteration))
    checkpointer.close()
    if rank == plan.crashing:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        (plan.progress / f"ended{rank}").write_text(json.dumps([start, wrong]))
        faulthandler.disable()  # of a crash that is meant to happen nobody needs the stacks
        os.abort()
    return Ended(start, wrong)
