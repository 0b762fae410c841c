"""The training jobs of the benchmarks behind one interface: the example scripts of ``launch/``, and sharded matrices.

Frameworks are imported when a job of theirs is built.
"""

from __future__ import annotations

import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import ROOT


def import_script(name: str) -> Any:
    """The module of an example script."""
    if (folder := str(ROOT / "launch")) not in sys.path:
        sys.path.append(folder)
    warnings.filterwarnings("ignore", module="megatron")
    return __import__(name)


class TrainingJob(ABC):
    """One rank's part of a job. ``name`` and ``arena`` are for the systems that need them."""

    on_cuda = False
    calls_step = True
    """Whether the script calls ``step`` at its boundary; hooks call it otherwise."""
    name = arena = ""
    blocked_secs = 0.0
    """Seconds for which a system has blocked training in this iteration."""
    restored: int | None = None
    """The iteration that ``start`` has restored."""

    @property
    @abstractmethod
    def iteration(self) -> int:
        """The iterations that are done."""

    @abstractmethod
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """torch's own optimizers, which have the moments."""

    @abstractmethod
    def train(self, fence: Callable[[], object] = lambda: None) -> None:
        """One iteration up to its boundary. ``fence`` is called before the optimizer, unless hooks do that."""

    @abstractmethod
    def attach(self, config: Any) -> Any:
        """Switches ftckpt on and returns the checkpointer."""

    def start(self, config: Any) -> Any:
        """Attaches ftckpt and restores."""
        checkpointer = self.attach(config)
        self.restored = checkpointer.restore()
        return checkpointer

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Trained parameters (master weights in mixed precision) and the state of their optimizers, by name."""
        found = {}
        for number, optimizer in enumerate(self.optimizers()):
            for index, (parameter, state) in enumerate(optimizer.state.items()):
                for name, value in {"weight": parameter.detach(), **state}.items():
                    if isinstance(value, torch.Tensor):
                        found[f"{name}.{number}.{index}"] = value
        return found

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The local parts of ``optimizer_state``; delete the attribute if the optimizer has replaced them."""
        return {name: _local(tensor) for name, tensor in self.optimizer_state().items()}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies ``tensors`` into those of the job."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


class MegatronJob(TrainingJob):
    """``launch/train_gpt.py``; ftckpt's hook on the optimizer is the fence. A wait of ``device_secs``, in which a
    device would compute, is spread over its forward steps."""

    def __init__(self, argv: Sequence[str], device_secs: float = 0.0) -> None:
        self.script = import_script("train_gpt")
        self.job = self.script.build(self.script.parse_args([*argv]))
        if device_secs:
            forward, wait_secs = self.script.forward_step, device_secs / self.job.num_micro

            def forward_step(*args: Any) -> Any:
                time.sleep(wait_secs)
                return forward(*args)

            self.script.forward_step = forward_step

    @property
    def iteration(self) -> int:
        return int(self.job.iteration)

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        chained = getattr(self.job.optimizer, "chained_optimizers", [self.job.optimizer])
        return [one.optimizer for one in chained]

    def train(self, fence: Callable[[], object] = lambda: None) -> None:
        self.script.train_step(self.job)

    def attach(self, config: Any) -> Any:
        import ftckpt.megatron

        job, objects = self.job, {"data": self.job.data, "progress": self.job.progress}
        return ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, objects, config=config)


class DeepSpeedJob(TrainingJob):
    """``launch/train_deepspeed.py`` in bf16 with ZeRO-1, on the stand-in for CUDA; hooks call ftckpt."""

    calls_step = False

    def __init__(self, argv: Sequence[str], **settings: Any) -> None:
        from tests.standin import deepspeed as standin
        from tests.support.ds_jobs import BASE, BF16

        standin.install()
        import ftckpt.deepspeed  # noqa: F401 - before the script, which then registers its data

        self.script = import_script("train_deepspeed")
        zero = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 1}
        self.job = self.script.build(self.script.parse_args([*argv]), {**BASE, **BF16, **zero, **settings})

    @property
    def iteration(self) -> int:
        return int(self.job.engine.global_steps)

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [self.job.engine.basic_optimizer]

    def train(self, fence: Callable[[], object] = lambda: None) -> None:
        self.script.train_step(self.job)

    def attach(self, config: Any) -> Any:
        import ftckpt.deepspeed

        return ftckpt.deepspeed.attach(self.job.engine, {}, config)

    def start(self, config: Any) -> Any:
        return self.attach(config)  # which restores


class PlainJob(TrainingJob):
    """``launch/train_plain.py``."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.script = import_script("train_plain")
        self.job = self.script.build(self.script.parse_args([*argv]))

    @property
    def iteration(self) -> int:
        return int(self.job.progress.iteration)

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [self.job.optimizer]

    def train(self, fence: Callable[[], object] = lambda: None) -> None:
        self.script.train_step(self.job)

    def attach(self, config: Any) -> Any:
        import ftckpt.torch

        job = self.job
        return ftckpt.torch.attach(job.model, job.optimizer, job.scheduler, job.objects, config)


class _ShardedNet(torch.nn.Module):
    """Matrices divided by rows over all ranks; each rank computes with the rows that it has."""

    def __init__(self, layers: int, rows: int, columns: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        own = rows // dist.get_world_size()
        parts = [torch.randn(own, columns) / columns**0.5 for _ in range(layers)]
        sharded = [DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for part in parts]
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(one) for one in sharded])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight.to_local().T)
        return (x**2).mean()


class ShardedJob(TrainingJob):
    """Matrices in plain torch, sharded by rows as FSDP2 shards them, with AdamW.

    ``train`` needs as many rows on a rank as columns: real forward, backward, all-reduce and optimizer step, and a
    wait of ``device_secs``, in which a device would compute.
    """

    _BATCH_ROWS = 8
    """Few, so that the optimizer takes most of what an iteration takes of the host, as with a device."""

    def __init__(self, layers: int, rows: int, columns: int, device_secs: float = 0.0) -> None:
        self._device_secs, self._columns, self._iteration = device_secs, columns, 0
        self._net = _ShardedNet(layers, rows, columns)
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=1e-4, fused=True)

    @property
    def iteration(self) -> int:
        return self._iteration

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [self._optimizer]

    def step_once(self) -> None:
        """Gives the optimizer its state."""
        for parameter in self._net.parameters():
            parameter.grad = torch.ones_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def train(self, fence: Callable[[], object] = lambda: None) -> None:
        # Gradients stay allocated: given back to the kernel and mapped again they would cost some rows more than a
        # snapshot does, depending on what follows them on the heap.
        self._optimizer.zero_grad(set_to_none=False)
        loss = self._net(torch.randn(self._BATCH_ROWS, self._columns))
        loss.backward()
        time.sleep(self._device_secs)
        dist.all_reduce(loss.detach())
        fence()
        self._optimizer.step()
        self._iteration += 1

    def attach(self, config: Any) -> Any:
        import ftckpt.torch

        return ftckpt.torch.attach(self._net, self._optimizer, None, {"progress": self}, config)

    def state_dict(self) -> dict[str, int]:
        return {"iteration": self._iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._iteration = state["iteration"]


def has_smp(checkpointer: Any) -> bool:
    """Whether this node's SMP runs and has its configuration."""
    from ftckpt.errors import FtckptError
    from ftckpt.smp.client import SmpClient

    config = checkpointer.config
    try:
        client = SmpClient(checkpointer.node_dir, Path(config.arena), config.job, config.node)
        return bool(client.status()["configured"])
    except FtckptError:
        return False
