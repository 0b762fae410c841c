"""Faults injected inside a training process, by plan: which rank, at which iteration, at which point; and a table of
faults: what happens, at which instant, under which protection, and what must be restored.

``install`` wraps the real functions of ftckpt, and of the frameworks that this process has imported. A fault
fires once over all attempts of a job: right before it acts it creates its marker file, which tells later
attempts, and the test, that it did. No marker at the end means that nothing was tested.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import SMP_LOCK_NAME
from ftckpt.memory.locks import holder_of
from ftckpt.memory.slots import slot_name
from ftckpt.model.snapshot import SnapshotId
from tests.support.flips import flip
from tests.support.killing import at_calls, wrap
from tests.support.waiting import until

PLAN_VAR = "FTCKPT_TEST_FAULTS"
"""Environment variable that names a file with a plan, see ``dumps``."""


Action = Literal["kill", "raise", "stall", "wait"]
IterationOf = Literal["training", "snapshot", "restored", "argument"]


class FaultInjected(RuntimeError):
    """The error of the action ``raise``."""


@dataclass(frozen=True)
class Point:
    """A place where faults fire: before or after calls of these functions, in those packages that are imported.

    ``iteration_of`` is what a fault's ``iteration`` is compared with.
    """

    functions: tuple[str, ...]
    iteration_of: IterationOf
    argument: int = 0
    after: bool = False


_CHECKPOINTER = "ftckpt.session.checkpointer:Checkpointer"
_CONTROL = "ftckpt.memory.control_block:ControlBlock"
_RESTART = "ftckpt.restore.restart"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_STEPS = (
    *(
        f"megatron.core.optimizer.optimizer:{kind}.step_with_ready_grads"
        for kind in ("ChainedOptimizer", "MixedPrecisionOptimizer", "FP32Optimizer")
    ),
    f"{_ENGINE}._take_model_step",
)

# training: the iteration being computed. snapshot: the one that the newest begun snapshot is of, which is
# one less while its copies run in the background. restored: the one that was decided on, 0 for none.
POINTS: dict[str, Point] = {
    "forward": Point(("megatron.core.pipeline_parallel.schedules:forward_step", f"{_ENGINE}.forward"), "training"),
    # Any place of the iteration, in the order in which the integration passes them.
    "phase": Point((f"{_CHECKPOINTER}.phase",), "training"),
    "fence": Point((f"{_CHECKPOINTER}.fence",), "training"),
    "before_step": Point(_STEPS, "training"),
    # After an optimizer has written its shard, before data-parallel ranks gather what the others wrote.
    "after_step": Point(_STEPS, "training", after=True),
    "boundary": Point((f"{_CHECKPOINTER}.step",), "argument", 1),
    "begin": Point((f"{_CONTROL}.begin",), "snapshot", after=True),
    "copy": Point(("ftckpt.capture.copier:copy_chunk", "ftckpt.capture.device_copier:copy_chunk"), "snapshot"),
    "before_seal": Point((f"{_CONTROL}.seal",), "argument", 2),
    "after_seal": Point((f"{_CONTROL}.seal",), "argument", 2, after=True),
    "between": Point((f"{_CHECKPOINTER}.step",), "argument", 1, after=True),
    "post": Point(("ftckpt.session.vote:Agreement.post",), "snapshot", after=True),
    "mark": Point((f"{_CONTROL}.mark_whole",), "argument", 1, after=True),
    "load": Point((f"{_RESTART}:execute",), "restored"),
}


@dataclass(frozen=True)
class Fault:
    """``ordinal`` counts the calls at ``point`` that belong to ``iteration``, from 0, in each process anew.

    A ``kill`` of rank ``all`` waits until every rank has come, at most ``secs``: then all die at once. The
    point must be one that each rank reaches while the others stand still at it. ``stall`` sleeps ``secs``; ``wait``
    does so until the test calls ``go_on``, at most ``secs``.
    """

    rank: int | Literal["all"]
    iteration: int
    point: str
    marker: Path
    action: Action
    ordinal: int = 0
    secs: float = 0.0

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise ValueError(f"point {self.point!r} is not one of {', '.join(POINTS)}")
        if self.action not in get_args(Action):
            raise ValueError(f"action {self.action!r} is not one of {', '.join(get_args(Action))}")

    def marker_of(self, rank: int) -> Path:
        """The file that says that the fault fired in ``rank``; it holds process id, time and iteration."""
        return self.marker.with_name(f"{self.marker.name}.rank{rank}")

    @property
    def over(self) -> Path:
        """The file that ends a ``wait``."""
        return self.marker.with_name(f"{self.marker.name}.over")

    def go_on(self) -> None:
        """End the ``wait`` of all ranks."""
        self.over.touch()

    def fired(self, rank: int) -> bool:
        """Whether the fault fired in ``rank``, in this attempt or in an earlier one."""
        return self.marker_of(rank).exists()


def dumps(faults: Iterable[Fault]) -> str:
    """A plan as JSON."""
    return json.dumps([{**asdict(fault), "marker": str(fault.marker)} for fault in faults], indent=1)


def loads(text: str) -> list[Fault]:
    """Inverse of ``dumps``."""
    return [Fault(**{**value, "marker": Path(value["marker"])}) for value in json.loads(text)]


def plan_from_env(env: Mapping[str, str]) -> list[Fault]:
    """The plan in the file that FTCKPT_TEST_FAULTS names; empty where it names none."""
    name = env.get(PLAN_VAR, "")
    return loads(Path(name).read_text()) if name else []


class _Injector:
    """Knows where the process stands, and fires what is due."""

    def __init__(self, faults: Iterable[Fault], rank: int, world_size: int) -> None:
        self._faults = [fault for fault in faults if fault.rank in (rank, "all")]
        self._rank = rank
        self._world_size = world_size
        self._counts: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()  # copies and seals come from the copier's thread
        self.training = 1
        self.snapshot = 0
        self.restored = 0

    def reached(self, name: str, args: tuple[Any, ...]) -> None:
        """A call at point ``name`` with these positional arguments, ``self`` among them."""
        point = POINTS[name]
        if point.iteration_of == "argument":
            argument = args[point.argument]
            iteration = (
                argument.iteration if isinstance(argument, SnapshotId) else int(-1 if argument is None else argument)
            )
        else:
            iteration = int(getattr(self, point.iteration_of))
        with self._lock:
            counted, count = self._counts.get(name, (iteration, 0))
            ordinal = count if counted == iteration else 0
            self._counts[name] = (iteration, ordinal + 1)
        for fault in self._faults:
            if (fault.point, fault.iteration, fault.ordinal) == (name, iteration, ordinal):
                self._fire(fault)

    def stepped(self, _checkpointer: Any, iteration: int) -> None:
        self.training = iteration + 1

    def begins(self, _capture: Any, snapshot: SnapshotId, *_: Any) -> None:
        self.snapshot = snapshot.iteration

    def decided(self, _restart: Any, decision: Any) -> None:
        self.restored = decision.snapshot.iteration if decision is not None else 0
        self.training = self.restored + 1

    def _fire(self, fault: Fault) -> None:
        try:
            with open(fault.marker_of(self._rank), "x") as marker:
                json.dump({"pid": os.getpid(), "time": time.time(), "iteration": fault.iteration}, marker)
        except FileExistsError:
            return
        if fault.action == "kill":
            self._meet(fault)
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "raise":
            raise FaultInjected(f"rank {self._rank}: {fault.point} of iteration {fault.iteration}")
        elif fault.action == "wait":
            until(fault.over.exists, secs=fault.secs)
        else:
            time.sleep(fault.secs)

    def _meet(self, fault: Fault) -> None:
        if fault.rank != "all":
            return
        markers = [fault.marker_of(rank) for rank in range(self._world_size)]
        with contextlib.suppress(AssertionError):  # those that came die all the same
            until(lambda: all(marker.exists() for marker in markers), secs=fault.secs)


_undo: list[Callable[[], None]] = []


def install(faults: Iterable[Fault], rank: int, world_size: int | None = None) -> None:
    """Wrap what the plan needs in this process; a second plan replaces the first.

    ``world_size`` is how many ranks a fault of rank ``all`` waits for; default: the launcher's WORLD_SIZE.
    """
    while _undo:
        _undo.pop()()
    plan = list(faults)
    size = world_size if world_size is not None else int(os.environ.get("WORLD_SIZE", "1"))
    injector = _Injector(plan, rank, size)
    wanted = {fault.point for fault in plan}
    places = [
        (name, place, point.after)
        for name, point in POINTS.items()
        for place in point.functions
        if name in wanted and place.partition(".")[0] in sys.modules
    ]
    for _, place, _ in places:  # all of them first: a module must not import a name that is wrapped already
        importlib.import_module(place.partition(":")[0])
    # These lie inside the wrappers of the points.
    _undo.append(wrap(f"{_CHECKPOINTER}.step", at_calls(injector.stepped, after=True)))
    _undo.append(wrap("ftckpt.capture.capture:Capture.begin", at_calls(injector.begins)))
    _undo.append(wrap(f"{_RESTART}:Restart.invalidate_newer", at_calls(injector.decided)))
    for name, place, after in places:
        _undo.append(wrap(place, at_calls(lambda *args, name=name: injector.reached(name, args), after)))


KILLS: dict[str, tuple[int, ...]] = {
    "forward": (-2, -1),
    "fence": (-2, -1),
    "before_step": (-1,),
    "after_step": (-1,),
    "boundary": (-1,),
    "begin": (-1,),
    "copy": (-1,),
    "before_seal": (-1,),
    "after_seal": (-1, 0),
    "post": (0,),
    "mark": (0,),
    "between": (-1, 0),
}
"""Instant of a SIGKILL → what may come back, counted from the iteration in which it falls. Up to the fence the copies
of the snapshot before may be under way."""

IN_EVERY_ITERATION = ("forward", "fence", "before_step", "boundary")
"""Instants that come whether an iteration has a snapshot or not: under protection one may be skipped."""

OLDER, SAME, LOST = "the snapshot before", "the same snapshot", "nothing, and the arena is named"


def _flip_in(region: str, by: int) -> Callable[[Path, int], None]:
    def damage(path: Path, slot: int) -> None:
        with closing(Arena.open(path)) as arena:
            begin = int(getattr(arena.image, region).begin)
        flip(path / slot_name(slot), begin + by)

    return damage


def _flip_padding(path: Path, slot: int) -> None:
    with closing(Arena.open(path)) as arena:
        begin = next(pad.begin for pad in arena.image.pads if pad.nbytes)
    flip(path / slot_name(slot), begin)


def _lose_node(path: Path, slot: int) -> None:
    """All of a node at once: its SMP, and the memory of its arenas, parity and packages."""
    lock = path.parent / SMP_LOCK_NAME
    pid = holder_of(lock)
    assert pid is not None, "the node's SMP outlives its trainers"
    os.kill(pid, signal.SIGKILL)
    until(lambda: holder_of(lock) is None, "its end")
    shutil.rmtree(path.parent)


@dataclass(frozen=True, slots=True)
class Protection:
    """Protection of a job of four ranks, and their nodes: at the start, and in the attempt after the damage."""

    settings: dict[str, Any]
    nodes: tuple[str, ...] = ("node",) * 4
    nodes_after: tuple[str, ...] = ("node",) * 4


PROTECTIONS = {
    "none": Protection({"protect": "none"}),
    "node": Protection({"protect": "node"}),
    "sealed peer": Protection({"protect": "peer", "encrypt": True}, ("a", "a", "b", "b"), ("a", "a", "c", "c")),
}


@dataclass(frozen=True, slots=True)
class DamageRow:
    """Damage to the newest snapshot in one rank's arena, and what comes back by which of ``PROTECTIONS``."""

    damage: Callable[[Path, int], None]
    comes_back: dict[str, str]


DAMAGES = {
    "stepped byte": DamageRow(_flip_in("stepped", 100), {"none": OLDER, "node": SAME}),
    "objects byte": DamageRow(_flip_in("objects", 40), {"none": OLDER, "node": SAME}),
    "slot truncated": DamageRow(
        lambda path, slot: os.truncate(path / slot_name(slot), 8192), {"none": OLDER, "node": SAME}
    ),
    "slot gone": DamageRow(lambda path, slot: (path / slot_name(slot)).unlink(), {"none": OLDER, "node": SAME}),
    # What follows from the manifest alone is put right without any parity.
    "header byte": DamageRow(lambda path, slot: flip(path / slot_name(slot), 2000), {"none": SAME}),
    "padding byte": DamageRow(_flip_padding, {"none": SAME}),
    "arena gone": DamageRow(lambda path, slot: shutil.rmtree(path), {"none": LOST, "node": SAME}),
    "node gone": DamageRow(_lose_node, {"sealed peer": SAME}),
    "control byte": DamageRow(lambda path, slot: flip(path / "control", 20), {"none": LOST, "node": SAME}),
}
