"""A rank of the fault campaign: its state is a pure function of rank and iteration, so that any instant of it can be
verified without another run."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ftckpt.capture import sample
from ftckpt.config import Config
from ftckpt.errors import UnsupportedError
from ftckpt.group import Group
from ftckpt.memory.launch_record import LauncherRun, launcher_run
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece
from ftckpt.session.checkpointer import Checkpointer
from tests.support.mounting import move_into_a_container

SHARED, PRIVATE, SMALL = 60_000, 50_000, 100
"""Elements of what all ranks hold alike, of what each holds alone, and of a tensor that changes anywhere."""

SAMPLE_BYTES = 1 << 16
"""The size of a sample, so that the largest replica set here has more than one position."""
POSITIONS = -(-4 * SHARED // SAMPLE_BYTES)

# Long enough for an SMP to check and cover some snapshots on a few cores, not all of them.
_ITERATION_SECS = 0.03


@dataclass(frozen=True)
class Trouble:
    """A fault that training itself meets, in an iteration of an attempt; a ``stall`` comes from outside.

    ``drift``: replicas differ, in an element of ``rank`` (``flip``), in one of its weights (``weight``), or on all
    ranks in one more with each iteration (``slow``). ``back``: ``step`` gets smaller numbers, of another history.
    ``fork``: ``rank`` forks a child; ``how`` it uses and drops what it has, and ends.
    """

    kind: str
    iteration: int
    rank: int
    how: str = ""

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank} at {self.iteration}{self.how and f' ({self.how})'}"


NO_TROUBLE = Trouble("", 0, 0)
HOW = {
    "drift": ("flip", "weight", "slow"),
    "fork": ("use, leave", "use, exit", "drop, exit", "use, stay", "drop, stay"),
}


@dataclass(frozen=True)
class Plan:
    """One attempt: ``nodes[rank]`` names nodes; it trains ``iterations`` from where it starts, or until killed, and
    on until all ranks know of as many snapshots that have come to be ``protected``.

    ``progress`` gets a file ``rank{R}`` once its rank has trained an iteration. Rank ``stray`` is on a machine of its
    own that has its node's name. Rank ``crashing`` is aborted once it has closed; how it ended is in ``ended{R}``.
    ``mixes``: what is restored may mix what ranks held.
    """

    settings: Mapping[str, Any]
    nodes: Sequence[str]
    iterations: int
    progress: Path
    stray: int | None = None
    crashing: int | None = None
    protected: int = 0
    trouble: Trouble = NO_TROUBLE
    mixes: bool = False


@dataclass(frozen=True)
class Ended:
    """The iteration that was restored (None: from the beginning), and tensors that were not as they must be.

    ``finished``: an attempt before this one had ended the job, and nothing was trained.
    """

    start: int | None
    wrong: tuple[str, ...]
    finished: bool = False


class KnownState:
    """Tensors and objects whose every bit follows from rank and iteration, and from how replicas drift."""

    reshapes = False

    def __init__(self, rank: int, world_size: int, drift: Trouble = NO_TROUBLE) -> None:
        self.rank, self._world_size, self._drift = rank, world_size, drift
        self.iteration = 0
        self.history = 0
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
        return {"iteration": self.iteration, "note": f"rank {self.rank} at {self.iteration}"}

    def load_objects(self, objects: Any) -> None:
        """See TrainingState."""
        self.iteration = objects["iteration"]
        assert objects["note"] == f"rank {self.rank} at {self.iteration}"

    def check_objects(self, objects: Any, is_reshaped: bool) -> None:
        """See TrainingState."""

    def load_reshaped(self, objects: Any, iteration: int) -> None:
        """See TrainingState."""
        raise UnsupportedError("this job keeps its layout")

    def finish_load(self) -> None:
        """See TrainingState."""

    def advance(self, iteration: int) -> None:
        """The effect of optimizer and script in an iteration."""
        self.iteration = iteration
        for tensor, expected in zip(self._tensors(), self._expected(iteration, self.rank), strict=True):
            tensor.copy_(expected)

    def wrong(self, iteration: int, mixes: bool = False) -> tuple[str, ...]:
        """Names of tensors that are not, bit for bit, those of ``iteration``; where this ``mixes`` each element may
        be that of another rank."""
        names = ("private", "shared", "weight", "small")
        held = [self._expected(iteration, rank) for rank in range(self._world_size)]
        bad = []
        for index, (name, actual) in enumerate(zip(names, self._tensors(), strict=True)):
            may_mix = mixes and name in ("shared", "weight")
            known = [one[index] for one in held] if may_mix else [held[self.rank][index]]
            if not torch.stack([actual == one for one in known]).any(0).all():
                bad.append(name)
        return (*bad, *(["objects"] if self.iteration != iteration else []))

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.private, self.shared, self.weight, self.small

    def _expected(self, iteration: int, rank: int) -> tuple[torch.Tensor, ...]:
        salt = iteration + 500_009 * self.history
        private, shared = _values(PRIVATE, 31 * rank + salt), _values(SHARED, 7919 + salt)
        small = torch.arange(SMALL) * (rank + 1) + salt
        drift, weight = self._drift, shared.to(torch.bfloat16)
        if drift.kind == "drift" and iteration >= drift.iteration and (rank == drift.rank or drift.how == "slow"):
            steps = torch.arange(iteration - drift.iteration + 1 if drift.how == "slow" else 1)
            spots = (104_729 * drift.iteration + 7919 * steps) % SHARED
            if drift.how == "weight":
                weight.view(torch.int16)[spots] ^= 1
            else:
                shared.view(torch.int32)[spots] ^= rank + 1
                weight = shared.to(torch.bfloat16)
        return private, shared, weight, small


def _values(count: int, salt: int) -> torch.Tensor:
    # Below 2**24 a float32 has every integer: bits follow from rank and iteration alone. 65521 is the largest prime
    # below 2**16.
    return ((torch.arange(count) * 48271 + salt * 69621) % 65521).to(torch.float32)


def train(rank: int, world_size: int, plan: Plan) -> Ended:
    """Restore, check every bit, train, end well."""
    logging.getLogger("ftckpt").setLevel(logging.CRITICAL)  # what happens here is meant to happen
    node = plan.nodes[rank]
    os.environ["FTCKPT_NODE"] = node  # it distinguishes launcher runs
    tempfile.tempdir = None  # read again from this attempt's environment
    if rank == plan.stray:
        move_into_a_container(Path(plan.settings["arena"]), shares_memory=False)
    run = launcher_run(os.environ)
    if run.read().code == 0:
        return Ended(None, (), finished=True)
    members = tuple(RankPlace({"dp": index}, plan.nodes[index]) for index in range(world_size))
    state = KnownState(rank, world_size, plan.trouble)
    sample.SAMPLE_BYTES, sample.LOOK_BYTES = SAMPLE_BYTES, 0
    config = Config(enabled=True, node=node, **plan.settings)
    topology = Topology(rank, members, {"dp": world_size})
    # One rank of those that a launcher started on a machine speaks for all of them.
    speaker = run if plan.nodes.index(node) == rank else LauncherRun("")
    checkpointer = Checkpointer(config, state, topology, group=Group(config.start_timeout_secs), run=speaker)
    start = checkpointer.restore()
    wrong = state.wrong(start or 0, plan.mixes)
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
        _step(plan, checkpointer, state, iteration, iteration - (start or 0))
        (plan.progress / f"rank{rank}").write_text(str(iteration))
    checkpointer.close()
    if rank == plan.crashing:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        (plan.progress / f"ended{rank}").write_text(json.dumps([start, wrong]))
        faulthandler.disable()  # of a crash that is meant to happen nobody needs the stacks
        os.abort()
    return Ended(start, wrong)


def _step(plan: Plan, checkpointer: Checkpointer, state: KnownState, iteration: int, num: int) -> None:
    """Optimizer and boundary of ``iteration``, the ``num``-th of this attempt, and the trouble that comes with it."""
    trouble = plan.trouble
    if trouble.kind == "back" and num >= trouble.iteration:
        state.history, iteration = 1, iteration - (trouble.iteration + 1) // 2
    state.advance(iteration)
    checkpointer.step(iteration)
    if trouble.kind == "fork" and (num, state.rank) == (trouble.iteration, trouble.rank):
        args = trouble.how, checkpointer, state, Path(plan.settings["arena"])
        multiprocessing.get_context("fork").Process(target=_inherit, args=args).start()


def _inherit(how: str, checkpointer: Checkpointer, state: KnownState, folder: Path) -> None:
    """The actions of a forked child on its inherited state; one that stays ends when ``folder`` is removed."""
    signal.alarm(120)  # it ends, whatever it waits for
    if "use" in how:
        checkpointer.fence()
        state.advance(0)
        checkpointer.step(100_000)
        checkpointer.close()
    if "drop" in how:
        vars(checkpointer).clear()
        vars(state).clear()
        gc.collect()
    while "stay" in how and folder.exists():
        time.sleep(0.1)
    if "exit" in how:  # as a script of its own would; not further, where gloo's destructors use the parent's sockets
        atexit._run_exitfuncs()
        sys.exit()
    os._exit(0)
