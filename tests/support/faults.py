"""Faults injected inside a training process, by plan: which rank, at which iteration, at which point.

``install`` wraps the real functions of ftckpt, and of the frameworks that this process has imported. A fault
fires once over all attempts of a job: right before it acts it creates its marker file, which tells later
attempts, and the test, that it did. No marker at the end means that nothing was tested.
"""

from __future__ import annotations

import contextlib
import functools
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
from tests.support.waiting import until

PLAN_VAR = "FTCKPT_TEST_FAULTS"
"""Environment variable that names a file with a plan, see ``dumps``."""


Action = Literal["kill", "raise", "stall", "wait"]
IterationOf = Literal["training", "snapshot", "restored", "argument"]


class FaultInjected(RuntimeError):
    """What the action ``raise`` raises."""


@dataclass(frozen=True)
class Hook:
    """A function to wrap, and when in its call a fault fires."""

    module: str
    name: str
    after: bool = False


@dataclass(frozen=True)
class Point:
    """A place where faults fire; ``iteration_of`` is what a fault's ``iteration`` is compared with."""

    hooks: tuple[Hook, ...]
    iteration_of: IterationOf
    argument: int = 0


_CHECKPOINTER, _CONTROL, _RESTART = (
    "ftckpt.session.checkpointer",
    "ftckpt.memory.control_block",
    "ftckpt.restore.restart",
)
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_OPTIMIZERS = ("ChainedOptimizer", "MixedPrecisionOptimizer", "FP32Optimizer")
_ENGINE = "deepspeed.runtime.engine"


def _steps(after: bool = False) -> tuple[Hook, ...]:
    megatron = (Hook(_OPTIMIZER, f"{kind}.step_with_ready_grads", after) for kind in _OPTIMIZERS)
    return (*megatron, Hook(_ENGINE, "DeepSpeedEngine._take_model_step", after))


# training: the iteration being computed. snapshot: the one that the newest begun snapshot is of, which is
# one less while its copies run in the background. restored: the one that was decided on, 0 for none.
POINTS: dict[str, Point] = {
    "forward": Point(
        (Hook("megatron.core.pipeline_parallel.schedules", "forward_step"), Hook(_ENGINE, "DeepSpeedEngine.forward")),
        "training",
    ),
    # Whatever place of the iteration the integration tells, in the order in which it tells them.
    "phase": Point((Hook(_CHECKPOINTER, "Checkpointer.phase"),), "training"),
    "fence": Point((Hook(_CHECKPOINTER, "Checkpointer.fence"),), "training"),
    "before_step": Point(_steps(), "training"),
    # After an optimizer has written its shard, before data-parallel ranks gather what the others wrote.
    "after_step": Point(_steps(after=True), "training"),
    "boundary": Point((Hook(_CHECKPOINTER, "Checkpointer.step"),), "argument", 1),
    "begin": Point((Hook(_CONTROL, "ControlBlock.begin", after=True),), "snapshot"),
    "copy": Point(
        (Hook("ftckpt.capture.copier", "copy_chunk"), Hook("ftckpt.capture.device_copier", "copy_chunk")), "snapshot"
    ),
    "before_seal": Point((Hook(_CONTROL, "ControlBlock.seal"),), "argument", 2),
    "after_seal": Point((Hook(_CONTROL, "ControlBlock.seal", after=True),), "argument", 2),
    "between": Point((Hook(_CHECKPOINTER, "Checkpointer.step", after=True),), "argument", 1),
    "post": Point((Hook("ftckpt.session.vote", "Agreement.post", after=True),), "snapshot"),
    "mark": Point((Hook(_CONTROL, "ControlBlock.mark_whole", after=True),), "argument", 1),
    # Before each slot that the restore voids (the leader of a node alone does), mostly behind the last byte.
    "void": Point((Hook(_CONTROL, "ControlBlock.void"),), "restored"),
    "load": Point((Hook(_RESTART, "execute"),), "restored"),
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


_originals: list[tuple[Any, str, Any]] = []


def install(faults: Iterable[Fault], rank: int, world_size: int | None = None) -> None:
    """Wrap what the plan needs in this process; ``remove`` undoes it. A second plan replaces the first.

    ``world_size`` is how many ranks a fault of rank ``all`` waits for; default: the launcher's WORLD_SIZE.
    """
    remove()
    plan = list(faults)
    size = world_size if world_size is not None else int(os.environ.get("WORLD_SIZE", "1"))
    injector = _Injector(plan, rank, size)
    hooks = [
        (name, hook)
        for name, point in POINTS.items()
        if any(fault.point == name for fault in plan)
        for hook in point.hooks
        if hook.module.partition(".")[0] in sys.modules
    ]
    for _, hook in hooks:  # all of them first: a module must not import a name that is wrapped already
        importlib.import_module(hook.module)
    _follow(injector)
    for name, hook in hooks:
        _wrap(hook.module, hook.name, functools.partial(_at_point, injector, name, hook.after))


def remove() -> None:
    """Put the original functions back."""
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)


def _wrap(module: str, dotted: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``dotted`` (``function`` or ``Class.method``) of ``module``."""
    owner: Any = importlib.import_module(module)
    *classes, name = dotted.split(".")
    for class_name in classes:
        owner = getattr(owner, class_name)
    original = getattr(owner, name)
    _originals.append((owner, name, original))
    setattr(owner, name, functools.wraps(original)(wrapper(original)))


def _at_point(injector: _Injector, name: str, after: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if after:
            result = original(*args, **kwargs)
            injector.reached(name, args)
            return result
        injector.reached(name, args)
        return original(*args, **kwargs)

    return wrapped


def _follow(injector: _Injector) -> None:
    """Keep the injector's iterations up to date; these wrappers lie inside those of the points."""

    def step(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, iteration: int) -> Any:
            try:
                return original(self, iteration)
            finally:
                injector.training = iteration + 1

        return wrapped

    def begin(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, snapshot: SnapshotId, *args: Any, **kwargs: Any) -> Any:
            injector.snapshot = snapshot.iteration
            return original(self, snapshot, *args, **kwargs)

        return wrapped

    def invalidate_newer(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, decision: Any) -> Any:
            injector.restored = decision.snapshot.iteration if decision is not None else 0
            injector.training = injector.restored + 1
            return original(self, decision)

        return wrapped

    _wrap(_CHECKPOINTER, "Checkpointer.step", step)
    _wrap("ftckpt.capture.capture", "Capture.begin", begin)
    _wrap(_RESTART, "Restart.invalidate_newer", invalidate_newer)
