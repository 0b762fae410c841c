"""A rank of ``benchmarks/load.py``: leaves a state, by ftckpt and by a peer, and loads it again.

A framework's job is the same for each loader, and complete before any clock runs. Moments are zeroed before each
load; none may be zero after it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.checkpoints import Checkpoints, Dcp, TorchDist, Universal
from benchmarks.jobs import DeepSpeedJob, MegatronJob, ShardedJob, TrainingJob

WAIT_SECS = 120.0
FREE_BYTES = 2 << 30
"""More than a load takes."""
_SHORT = ("--heads", "8", "--seq", "8")
"""The one step that makes an optimizer's state must take seconds only."""


class Case(NamedTuple):
    """A framework's job: its name here, layers and width of the model, and the layout."""

    framework: str
    layers: int
    hidden: int
    layout: str = "same"


class Place(NamedTuple):
    """A folder to load from, if there is one; ``is_cold``: its files are out of the page cache."""

    path: str
    is_cold: bool = False


def _megatron(case: Case, loads: bool) -> TrainingJob:
    layout = {"same": ("--tp", "2"), "other": ("--pp", "2")}[case.layout]
    size = ("--layers", str(case.layers), "--hidden", str(case.hidden), *_SHORT)
    job = MegatronJob([*size, "--micro-batch", "1", "--global-batch", "2", "--iterations", "9", *layout])
    from ftckpt.frameworks.optimizers import materialise

    for optimizer in job.optimizers():
        materialise(optimizer)
        for place, state in enumerate(optimizer.state.values()):
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    value.fill_(1e-3 * (1 + place % 7))
    return job


def _deepspeed(case: Case, loads: bool) -> TrainingJob:
    size = ("--layers", str(case.layers), "--hidden", str(case.hidden), *_SHORT)
    pipeline = {"same": ("--pp", "2"), "other": ("--pp", "4")}[case.layout]
    settings = {"train_micro_batch_size_per_gpu": 1, "checkpoint": {"load_universal": loads}}
    job = DeepSpeedJob([*size, *pipeline], **settings)
    if not loads:
        job.job.engine.module.universal_checkpoint_info = {"universal_checkpoint_version": 0.2}
        job.train()  # the optimizer has no state before its first step
        job.job.engine.global_steps = 0  # a start has counted nothing, or seems to have loaded something
    return job


def _plain(case: Case, loads: bool) -> TrainingJob:
    # As many bytes as a GPT of this size has in weights and moments; a layer has 12 matrices.
    job = ShardedJob(case.layers, 12 * case.hidden, case.hidden)
    job.step_once()
    return job


class Framework(NamedTuple):
    """The builder of its job (``loads``: the peer will load), the peer, modules that scripts import first, ranks by
    layout (``same``: as saved), and whether it trains on the stand-in for CUDA."""

    build: Callable[[Case, bool], TrainingJob]
    peer: Checkpoints
    modules: Sequence[str]
    ranks: Mapping[str, int]
    stand_in: bool = False


_FOUR = {"same": 4, "other": 4}
FRAMEWORKS = {
    "megatron": Framework(_megatron, TorchDist(), ["ftckpt.megatron"], _FOUR, stand_in=True),
    "deepspeed": Framework(_deepspeed, Universal(), ["ftckpt.deepspeed"], _FOUR),
    "plain": Framework(_plain, Dcp(), ["ftckpt.torch", "torch.distributed.checkpoint"], {"same": 4, "other": 2}),
}


def leave(rank: int, world_size: int, case: Case, settings: dict[str, Any], path: str) -> None:
    """Leaves the state by ftckpt, committed and protected in memory and on storage, and by the peer at ``path``."""
    framework = FRAMEWORKS[case.framework]
    job = framework.build(case, False)
    framework.peer.save(getattr(job, "job", job), path)
    checkpointer = job.start(_config(settings))
    deadline, iteration = time.monotonic() + WAIT_SECS, 100
    # Votes need snapshots. The last protected one is the newest in memory; a stored one is equally good.
    while checkpointer.persisted is None or checkpointer.protected is None:
        assert time.monotonic() < deadline, "no snapshot was persisted"
        iteration += 1
        checkpointer.fence()
        checkpointer.step(iteration)
        time.sleep(0.05)
    checkpointer.close(remove=False)


def convert(rank: int, world_size: int, case: Case, source: str, destination: str) -> None:
    """The conversion that the peer needs before another layout can load it."""
    FRAMEWORKS[case.framework].peer.convert(source, destination)


def take(rank: int, world_size: int, case: Case, settings: dict[str, Any], place: Place) -> dict[str, Any]:
    """Restarts by ftckpt: seconds from the survey to the last byte, and of all calls of a script. ``place`` is on
    storage, or has no path."""
    job, config = _built(case, loads=False), _config(settings)
    _prepare(place)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    checkpointer = job.start(config)
    whole_secs, cpu_secs = time.perf_counter() - begin, time.process_time() - begin_cpu
    _require_loaded(job)
    lines = map(json.loads, (Path(config.events) / f"rank{rank}.jsonl").read_text().splitlines())
    events = {line["event"]: line for line in lines}
    checkpointer.close(remove=False)
    return {
        "secs": events["loaded"]["time"] - events["joined"]["time"],
        "whole_secs": whole_secs,
        "cpu_secs": cpu_secs,
        "source": events["restored"]["source"],
        "read_bytes": events["loaded"]["read_bytes"],
    }


def load(rank: int, world_size: int, case: Case, place: Place) -> tuple[float, float]:
    """A load by the peer: seconds, and those of this process's cores."""
    job = _built(case, loads=True)
    _prepare(place)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    FRAMEWORKS[case.framework].peer.load(getattr(job, "job", job), place.path)
    dist.barrier()
    secs, cpu_secs = time.perf_counter() - begin, time.process_time() - begin_cpu
    _require_loaded(job)
    return secs, cpu_secs


def _built(case: Case, loads: bool) -> TrainingJob:
    """A job with zeroed moments, everything imported."""
    framework = FRAMEWORKS[case.framework]
    for module in framework.modules:
        importlib.import_module(module)
    job = framework.build(case, loads)
    for moment in _moments(job):
        moment.zero_()
    return job


def _prepare(place: Place) -> None:
    """Takes the files of a cold place out of the page cache, and waits for all ranks."""
    if dist.get_rank() == 0:
        if place.is_cold:
            _drop(Path(place.path))
        _touch_memory()
    dist.barrier()


def _drop(folder: Path) -> None:
    """Removes the files below ``folder`` from the page cache. Raises RuntimeError if some stay, as on a tmpfs."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # only what is clean can go
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if stay := [path for path in files if _is_cached(path)]:
        raise RuntimeError(f"{stay[0]}: stays in the page cache")


def _is_cached(path: Path) -> bool:
    """Whether a page of a file is in the page cache."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    mapped = np.memmap(path, mode="r")
    pages = np.zeros(-(-mapped.nbytes // mmap.PAGESIZE), np.uint8)
    if mincore(mapped.ctypes.data, mapped.nbytes, pages.ctypes.data):
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return bool((pages & 1).any())


def _touch_memory() -> None:
    """Makes free memory the machine's own: the host of a virtual one may have it, and then each first touch of a page
    takes eight times as long."""
    with mmap.mmap(-1, FREE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, FREE_BYTES, mmap.PAGESIZE):
            pages[at] = 1


def _config(settings: dict[str, Any]) -> Any:
    from ftckpt.config import Config

    common = {"enabled": True, "job": "load", "node": "node", "interval": 1, "replica_check_interval": 0}
    return Config(**common, start_timeout_secs=WAIT_SECS, on_error="raise", **settings)


def _moments(job: TrainingJob) -> list[torch.Tensor]:
    state = {name: getattr(value, "to_local", value.detach)() for name, value in job.optimizer_state().items()}
    return [value for name, value in state.items() if not name.startswith("weight") and value.numel() > 1]


def _require_loaded(job: TrainingJob) -> None:
    moments = _moments(job)
    assert moments and all(bool(moment.any()) for moment in moments), "a moment was not loaded"
