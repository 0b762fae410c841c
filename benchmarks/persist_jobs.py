"""What ranks do for ``benchmarks/persist.py``: train in plain torch, and save now and then."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.persist_systems import INTERVAL, SYSTEMS

ROWS = 8
"""Of a batch, per rank: as few as possible, so that an iteration's time on the host is the optimizer's."""
BYTES_PER_ELEMENT = 12
"""Weight and two moments in 32 bit."""
MOST_ITERATIONS = 1000


class Net(torch.nn.Module):
    """Layers sharded by rows over all ranks, as FSDP2 has them; each rank computes with the rows that it has."""

    def __init__(self, mib: int, world_size: int) -> None:
        super().__init__()
        self.width = 1024 if mib >= 24 else 256
        mesh = init_device_mesh("cpu", (world_size,))
        num_layers = max(1, (mib << 20) // (BYTES_PER_ELEMENT * self.width**2))
        weights = [torch.randn(self.width, self.width) / self.width**0.5 for _ in range(num_layers)]
        sharded = [DTensor.from_local(weight, mesh, [Shard(0)], run_check=False) for weight in weights]
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(one) for one in sharded])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight.to_local().T)
        return (x**2).mean()


class Job:
    """One rank's training. ``device_secs`` of an iteration are a wait, in which a device would compute."""

    def __init__(self, rank: int, world_size: int, mib: int, device_secs: float) -> None:
        torch.manual_seed(rank)
        self.rank, self.world_size, self.iteration, self.device_secs = rank, world_size, 0, device_secs
        self.net = Net(mib, world_size)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=True)
        self.compute()
        self.optimizer.step()  # there is state from the first iteration on
        self.nbytes = sum(tensor.nbytes for tensor in self.local_tensors().values())

    def compute(self) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad()
        self.net(torch.randn(ROWS, self.net.width)).backward()
        time.sleep(self.device_secs)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state by name, sharded tensors as DTensors."""
        found: dict[str, torch.Tensor] = {}
        for index, weight in enumerate(self.net.weights):
            found[f"weight.{index}"] = weight.detach()
            found |= {f"{name}.{index}": value for name, value in self.optimizer.state[weight].items()}
        return found

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's part of each."""
        return {
            name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for name, tensor in self.tensors().items()
        }

    def state_dict(self) -> dict[str, int]:
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.iteration = state["iteration"]


class Turn(NamedTuple):
    """What ranks shall do: save ``count`` times, every ``interval`` iterations, by a system with ``more`` options."""

    system: str
    folder: str
    mib: int
    device_secs: float
    interval: int
    count: int
    more: dict[str, Any]


def train(rank: int, world_size: int, turn: Turn) -> dict[str, Any]:
    """Iterations until all checkpoints are durable, with a row for each iteration.

    A row is: iteration; when it began and when its boundary did, since the epoch; seconds in ``fence`` and in
    ``boundary``. ``checkpoints`` are the iterations that were asked for, and when each was durable on all ranks.
    """
    kind, options = SYSTEMS[turn.system]
    job = Job(rank, world_size, turn.mib, turn.device_secs)
    system = kind(job, Path(turn.folder), {**options, **turn.more, INTERVAL: turn.interval})
    rows: list[tuple[float, ...]] = []
    durable: dict[int, float] = {}
    dist.barrier()
    for iteration in range(1, MOST_ITERATIONS):
        began, begin = time.time(), time.perf_counter()
        job.compute()
        fence = time.perf_counter()
        system.fence()
        fenced = time.perf_counter()
        job.optimizer.step()
        job.iteration = iteration
        if (last := _last(system.durable() if system.asked >= 0 else None)) is not None:
            durable.setdefault(system.asked, last)
        boundary = time.perf_counter()
        is_free = system.asked < 0 or system.asked in durable
        system.boundary(iteration, is_free and iteration % turn.interval == 0 and len(durable) < turn.count)
        end = time.perf_counter()
        rows.append((iteration, began, began + boundary - begin, fenced - fence, end - boundary))
        if len(durable) == turn.count or (not kind.saves and iteration == (turn.count + 1) * turn.interval):
            break
    system.close()
    dist.barrier()
    return {"rows": rows, "checkpoints": list(durable.items()), "nbytes": job.nbytes, "notes": system.notes()}


def _last(durable: float | None) -> float | None:
    """When the last rank's part was durable; None where some rank's is not. Collective."""
    known = torch.tensor([float(durable is not None), -(durable or 0.0)], dtype=torch.float64)
    dist.all_reduce(known, dist.ReduceOp.MIN)
    return -float(known[1]) if known[0] else None
