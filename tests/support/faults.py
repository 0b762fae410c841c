"""Faults injected inside a training process, by plan: which rank, at which iteration, at which point.

``install`` wraps the real functions of ftckpt, and of the frameworks that this process has imported. A fault fires
once over all attempts of a job: right before it acts it creates its marker file, which later attempts and the test
read. No marker at the end means that nothing was tested.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ftckpt.model.snapshot import SnapshotId
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
    """``ordinal`` counts the calls at ``point`` that belong to ``iteration``, from 0, in each process.

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
        """The file that marks that the fault fired in ``rank``; it has process id, time and iteration."""
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
