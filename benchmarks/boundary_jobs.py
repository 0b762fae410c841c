"""What a rank does for ``benchmarks/boundary.py``: train a model of many small tensors, and time ftckpt's calls."""

from __future__ import annotations

import functools
import importlib
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch.distributed as dist

WARM_UP = 8
"""Snapshots that do not count: the first ones, with the first proofs."""
ROOT = Path(__file__).resolve().parent.parent
SIZE = ["--hidden", "8", "--heads", "2", "--seq", "8", "--micro-batch", "1", "--global-batch", "2"]
OUTERMOST = "ftckpt.session.checkpointer:Checkpointer"
CALLS = ("step", "fence")
"""What a snapshot takes of training: the boundary, and the fence."""
ROUND = "ftckpt.session.snapshot_driver:SnapshotDriver.post_if_known"
"""The same, once per snapshot, in one of the places where training says where it is."""
PLACE = "phase"
"""What training says of where it is, as often as its schedule has places."""
PARTS: dict[str, Sequence[str]] = {
    "tensors moved": ("ftckpt.frameworks.live_tensors:LiveTensors.check",),
    "extra state": ("ftckpt.frameworks.extra_state:ExtraState.look_again",),
    "writes counted": ("ftckpt.capture.boundary:WriteCounts.read", "ftckpt.torch.state:PlainState._check_fence"),
    "generators": (
        "ftckpt.torch.state:save_generators",
        "ftckpt.megatron.state:save_rng",
        "ftckpt.deepspeed.state:save_rng",
    ),
    "states of objects": (
        "ftckpt.torch.state:PlainState.save_objects",
        "ftckpt.megatron.state:MegatronState.save_objects",
        "ftckpt.deepspeed.state:DeepSpeedState.save_objects",
    ),
    "encoding": ("ftckpt.model.objects:encode",),
    "volatile state": ("ftckpt.capture.copier:HostCopier.take",),
    "kept for the end": ("ftckpt.capture.boundary:LastBoundary.keep",),
    "slot": (
        "ftckpt.capture.capture:Capture.begin",
        "ftckpt.capture.capture:Capture.has_room",
        "ftckpt.capture.capture:Capture.writable",
    ),
    "round": ("ftckpt.session.snapshot_driver:SnapshotDriver._post",),
    "verdict": ("ftckpt.session.snapshot_driver:SnapshotDriver._agree",),
    "windows": (
        "ftckpt.schedule.window_scheduler:WindowScheduler.learn",
        "ftckpt.schedule.window_scheduler:WindowScheduler.begin",
    ),
    "proof": ("ftckpt.session.snapshot_driver:SnapshotDriver._prove",),
    "events": ("ftckpt.events:Events.emit",),
}
"""By name, what belongs to a part, without what of it belongs to another."""

RESTORE_PARTS: dict[str, Sequence[str]] = {
    "describe": (
        "ftckpt.torch.state:PlainState.describe",
        "ftckpt.megatron.state:MegatronState.describe",
        "ftckpt.deepspeed.state:DeepSpeedState.describe",
    ),
    "optimizer's state": ("ftckpt.frameworks.optimizers:materialise",),
    "look": ("ftckpt.restore.restart:take_survey",),
    "verify": ("ftckpt.restore.verify:SlotVerifier.verify",),
    "void": ("ftckpt.restore.restart:Restart.invalidate_newer",),
    "plan": ("ftckpt.restore.selected_shards:SelectedShards.plan",),
    "open": ("ftckpt.restore.load:Reads.of",),
    "copy": (
        "ftckpt.restore.restart:execute",
        "ftckpt.restore.restart:_derive",
    ),
    "lay out": ("ftckpt.session.shard:Shard.lay_out",),
}
"""The same of ``restore()``."""


class Case(NamedTuple):
    """A framework's job of about ``pieces`` pieces on each rank."""

    framework: str
    pieces: int


class Meter:
    """Time of the training thread by ``clock``, by part; a part inside another one counts for itself."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self.calls: list[tuple[str, float, float]] = []
        """Name, processor time and time of each outermost call since the last ``take``."""
        self.parts: dict[str, float] = {}
        self._rounds: list[tuple[float, float]] = []
        self._inside: list[float] = []
        self._depth = 0
        self._thread = threading.get_ident()

    def outermost(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return original(*args, **kwargs)
            self._depth, wall, begin = 1, time.perf_counter(), self._clock()
            try:
                return original(*args, **kwargs)
            finally:
                self._depth = 0
                spent = self._clock() - begin, time.perf_counter() - wall
                self.calls.append((original.__name__, *spent))

        return timed

    def round(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, begin = time.perf_counter(), self._clock()
            try:
                return original(*args, **kwargs)
            finally:
                self._rounds.append((self._clock() - begin, time.perf_counter() - wall))

        return timed

    def part(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            # Not a job that begins, nor the copier's threads.
            if not self._depth or threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            self._inside.append(0.0)
            begin = self._clock()
            try:
                return original(*args, **kwargs)
            finally:
                spent, inside = self._clock() - begin, self._inside.pop()
                self.parts[name] = self.parts.get(name, 0.0) + spent - inside
                if self._inside:
                    self._inside[-1] += spent

        return timed

    def take(self) -> tuple[float, float, float]:
        """Since the last call of this, processor time and time of what a snapshot takes; processor time of places."""
        calls, self.calls = self.calls, []
        rounds, self._rounds = self._rounds, []
        own = [*rounds, *((cpu, wall) for name, cpu, wall in calls if name in CALLS)]
        places = sum(cpu for name, cpu, _ in calls if name == PLACE) - sum(cpu for cpu, _ in rounds)
        return sum(cpu for cpu, _ in own), sum(wall for _, wall in own), places


def _replace(path: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Wrap what ``path`` names; returns what undoes it."""
    module_name, _, names = path.partition(":")
    *outer, name = names.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError:
        return lambda: None  # of a framework that is not installed
    for one in outer:
        owner = getattr(owner, one)
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    return lambda: setattr(owner, name, original)


@contextmanager
def restores_by_part(clock: Callable[[], float], framework: str) -> Iterator[Meter]:
    """Time ``restore()`` and its parts; no other framework is imported."""
    meter, others = Meter(clock), {"plain", "megatron", "deepspeed"} - {framework}
    undo = [_replace(f"{OUTERMOST}.restore", meter.outermost)]
    undo += [
        _replace(path, functools.partial(meter.part, part))
        for part, paths in RESTORE_PARTS.items()
        for path in paths
        if path.split(".")[1] not in others
    ]
    try:
        yield meter
    finally:
        for one in undo:
            one()


class Training(NamedTuple):
    """A job: one iteration up to its boundary, and ``boundary`` where the script itself calls ``step``."""

    iterate: Callable[[], Any]
    boundary: Callable[[], Any]
    checkpointer: Any


def _megatron(layers: int, settings: Mapping[str, Any]) -> Training:
    import train_gpt

    import ftckpt.megatron
    from ftckpt.config import Config

    job = train_gpt.build(train_gpt.parse_args([*SIZE, "--layers", str(layers)]))
    config = Config(**settings)
    objects = {"data": job.data, "progress": job.progress}
    checkpointer = ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, objects, config=config)
    checkpointer.restore()
    return Training(lambda: train_gpt.train_step(job), lambda: checkpointer.step(job.iteration), checkpointer)


def _deepspeed(layers: int, settings: Mapping[str, Any]) -> Training:
    from tests.support.standin import deepspeed as standin

    standin.install()
    import train_deepspeed

    import ftckpt.deepspeed
    from ftckpt.config import Config
    from tests.support.ds_jobs import BASE, BF16

    settings_of_job = {**BASE, **BF16, "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 1}
    sizes = [*SIZE[: SIZE.index("--micro-batch")], "--layers", str(layers)]
    job = train_deepspeed.build(train_deepspeed.parse_args(sizes), settings_of_job)
    checkpointer = ftckpt.deepspeed.attach(job.engine, {"data": job.data}, Config(**settings))
    return Training(lambda: train_deepspeed.train_step(job), lambda: None, checkpointer)


def _plain(layers: int, settings: Mapping[str, Any], wrap: str = "fsdp2") -> Training:
    import train_plain

    import ftckpt.torch
    from ftckpt.config import Config

    job = train_plain.build(
        train_plain.parse_args([*SIZE, "--layers", str(layers), "--wrap", wrap, "--precision", "fp32"])
    )
    checkpointer = ftckpt.torch.attach(job.model, job.optimizer, job.scheduler, job.objects, Config(**settings))
    assert checkpointer is not None
    checkpointer.restore()
    return Training(
        lambda: train_plain.train_step(job), lambda: checkpointer.step(job.progress.iteration), checkpointer
    )


class Framework(NamedTuple):
    """A job, how many pieces a layer of it has on a rank, whether it trains on the stand-in for CUDA, and settings of
    ftckpt beside those of all."""

    build: Callable[..., Training]
    per_layer: float
    stand_in: bool = False
    settings: Mapping[str, Any] = MappingProxyType({})


FRAMEWORKS = {
    "megatron": Framework(_megatron, 33.0, stand_in=True),
    "deepspeed": Framework(_deepspeed, 24.0, stand_in=True),
    "plain": Framework(_plain, 48.0),
    "plain, replicas": Framework(functools.partial(_plain, wrap="ddp"), 48.0),
    "plain, storage": Framework(_plain, 48.0, settings=MappingProxyType({"persist": True})),
}


def measure(rank: int, world_size: int, case: Case, settings: Mapping[str, Any], counted: int) -> dict[str, Any]:
    """Iterations that warm up and ``counted`` ones in which all is timed together, then half as many by part."""
    sys.path.append(str(ROOT / "launch"))
    warnings.filterwarnings("ignore")
    meter = Meter()
    for name in (*CALLS, PLACE):
        _replace(f"{OUTERMOST}.{name}", meter.outermost)
    _replace(ROUND, meter.round)
    framework = FRAMEWORKS[case.framework]
    training = framework.build(max(1, round(case.pieces / framework.per_layer)), settings)
    described = training.checkpointer.training_state.describe()
    meter.take()

    def iterate() -> tuple[float, float, float]:
        training.iterate()
        training.boundary()
        return meter.take()

    spent = [iterate() for _ in range(WARM_UP + counted)]
    for part, paths in PARTS.items():
        for path in paths:
            _replace(path, functools.partial(meter.part, part))
    parts: list[dict[str, float]] = []
    for _ in range(counted // 2):
        meter.parts = {}
        cpu, *_ = iterate()
        parts.append({**meter.parts, "rest": cpu - sum(meter.parts.values())})
    dist.barrier()
    training.checkpointer.close(remove=False)  # for ``resume``
    names = {name for row in parts for name in row}
    return {
        "pieces": len(described.stepped) + len(described.volatile),
        "bytes": sum(piece.fragment.nbytes for piece in (*described.stepped, *described.volatile)),
        "cpu_ms": [cpu * 1e3 for cpu, _, _ in spent],
        "wall_ms": [wall * 1e3 for _, wall, _ in spent],
        "places_ms": [places * 1e3 for _, _, places in spent],
        "parts_ms": {name: statistics.median(row.get(name, 0.0) for row in parts) * 1e3 for name in names},
    }


def resume(rank: int, world_size: int, case: Case, settings: Mapping[str, Any]) -> dict[str, Any]:
    """One ``restore()`` of what ``measure`` has left in memory, which all ranks begin together."""
    sys.path.append(str(ROOT / "launch"))
    warnings.filterwarnings("ignore")
    framework = FRAMEWORKS[case.framework]
    with restores_by_part(time.thread_time, case.framework.partition(",")[0]) as meter:
        _replace(f"{OUTERMOST}.restore", _begun_together)
        training = framework.build(max(1, round(case.pieces / framework.per_layer)), settings)
    ((_, cpu, wall),) = meter.calls
    assert training.checkpointer.whole is not None, "there was nothing to restore"
    dist.barrier()
    training.checkpointer.close(remove=False)
    parts = {**meter.parts, "rest": cpu - sum(meter.parts.values())}
    return {"cpu_ms": cpu * 1e3, "wall_ms": wall * 1e3, "parts_ms": {name: of * 1e3 for name, of in parts.items()}}


def _begun_together(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def begun(*args: Any, **kwargs: Any) -> Any:
        dist.barrier()
        return original(*args, **kwargs)

    return begun
