"""What ranks do for ``benchmarks/load.py``: leave a state, by ftckpt and by a peer, and take it up again.

A framework's job is the same whoever loads it, and complete before any clock runs. Before each load moments are
zeroed; after it none may be zero any more.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import slow_storage
from benchmarks.load_frameworks import FRAMEWORKS, Config, Framework

WAIT_SECS = 120.0
FREE_BYTES = 2 << 30
"""More than a load takes."""


class Case(NamedTuple):
    """A framework's job: its name here, arguments for the model's size, and the layout."""

    framework: str
    size: Sequence[str]
    layout: str = "same"


class Place(NamedTuple):
    """A folder to load from; whether it is taken out of memory before; the cgroup that reads, '' for none."""

    path: str
    cold: bool = False
    limit: str = ""


def leave(rank: int, world_size: int, case: Case, settings: dict[str, Any], path: str) -> None:
    """The state by ftckpt, whole and protected in memory and on storage, and by the peer at ``path``."""
    framework = FRAMEWORKS[case.framework]
    job = framework.build(case.size, case.layout, loads=False)
    framework.save(job, path)
    checkpointer = framework.restore(job, _config(settings))
    deadline, iteration = time.monotonic() + WAIT_SECS, 100
    # Rounds ride on snapshots. What is protected last is the newest in memory, what lies on storage is as good.
    while checkpointer.persisted is None or checkpointer.protected is None:
        assert time.monotonic() < deadline, "nothing came to storage"
        iteration += 1
        checkpointer.fence()
        checkpointer.step(iteration)
        time.sleep(0.05)
    checkpointer.close(remove=False)


def convert(rank: int, world_size: int, case: Case, source: str, destination: str) -> None:
    """What the peer needs once more before another layout can load it."""
    FRAMEWORKS[case.framework].convert(source, destination)


def take(rank: int, world_size: int, case: Case, settings: dict[str, Any], place: Place) -> dict[str, Any]:
    """Restart by ftckpt: seconds from the first look to the last byte in place, and of all that a script calls.

    ``place`` is on storage, or has no path.
    """
    framework, job = _built(case, loads=False)
    config = _config(settings)
    with _found(place):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        checkpointer = framework.restore(job, config)
        whole_secs, cpu_secs = time.perf_counter() - begin, time.process_time() - begin_cpu
    _require_loaded(framework, job)
    lines = map(json.loads, (Path(config.events) / f"rank{rank}.jsonl").read_text().splitlines())
    told = {line["event"]: line for line in lines}
    checkpointer.close(remove=False)
    return {
        "secs": told["loaded"]["time"] - told["joined"]["time"],
        "whole_secs": whole_secs,
        "cpu_secs": cpu_secs,
        "source": told["restored"]["source"],
        "read_bytes": told["loaded"]["read_bytes"],
    }


def _built(case: Case, loads: bool) -> tuple[Framework, Any]:
    """A job without its state, everything imported."""
    framework = FRAMEWORKS[case.framework]
    for module in framework.modules:
        importlib.import_module(module)
    job = framework.build(case.size, case.layout, loads)
    _zero(framework, job)
    return framework, job


def load(rank: int, world_size: int, case: Case, place: Place) -> tuple[float, float]:
    """A load by the peer: seconds, and those of this process' cores."""
    framework, job = _built(case, loads=True)
    with _found(place):
        begin = time.process_time()
        secs = _timed(lambda: framework.load(job, place.path))
        cpu_secs = time.process_time() - begin
    _require_loaded(framework, job)
    return secs, cpu_secs


def read(rank: int, world_size: int, places: Sequence[Place]) -> list[float]:
    """A plain read of all files of each place, one after the other: seconds."""
    found = []
    for place in places:
        with _found(place):
            found.append(_timed(lambda path=Path(place.path): slow_storage.read_all(path)))
    return found


def _timed(action: Callable[[], Any]) -> float:
    """Seconds from the moment in which all ranks are here to that in which all are done."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


@contextlib.contextmanager
def _found(place: Place) -> Iterator[None]:
    """All ranks find the files of a place where they shall be, and read them as fast as they may."""
    if dist.get_rank() == 0:
        if place.cold:
            slow_storage.drop(Path(place.path))
        _have_memory()
    with slow_storage.limited(place.limit):
        dist.barrier()
        yield


def _have_memory() -> None:
    """Free memory is the machine's own: of a virtual one the host may have it, and gives each page anew where it is
    touched, which takes eight times as long as the page itself."""
    with mmap.mmap(-1, FREE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, FREE_BYTES, mmap.PAGESIZE):
            pages[at] = 1


def _config(settings: dict[str, Any]) -> Config:
    from ftckpt.config import Config

    return Config(
        enabled=True, job="load", node="node", interval=1, replica_check_interval=0, start_timeout_secs=WAIT_SECS,
        on_error="raise", **settings,
    )  # fmt: skip


def _moments(framework: Framework, job: Any) -> Iterator[torch.Tensor]:
    for optimizer in framework.optimizers(job):
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    yield getattr(value, "to_local", value.detach)()


def _zero(framework: Framework, job: Any) -> None:
    for moment in _moments(framework, job):
        moment.zero_()


def _require_loaded(framework: Framework, job: Any) -> None:
    """Raises AssertionError where the moments are what they were before."""
    moments = list(_moments(framework, job))
    assert moments and all(bool(moment.any()) for moment in moments), "a moment was not loaded"
