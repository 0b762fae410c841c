"""A rank of ``benchmarks/boundary.py``: trains a model of many small tensors, and measures ftckpt's calls."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch.distributed as dist

from benchmarks.jobs import DeepSpeedJob, MegatronJob, PlainJob, TrainingJob

_version = attrgetter("_version")
WARM_UP = 8
"""Snapshots that do not count: those with the first verifications."""
SIZE = ("--hidden", "8", "--heads", "2", "--seq", "8")
BATCH = ("--micro-batch", "1", "--global-batch", "2")


class Case(NamedTuple):
    """A framework's job with about ``pieces`` tensors on each rank."""

    framework: str
    pieces: int


class Framework(NamedTuple):
    """A job by its arguments, its tensors per layer on a rank, whether it trains on the stand-in for CUDA, and its
    settings of ftckpt."""

    build: Callable[[list[str]], TrainingJob]
    per_layer: float
    stand_in: bool = False
    settings: Mapping[str, Any] = MappingProxyType({})


def _plain(argv: list[str], wrap: str = "fsdp2") -> TrainingJob:
    return PlainJob([*argv, *BATCH, "--wrap", wrap, "--precision", "fp32"])


FRAMEWORKS = {
    "megatron": Framework(lambda argv: MegatronJob([*argv, *BATCH]), 33.0, stand_in=True),
    "deepspeed": Framework(DeepSpeedJob, 24.0, stand_in=True),
    "plain": Framework(_plain, 48.0),
    "plain, replicas": Framework(functools.partial(_plain, wrap="ddp"), 48.0),
    "plain, storage": Framework(_plain, 48.0, settings=MappingProxyType({"persist": True})),
}


class Meter:
    """The training thread's time in calls of ftckpt; of nested calls the outer one counts."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, float]] = []
        self._is_inside = False

    def wrap(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return original(*args, **kwargs)
            self._is_inside, wall, cpu = True, time.perf_counter(), time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self._is_inside = False
                self._calls.append((time.thread_time() - cpu, time.perf_counter() - wall))

        return timed

    def take(self) -> tuple[float, float]:
        """Milliseconds since the last call of this: processor time, and time."""
        calls, self._calls = self._calls, []
        return sum(cpu for cpu, _ in calls) * 1e3, sum(wall for _, wall in calls) * 1e3


def _build(case: Case) -> TrainingJob:
    warnings.filterwarnings("ignore")
    framework = FRAMEWORKS[case.framework]
    layers = max(1, round(case.pieces / framework.per_layer))
    return framework.build([*SIZE, "--layers", str(layers)])


def measure(rank: int, world_size: int, case: Case, settings: Mapping[str, Any], counted: int) -> dict[str, Any]:
    """Iterations that warm up, and ``counted`` ones: milliseconds of each in boundary, fence and vote.

    ``look_ms``: the processor time of one read of every piece's version counter, after as many iterations that do not
    count: a unit that grows with the load of the machine as the boundary does.
    """
    from ftckpt.config import Config
    from ftckpt.session.checkpointer import Checkpointer
    from ftckpt.session.snapshot_driver import SnapshotDriver

    meter = Meter()
    meter.wrap(Checkpointer, "step", "fence")
    meter.wrap(SnapshotDriver, "post_if_known")  # the vote, at one of training's phases
    job = _build(case)
    checkpointer = job.start(Config(**settings))
    described = checkpointer.training_state.describe()
    pieces = (*described.stepped, *described.volatile)
    tensors = [piece.tensor for piece in pieces]
    meter.take()
    spent, looks = [], []
    for number in range(WARM_UP + 2 * counted):
        job.train()
        looked = number >= WARM_UP and number % 2 == 0
        if looked:  # before the boundary, which brings the tensors into the caches
            begin = time.thread_time()
            [*map(_version, tensors)]
            looks.append((time.thread_time() - begin) * 1e3)
        if job.calls_step:
            checkpointer.step(job.iteration)
        if looked:
            meter.take()
        else:
            spent.append(meter.take())
    dist.barrier()
    checkpointer.close(remove=False)  # for ``resume``
    return {
        "pieces": len(pieces),
        "bytes": sum(piece.fragment.nbytes for piece in pieces),
        "cpu_ms": [cpu for cpu, _ in spent],
        "wall_ms": [wall for _, wall in spent],
        "look_ms": looks,
    }


def resume(rank: int, world_size: int, case: Case, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Milliseconds of one ``restore()`` of the snapshot that ``measure`` left, which all ranks start together."""
    from ftckpt.config import Config
    from ftckpt.session.checkpointer import Checkpointer

    restore, meter = Checkpointer.restore, Meter()
    meter.wrap(Checkpointer, "restore")
    timed = Checkpointer.restore

    def together(*args: Any, **kwargs: Any) -> Any:
        dist.barrier()
        return timed(*args, **kwargs)

    Checkpointer.restore = together  # type: ignore[method-assign]
    try:
        checkpointer = _build(case).start(Config(**settings))
    finally:
        Checkpointer.restore = restore  # type: ignore[method-assign]
    cpu, wall = meter.take()
    assert checkpointer.committed is not None, "there was nothing to restore"
    dist.barrier()
    checkpointer.close(remove=False)
    return {"cpu_ms": cpu, "wall_ms": wall}
