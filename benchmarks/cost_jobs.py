"""What a rank does for ``benchmarks/cost.py``: train with one system, and measure all of it, by iteration."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.common import disk_bytes
from benchmarks.systems import Dcp, Dlrover, LmResiliency, System, TorchCheckpointing, TorchSave

MAX_WARM_UP = 600
"""Iterations until an SMP must be there."""
_SUBREAPER = 36
_BATCH_ROWS = 8
"""Of a rank: few, so that what an iteration takes of the host is the optimizer's, as beside a device."""
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


class Net(torch.nn.Module):
    """Layers sharded by rows over all ranks; each rank computes with the rows that it has."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.width = 1024 if mib >= 24 else 256
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        num_layers = max(1, (mib << 20) // (_BYTES_PER_ELEMENT * self.width**2))
        layers = [torch.randn(self.width, self.width) / self.width**0.5 for _ in range(num_layers)]
        sharded = [DTensor.from_local(layer, mesh, [Shard(0)], run_check=False) for layer in layers]
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(one) for one in sharded])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight.to_local().T)
        return (x**2).mean()


class PlainJob:
    """A network in plain torch, sharded by rows as FSDP2 has it: real forward, backward, all-reduce and AdamW step.

    ``device_secs`` of an iteration are a wait, in which a device would compute.
    """

    on_cuda = False

    def __init__(self, block: Block) -> None:
        self.name, self.arena, self._device_secs = block.name, block.arena, block.device_secs
        self.iteration, self.blocked_secs = 0, 0.0
        torch.manual_seed(dist.get_rank())
        self._net = Net(block.mib)
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=1e-4, fused=True)
        self.train(lambda: None)

    def train(self, fence: Callable[[], object]) -> None:
        """One iteration; ``fence`` comes before the optimizer."""
        # Gradients stay where they are: given back to the kernel and mapped again they would take more of some rows
        # than a snapshot does, by what lies behind them on the heap.
        self._optimizer.zero_grad(set_to_none=False)
        loss = self._net(torch.randn(_BATCH_ROWS, self._net.width))
        loss.backward()
        time.sleep(self._device_secs)
        dist.all_reduce(loss.detach())
        fence()
        self._optimizer.step()
        self.iteration += 1

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for index, weight in enumerate(self._net.weights):
            for name, tensor in {"weight": weight.detach(), **self._optimizer.state[weight]}.items():
                found[f"{name}.{index}"] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return found

    def attach(self, config: Any) -> Any:
        import ftckpt.torch

        return ftckpt.torch.attach(self._net, self._optimizer, None, {"progress": self}, config)

    def state_dict(self) -> dict[str, int]:
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.iteration = state["iteration"]


class MegatronJob:
    """``launch/train_gpt.py`` on the stand-in for CUDA; the wait for a device is spread over its forward steps."""

    on_cuda = False

    def __init__(self, block: Block) -> None:
        import train_gpt

        warnings.filterwarnings("ignore", module="megatron")
        self.name, self.arena, self._script = block.name, block.arena, train_gpt
        self.blocked_secs = 0.0
        self._job = train_gpt.build(train_gpt.parse_args([*block.script]))
        forward, wait_secs = train_gpt.forward_step, block.device_secs / self._job.num_micro

        def forward_step(*args: Any) -> Any:
            time.sleep(wait_secs)
            return forward(*args)

        train_gpt.forward_step = forward_step
        self.train(lambda: None)

    @property
    def iteration(self) -> int:
        return int(self._job.iteration)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for optimizer in getattr(self._job.optimizer, "chained_optimizers", [self._job.optimizer]):
            for index, (parameter, state) in enumerate(optimizer.optimizer.state.items()):
                values = {"master": parameter.detach(), **state}
                found |= {f"{name}.{index}": value for name, value in values.items() if torch.is_tensor(value)}
        return found

    def train(self, fence: Callable[[], object]) -> None:
        """One iteration; ftckpt's hook on the optimizer is the fence."""
        self._script.train_step(self._job)

    def attach(self, config: Any) -> Any:
        import ftckpt.megatron

        job, objects = self._job, {"data": self._job.data, "progress": self._job.progress}
        return ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, objects, config=config)


JOBS: dict[str, type[PlainJob] | type[MegatronJob]] = {"plain": PlainJob, "megatron": MegatronJob}


class Ftckpt(System):
    """ftckpt as it is by default, with the settings of the row alone."""

    def setup(self, **settings: Any) -> None:
        from ftckpt.config import Config

        if "persist_interval" in settings:
            settings |= {"persist": self.folder, "persist_at_end": "off"}
        self._config = Config(
            enabled=True, job=self.job.name, node="node", arena=self.job.arena, on_error="raise", **settings
        )
        self.checkpointer = self.job.attach(self._config)
        self.checkpointer.restore()
        # Hooks on the optimizer call it, and the job does not.
        self.checkpointer.fence = timed(self.job, self.checkpointer.fence)
        self._begun_at: dict[int, float] = {}
        self._protected = self._persisted = None
        self.num_protected = 0

    def save(self, iteration: int) -> bool:
        before, self._begun_at[iteration] = self.checkpointer.begun, time.perf_counter()
        self.checkpointer.step(iteration)
        self._look()
        return bool(self.checkpointer.begun != before)

    @property
    def is_ready(self) -> bool:
        """Whether the SMP runs, where one is needed."""
        is_alone = self._config.protect == "none" and not self._config.persist
        return is_alone or bool(self.checkpointer.rank.protection.smp_guards)

    def _look(self) -> None:
        """Note what is protected and stored by now."""
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


def timed(job: Any, call: Callable[[], object]) -> Callable[[], None]:
    """``call``, whose time counts as blocked."""

    def wrapped() -> None:
        begin = time.perf_counter()
        try:
            call()
        finally:
            job.blocked_secs += time.perf_counter() - begin

    return wrapped


class Training:
    """A job that trains with a system. Of an iteration: seconds, seconds blocked, whether a snapshot was taken."""

    def __init__(self, block: Block) -> None:
        self._block, self._job = block, JOBS[block.job](block)
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
        """Train until nothing starts any more; as long on all ranks."""
        for number in range(MAX_WARM_UP):
            is_ready = torch.tensor(self._ours is None or self._ours.is_ready).int()
            dist.all_reduce(is_ready, dist.ReduceOp.MIN)
            if number >= self._block.warm_up and is_ready:
                self.system.drain()
                self.system.reset()
                return
            self.iterate()
        raise TimeoutError(f"no SMP within {MAX_WARM_UP} iterations")


def measure(rank: int, world_size: int, block: Block) -> dict[str, Any]:
    """A block of iterations: their rows, and what they took of processors and memory."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "launch"))
    with open(os.devnull, "w") as null:  # what systems print hides the progress
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    # Processes that a system detaches count, too.
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    training = Training(block)
    training.warm_up()
    dist.barrier()
    cpu_secs, begin = tree_cpu_secs(os.getpid()), time.perf_counter()
    rows = [training.iterate() for _ in range(block.iterations)]
    whole_secs, cpu_secs = time.perf_counter() - begin, tree_cpu_secs(os.getpid()) - cpu_secs
    dist.barrier()
    memory_bytes = tree_memory_bytes(os.getpid(), block.arena) + (disk_bytes(Path(block.arena)) if rank == 0 else 0)
    dist.barrier()
    found = {
        "rows": rows, "secs": whole_secs, "cpu_secs": cpu_secs, "memory_bytes": memory_bytes,
        "nbytes": training.nbytes, "notes": training.system.notes(), "stored_secs": training.system.stored_secs,
    }  # fmt: skip
    training.system.close()
    dist.barrier()
    for pid in descendants(os.getpid()):  # what a peer leaves
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def tree_cpu_secs(root: int) -> float:
    """Processor time of a process and of all that it has started, those that have ended among them."""
    ticks = sum(sum(map(int, _stat(pid)[11:15])) for pid in (root, *descendants(root)))
    return ticks / os.sysconf("SC_CLK_TCK")


def tree_memory_bytes(root: int, but: str) -> int:
    """Anonymous and shared memory of a process and of all below it, each page shared out among those that map it,
    without what lies in the folder ``but``."""
    total = 0
    for pid in (root, *descendants(root)):
        is_outside = True
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1]) << 10
            for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
                name, *rest = line.split()
                if not name.endswith(":"):
                    is_outside = but not in line
                elif name == "Pss:" and not is_outside:
                    total -= int(rest[0]) << 10
    return total


def descendants(root: int) -> list[int]:
    """Processes below one."""
    parents = {int(name): int(_stat(int(name))[1]) for name in os.listdir("/proc") if name.isdigit()}
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _stat(pid: int) -> list[str]:
    """Fields of /proc behind the name; of a process that has ended zeros."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 20
