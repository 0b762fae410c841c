"""A rank of ``benchmarks/cost.py``: trains with one system, and measures it by iteration."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.common import disk_bytes
from benchmarks.jobs import MegatronJob, ShardedJob, TrainingJob, has_smp
from benchmarks.systems import Dcp, Dlrover, LmResiliency, System, TorchCheckpointing, TorchSave

MAX_WARM_UP = 600
"""Iterations until an SMP must be there."""
_SUBREAPER = 36
_BYTES_PER_ELEMENT = 12
"""Weight and two moments in 32 bit."""


class Block(NamedTuple):
    """One start of the ranks: which job and system, how large, and how many iterations."""

    job: str
    system: str
    options: Mapping[str, Any]
    every: int
    """Iterations between two saves of a peer; ftckpt has a setting for that."""
    warm_up: int
    iterations: int
    mib: int
    """State of a rank of the plain job."""
    script: tuple[str, ...]
    """Arguments of the Megatron job."""
    device_secs: float
    name: str
    arena: str
    folder: str


def _plain(block: Block) -> TrainingJob:
    width = 1024 if block.mib >= 24 else 256
    layers = max(1, (block.mib << 20) // (_BYTES_PER_ELEMENT * width**2))
    torch.manual_seed(dist.get_rank())
    return ShardedJob(layers, dist.get_world_size() * width, width, block.device_secs)


BUILDERS: dict[str, Callable[[Block], TrainingJob]] = {
    "plain": _plain,
    "megatron": lambda block: MegatronJob(block.script, block.device_secs),
}


def build(block: Block) -> TrainingJob:
    """The job of a block, after its first iteration."""
    job = BUILDERS[block.job](block)
    job.name, job.arena = block.name, block.arena
    job.train()
    return job


class Ftckpt(System):
    """ftckpt as it is by default, with the settings of the row alone."""

    def setup(self, **settings: Any) -> None:
        from ftckpt.config import Config

        if "persist_interval" in settings:
            settings |= {"persist": self.folder, "persist_at_end": "off"}
        settings = {"node": "node", **settings}
        self._config = Config(enabled=True, job=self.job.name, arena=self.job.arena, on_error="raise", **settings)
        self.checkpointer = self.job.start(self._config)
        # Hooks on the optimizer call it, and the job does not.
        self.checkpointer.fence = timed(self.job, self.checkpointer.fence)
        if not self.job.calls_step:
            self.checkpointer.step = timed(self.job, self.checkpointer.step)
        self._begun_at: dict[int, float] = {}
        self._begun = self.checkpointer.begun
        self._protected = self._persisted = None
        self.num_protected = 0

    def save(self, iteration: int) -> bool:
        self._begun_at[iteration] = time.perf_counter()
        if self.job.calls_step:
            self.checkpointer.step(iteration)
        self._note_marks()
        before, self._begun = self._begun, self.checkpointer.begun
        return bool(self._begun != before)

    @property
    def is_ready(self) -> bool:
        """Whether the SMP runs, where one is needed."""
        is_alone = self._config.protect == "none" and not self._config.persist
        return is_alone or has_smp(self.checkpointer)

    def _note_marks(self) -> None:
        """Notes which snapshots are protected and stored by now."""
        protected, persisted = self.checkpointer.protected, self.checkpointer.persisted
        self.num_protected += protected != self._protected
        if persisted != self._persisted:
            self.stored_secs.append(time.perf_counter() - self._begun_at[persisted.iteration])
        self._protected, self._persisted = protected, persisted

    def reset(self) -> None:
        super().reset()
        self.num_protected = 0

    def notes(self) -> dict[str, Any]:
        return {"protected": self.num_protected}

    def close(self) -> None:
        self.checkpointer.close(remove=True)


SYSTEMS: dict[str, type[System]] = {
    "off": System,
    "ftckpt": Ftckpt,
    "torch.save": TorchSave,
    "DCP": Dcp,
    "DLRover": Dlrover,
    "lm-resiliency": LmResiliency,
    "torch_checkpointing": TorchCheckpointing,
}


def timed(job: Any, call: Callable[..., object]) -> Callable[..., None]:
    """``call``, whose time counts as blocked."""

    def wrapped(*args: Any) -> None:
        begin = time.perf_counter()
        try:
            call(*args)
        finally:
            job.blocked_secs += time.perf_counter() - begin

    return wrapped


class Training:
    """A job that trains with a system. Of an iteration: seconds, seconds blocked, whether a snapshot was taken."""

    def __init__(self, block: Block) -> None:
        self._block, self._job = block, build(block)
        self.system = SYSTEMS[block.system](self._job, block.folder, **block.options)
        self._fence = timed(self._job, self.system.fence)
        self._ours = self.system if isinstance(self.system, Ftckpt) else None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._job.tensors.values())

    def iterate(self) -> tuple[float, float, bool]:
        """One iteration, up to and with its boundary."""
        job, is_taken = self._job, False
        begin, job.blocked_secs = time.perf_counter(), 0.0
        job.train(self._fence)
        boundary = time.perf_counter()
        # ftckpt's interval is a setting of its own.
        if self._ours or (self._block.system != "off" and job.iteration % self._block.every == 0):
            is_taken = self.system.save(job.iteration) is not False
        end = time.perf_counter()
        return end - begin, job.blocked_secs + end - boundary, is_taken

    def warm_up(self) -> None:
        """Trains until everything has started; equally long on all ranks."""
        for number in range(MAX_WARM_UP):
            if number >= self._block.warm_up:
                is_ready = torch.tensor(self._ours is None or self._ours.is_ready).int()
                dist.all_reduce(is_ready, dist.ReduceOp.MIN)
                if is_ready:
                    self.system.drain()
                    self.system.reset()
                    return
            self.iterate()
        raise TimeoutError(f"no SMP within {MAX_WARM_UP} iterations")


def measure(rank: int, world_size: int, block: Block) -> dict[str, Any]:
    """A block of iterations: their rows, and the processor time and memory that they took."""
    with open(os.devnull, "w") as null:  # output of systems would hide the progress
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    # Processes that a system detaches count, too.
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    training = Training(block)
    training.warm_up()
    dist.barrier()
    network_bytes, cpu_secs, begin = received_bytes(), tree_cpu_secs(os.getpid()), time.perf_counter()
    rows = [training.iterate() for _ in range(block.iterations)]
    secs, cpu_secs = time.perf_counter() - begin, tree_cpu_secs(os.getpid()) - cpu_secs
    network_bytes = received_bytes() - network_bytes
    dist.barrier()
    memory_bytes = tree_memory_bytes(os.getpid(), block.arena) + (disk_bytes(Path(block.arena)) if rank == 0 else 0)
    dist.barrier()
    found: dict[str, Any] = {"rows": rows, "secs": secs, "cpu_secs": cpu_secs, "memory_bytes": memory_bytes}
    found |= {"nbytes": training.nbytes, "notes": training.system.notes(), "network_bytes": network_bytes}
    found["stored_secs"] = training.system.stored_secs
    training.system.close()
    dist.barrier()
    for pid in descendants(os.getpid()):  # left by a peer
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def received_bytes() -> int:
    """The bytes that all interfaces of this machine have received, the loopback included."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[0]) for line in lines)


def tree_cpu_secs(root: int) -> float:
    """Processor time of a process and of all that it has started, including those that have ended."""
    ticks = sum(sum(map(int, _stat(pid)[11:15])) for pid in (root, *descendants(root)))
    return ticks / os.sysconf("SC_CLK_TCK")


def tree_memory_bytes(root: int, excluded: str) -> int:
    """Anonymous and shared memory of a process and of all below it, without files in the folder ``excluded``. A page
    that several processes map is divided among them."""
    total = 0
    for pid in (root, *descendants(root)):
        is_counted = True
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1]) << 10
            for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
                name, *rest = line.split()
                if not name.endswith(":"):
                    is_counted = excluded not in line
                elif name == "Pss:" and not is_counted:
                    total -= int(rest[0]) << 10
    return total


def descendants(root: int) -> list[int]:
    """The processes below one."""
    parents = {int(name): int(_stat(int(name))[1]) for name in os.listdir("/proc") if name.isdigit()}
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _stat(pid: int) -> list[str]:
    """Fields of /proc after the name; zeros if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 20
