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
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import reshape_jobs, slow_storage
from benchmarks.reshape_jobs import timed

WAIT_SECS = 120.0
FREE_BYTES = 2 << 30
"""More than a load takes."""
SHORT = ("--seq", "8")
"""What is trained on: the one step that makes an optimizer's state is to take seconds."""
Config = Any


class Framework(ABC):
    """A training job with ftckpt, or with the checkpoints that are usual for it. Each rank of ``ranks[layout]`` has
    its own; ``layout`` is ``same``, in which the state was left, or ``other``."""

    peer: str
    modules: ClassVar[Sequence[str]] = ()
    """What scripts import at their begin."""
    stand_in = False
    ranks: ClassVar = {"same": 4, "other": 4}

    @abstractmethod
    def build(self, size: Sequence[str], layout: str, loads: bool) -> Any:
        """A job with state in its optimizer; ``loads``: the peer is to load."""

    @abstractmethod
    def optimizers(self, job: Any) -> list[torch.optim.Optimizer]:
        """Torch's own, which hold the moments."""

    @abstractmethod
    def restore(self, job: Any, config: Config) -> Any:
        """Attach ftckpt and restore; the checkpointer."""

    @abstractmethod
    def save(self, job: Any, path: str) -> None:
        """By the peer."""

    @abstractmethod
    def load(self, job: Any, path: str) -> None:
        """By the peer, into the tensors of the job."""

    def convert(self, source: str, destination: str) -> None:
        """Make what ``save`` left loadable in any layout; one process does."""
        Path(source).rename(destination)  # it is already


class Megatron(Framework):
    """A GPT under the distributed optimizer; ``dist_checkpointing`` in the form that every layout can load."""

    peer = "torch_dist"
    modules = ("ftckpt.megatron",)
    stand_in = True

    def build(self, size: Sequence[str], layout: str, loads: bool) -> Any:
        common = (*size, "--heads", "8", *SHORT, "--micro-batch", "1", "--global-batch", "2")
        return reshape_jobs.megatron([*common, *{"same": ("--tp", "2"), "other": ("--pp", "2")}[layout]])

    def optimizers(self, job: Any) -> list[torch.optim.Optimizer]:
        from ftckpt.megatron.optimizers import leaf_optimizers

        return [leaf.optimizer for leaf in leaf_optimizers(job.optimizer)]

    def restore(self, job: Any, config: Config) -> Any:
        import ftckpt.megatron

        objects = {"data": job.data, "progress": job.progress}
        checkpointer = ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, objects, config=config)
        checkpointer.restore()
        return checkpointer

    def save(self, job: Any, path: str) -> None:
        reshape_jobs.save_job(job, path)

    def load(self, job: Any, path: str) -> None:
        reshape_jobs.load_job(job, path)


class DeepSpeed(Framework):
    """About the same model under a pipeline and ZeRO-1; a universal checkpoint, converted before."""

    peer = "DeepSpeed universal"
    modules = ("ftckpt.deepspeed",)

    def build(self, size: Sequence[str], layout: str, loads: bool) -> Any:
        pipeline = {"same": ("--pp", "2"), "other": ("--pp", "4")}[layout]
        job = reshape_jobs.deepspeed([*size, "--heads", "8", *SHORT, *pipeline], loads)
        if not loads:
            import train_deepspeed

            job.engine.module.universal_checkpoint_info = {"universal_checkpoint_version": 0.2}
            train_deepspeed.train_step(job)  # the optimizer has no state before its first step
            job.engine.global_steps = 0  # a start has counted nothing, or says that it has loaded something
        return job

    def optimizers(self, job: Any) -> list[torch.optim.Optimizer]:
        return [job.engine.basic_optimizer]

    def restore(self, job: Any, config: Config) -> Any:
        import ftckpt.deepspeed

        return ftckpt.deepspeed.attach(job.engine, {}, config)

    def save(self, job: Any, path: str) -> None:
        job.engine.save_checkpoint(path, tag="step")

    def load(self, job: Any, path: str) -> None:
        job.engine.load_checkpoint(path, tag="step")

    def convert(self, source: str, destination: str) -> None:
        reshape_jobs.convert_universal(source, destination)


class Plain(Framework):
    """Matrices sharded by rows as FSDP2 has them, with Adam; DCP loads into their tensors."""

    peer = "DCP"
    modules = ("ftckpt.plain", "torch.distributed.checkpoint")
    ranks: ClassVar = {"same": 4, "other": 2}

    def build(self, size: Sequence[str], layout: str, loads: bool) -> Any:
        return PlainJob(size)

    def optimizers(self, job: Any) -> list[torch.optim.Optimizer]:
        return [job.optimizer]

    def restore(self, job: Any, config: Config) -> Any:
        import ftckpt.plain

        checkpointer = ftckpt.plain.attach(job.net, job.optimizer, None, {"progress": job}, config)
        assert checkpointer is not None
        checkpointer.restore()
        return checkpointer

    def save(self, job: Any, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(job.tensors(), checkpoint_id=path)

    def load(self, job: Any, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(job.tensors(), checkpoint_id=path)


class PlainJob:
    """As many bytes as a GPT of this size has in weights and moments, in square matrices."""

    def __init__(self, size: Sequence[str]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        given = dict(zip(size[::2], map(int, size[1::2]), strict=True))
        hidden, rows = given["--hidden"], 12 * given["--hidden"]  # of a layer of a transformer
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        own = rows // dist.get_world_size()
        sharded = [
            DTensor.from_local(torch.randn(own, hidden), mesh, [Shard(0)], run_check=False)
            for _ in range(given["--layers"])
        ]
        self.net = torch.nn.Module()
        self.net.weights = torch.nn.ParameterList([torch.nn.Parameter(one) for one in sharded])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=True)
        for parameter in self.net.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name; weights and moments as DTensors."""
        found: dict[str, torch.Tensor] = {}
        for index, weight in enumerate(self.net.parameters()):
            found[f"weight.{index}"] = weight.detach()
            found |= {f"{name}.{index}": value for name, value in self.optimizer.state[weight].items()}
        return found

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


FRAMEWORKS: dict[str, Framework] = {"megatron": Megatron(), "deepspeed": DeepSpeed(), "plain": Plain()}


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

    ``refused`` instead, where ftckpt does not know this restart. ``place`` is on storage, or has no path.
    """
    from ftckpt.errors import FtckptError

    framework, job = _built(case, loads=False)
    config = _config(settings)
    with _found(place):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        try:
            checkpointer = framework.restore(job, config)
        except FtckptError as error:
            return {"refused": str(error)}
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
        secs, _ = timed(partial(framework.load, job, place.path))
        cpu_secs = time.process_time() - begin
    _require_loaded(framework, job)
    return secs, cpu_secs


def read(rank: int, world_size: int, places: Sequence[Place]) -> list[float]:
    """A plain read of all files of each place, one after the other: seconds."""
    found = []
    for place in places:
        with _found(place):
            found.append(timed(partial(slow_storage.read_all, Path(place.path)))[0])
    return found


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
        enabled=True, job="load", node="node", replica_check_interval=0, start_timeout_secs=WAIT_SECS,
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
