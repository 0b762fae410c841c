"""Jobs that train on one device and time each iteration by part: a GPT in plain torch, ``launch/train_gpt.py``."""

from __future__ import annotations

import resource
import statistics
import time
import warnings
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from train_plain import Block


class Case(NamedTuple):
    """The size of a GPT; ``micro_batch`` and ``target_ms`` (of an iteration) are those of the plain job."""

    layers: int
    hidden: int
    heads: int
    micro_batch: int
    tokens: int
    words: int
    target_ms: int


CASES = {
    "launch": Case(24, 1024, 16, 1, 128, 257, 400),  # bound by the Python that launches kernels
    "compute": Case(24, 1024, 16, 8, 1024, 257, 400),  # bound by the device
    "large": Case(24, 2048, 16, 8, 1024, 50304, 1200),
    "tiny": Case(2, 64, 4, 2, 32, 257, 30),
}
PARTS = ("save", "launch", "fence", "optimizer", "wait")


class GPT(nn.Module):
    """The layers of ``launch/train_plain.py``, learned positions, tied embeddings."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(case.words, case.hidden), nn.Embedding(case.tokens, case.hidden)
        self.blocks = nn.ModuleList(Block(case.hidden, case.heads, 0.0) for _ in range(case.layers))
        self.norm = nn.LayerNorm(case.hidden)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


class Counters:
    """The iteration, as an object of the state."""

    iteration = 0

    def state_dict(self) -> dict[str, int]:
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.iteration = state["iteration"]


def switches() -> int:
    """How often this thread has waited, for the GIL above all: voluntary context switches."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class _Marks:
    """Boundaries between parts of an iteration, by the clocks of the training thread and, on a GPU, of its stream."""

    def __init__(self, on_cuda: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(4 if on_cuda else 0)]
        self._secs, self._cpu_secs, self._switches = list[float](), list[float](), list[int]()

    def __call__(self) -> None:
        if len(self._secs) < len(self._events):
            self._events[len(self._secs)].record()
        self._secs.append(time.perf_counter())
        self._cpu_secs.append(time.thread_time())
        self._switches.append(switches())

    def row(self) -> dict[str, float]:
        """Seconds by part, and the waits between boundary and fence."""
        secs, cpu = self._secs, self._cpu_secs
        row = {part: end - begin for part, begin, end in zip(PARTS, secs, secs[1:], strict=False)}
        row |= {"total": secs[-1] - secs[0], "blocked_cpu": cpu[1] - cpu[0] + cpu[3] - cpu[2]}
        row["waits"] = self._switches[2] - self._switches[1]
        if self._events:
            row["gap_boundary"], row["gap_fence"] = (
                self._events[at].elapsed_time(self._events[at + 1]) / 1e3 for at in (0, 2)
            )
        return row


class PlainJob:
    """A GPT in plain torch: fp32 weights and moments, bf16 compute, gradients accumulated over micro-batches."""

    framework = "plain"

    def __init__(self, name: str, device: torch.device) -> None:
        case = CASES[name]
        self.device, self.on_cuda, self.counters = device, device.type == "cuda", Counters()
        torch.manual_seed(1)
        with torch.device(device):
            self.net = GPT(case).eval()  # no calls of dropout
            self.ids = torch.randint(0, case.words, (case.micro_batch, case.tokens + 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=self.on_cuda or None)
        self.num_micros = 2
        secs = statistics.median([self.iterate()["total"] for _ in range(5)])
        self.num_micros = max(2, round(2 * case.target_ms / 1e3 / secs))

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What every system copies, by name; delete the attribute where the optimizer has replaced them."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.net.named_parameters():
            state = self.optimizer.state[parameter]
            found |= {name: parameter.detach(), name + ".m": state["exp_avg"], name + ".v": state["exp_avg_sq"]}
        return found

    def iterate(self, system: Any = None) -> dict[str, float]:
        """One iteration, with a snapshot where a system is given; its times in seconds."""
        mark = _Marks(self.on_cuda)
        mark()
        if system is not None:
            system.save(self.counters.iteration)
        mark()
        loss = self._compute()
        mark()
        if system is not None:
            system.fence()
        mark()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        mark()
        float(loss.detach())  # as a script does that logs its loss
        mark()
        self.counters.iteration += 1
        return mark.row()

    def attach(self, config: Any) -> Any:
        import ftckpt.torch

        return ftckpt.torch.attach(self.net, self.optimizer, None, {"counters": self.counters}, config)

    def detach(self) -> None:
        import ftckpt.torch

        ftckpt.torch.remove()

    def _compute(self) -> torch.Tensor:
        for _ in range(self.num_micros):
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = self.net(self.ids[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), self.ids[:, 1:].flatten())
            loss.backward()
        return loss


class MegatronJob:
    """``launch/train_gpt.py`` with one rank, unfused; the fence is ftckpt's own hook on the optimizer."""

    framework = "megatron"

    def __init__(self, name: str, device: torch.device) -> None:
        import train_gpt

        warnings.filterwarnings("ignore", module="megatron")
        case = CASES[name]
        self.device, self.on_cuda, self._script = device, device.type == "cuda", train_gpt
        size = [f"--layers={case.layers}", f"--hidden={case.hidden}", f"--heads={case.heads}"]
        size += [
            f"--seq={max(case.tokens, 32) * 4}",
            "--micro-batch=4",
            f"--global-batch={16 if self.on_cuda else 4}",
        ]
        self._job = train_gpt.build(train_gpt.parse_args(size))
        self.num_micros, self.counters = self._job.num_micro, self._job.progress
        for _ in range(3):
            train_gpt.train_step(self._job)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What every system copies, by name; delete the attribute where the optimizer has replaced them."""
        found = {}
        for optimizer in getattr(self._job.optimizer, "chained_optimizers", [self._job.optimizer]):
            for index, (parameter, state) in enumerate(optimizer.optimizer.state.items()):
                values = {"p": parameter.detach(), **state}
                found |= {f"{index}.{k}": v for k, v in values.items() if torch.is_tensor(v) and v.numel() > 1}
        return found

    def iterate(self, system: Any = None) -> dict[str, float]:
        """One iteration, with a snapshot where a system is given; its times in seconds."""
        begin, cpu = time.perf_counter(), time.thread_time()
        if system is not None:
            system.save(self._job.iteration)
        row = {"save": time.perf_counter() - begin, "blocked_cpu": time.thread_time() - cpu, "fence": 0.0}
        self._script.train_step(self._job)
        if self.on_cuda:
            torch.cuda.synchronize()
        row["total"] = time.perf_counter() - begin
        return row

    def attach(self, config: Any) -> Any:
        import ftckpt.megatron

        job, objects = self._job, {"data": self._job.data, "progress": self._job.progress}
        return ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, objects, config=config)

    def detach(self) -> None:
        import ftckpt.megatron

        ftckpt.megatron.remove()


Job = PlainJob | MegatronJob
JOBS: dict[str, type[PlainJob] | type[MegatronJob]] = {"plain": PlainJob, "megatron": MegatronJob}


def synchronize(job: Job) -> None:
    """Wait for the device, if the job has one."""
    if job.on_cuda:
        torch.cuda.synchronize()
