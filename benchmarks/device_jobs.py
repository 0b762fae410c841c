"""Jobs that train on one device and time each iteration by part: a GPT in plain torch, ``launch/train_gpt.py``."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import jobs
from benchmarks.jobs import import_script


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
        block = import_script("train_plain").Block
        self.token, self.position = nn.Embedding(case.words, case.hidden), nn.Embedding(case.tokens, case.hidden)
        self.blocks = nn.ModuleList(block(case.hidden, case.heads, 0.0) for _ in range(case.layers))
        self.norm = nn.LayerNorm(case.hidden)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


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
        # Voluntary: how often this thread has waited, mostly for the GIL.
        self._switches.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw)

    def row(self) -> dict[str, float]:
        """Seconds by part, and the waits between boundary and fence."""
        secs, cpu = self._secs, self._cpu_secs
        row = {part: end - begin for part, begin, end in zip(PARTS, secs, secs[1:], strict=False)}
        row |= {"total": secs[-1] - secs[0], "blocked_cpu": cpu[1] - cpu[0] + cpu[3] - cpu[2]}
        row["waits"] = self._switches[2] - self._switches[1]
        if self._events:
            gaps = (self._events[at].elapsed_time(self._events[at + 1]) / 1e3 for at in (0, 2))
            row["gap_boundary"], row["gap_fence"] = gaps
        return row


class PlainJob(jobs.TrainingJob):
    """A GPT in plain torch: fp32 weights and moments, bf16 compute, gradients accumulated over micro-batches."""

    def __init__(self, name: str, device: torch.device) -> None:
        case = CASES[name]
        self._device, self.on_cuda, self._iteration = device, device.type == "cuda", 0
        torch.manual_seed(1)
        with torch.device(device):
            self._net = GPT(case).eval()  # no calls of dropout
            self._ids = torch.randint(0, case.words, (case.micro_batch, case.tokens + 1))
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=1e-4, fused=self.on_cuda or None)
        self.num_micros = 2
        secs = statistics.median([self.iterate()["total"] for _ in range(5)])
        self.num_micros = max(2, round(2 * case.target_ms / 1e3 / secs))

    @property
    def iteration(self) -> int:
        return self._iteration

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [self._optimizer]

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return _without_scalars(self.optimizer_state())

    def train(self, fence: Callable[[], object] = lambda: None) -> None:
        self.iterate()

    def iterate(self, system: Any = None) -> dict[str, float]:
        """One iteration, with a snapshot if a system is given; its times in seconds."""
        mark = _Marks(self.on_cuda)
        mark()
        if system is not None:
            system.save(self._iteration)
        mark()
        loss = self._compute()
        mark()
        if system is not None:
            system.fence()
        mark()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        mark()
        float(loss.detach())  # as a script does that logs its loss
        mark()
        self._iteration += 1
        return mark.row()

    def _compute(self) -> torch.Tensor:
        for _ in range(self.num_micros):
            with torch.autocast(self._device.type, torch.bfloat16):
                logits = self._net(self._ids[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), self._ids[:, 1:].flatten())
            loss.backward()
        return loss

    def attach(self, config: Any) -> Any:
        import ftckpt.torch

        return ftckpt.torch.attach(self._net, self._optimizer, None, {"counters": self}, config)

    def detach(self) -> None:
        import ftckpt.torch

        ftckpt.torch.remove()

    def state_dict(self) -> dict[str, int]:
        return {"iteration": self._iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._iteration = state["iteration"]


class MegatronJob(jobs.MegatronJob):
    """``launch/train_gpt.py`` with one rank, unfused."""

    def __init__(self, name: str, device: torch.device) -> None:
        case, self.on_cuda = CASES[name], device.type == "cuda"
        size = {"layers": case.layers, "hidden": case.hidden, "heads": case.heads, "seq": max(case.tokens, 32) * 4}
        size |= {"micro-batch": 4, "global-batch": 16 if self.on_cuda else 4}
        super().__init__([f"--{flag}={value}" for flag, value in size.items()])
        self.num_micros = self.job.num_micro
        for _ in range(3):
            self.train()

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return _without_scalars(self.optimizer_state())

    def iterate(self, system: Any = None) -> dict[str, float]:
        """One iteration, with a snapshot if a system is given; its times in seconds."""
        begin, cpu = time.perf_counter(), time.thread_time()
        if system is not None:
            system.save(self.iteration)
        row = {"save": time.perf_counter() - begin, "blocked_cpu": time.thread_time() - cpu, "fence": 0.0}
        self.train()
        if self.on_cuda:
            torch.cuda.synchronize()
        row["total"] = time.perf_counter() - begin
        return row

    def detach(self) -> None:
        import ftckpt.megatron

        ftckpt.megatron.remove()


def _without_scalars(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor.numel() > 1}


Job = PlainJob | MegatronJob
JOBS: dict[str, type[PlainJob] | type[MegatronJob]] = {"plain": PlainJob, "megatron": MegatronJob}


def synchronize(job: Job) -> None:
    """Waits for the device, if the job has one."""
    if job.on_cuda:
        torch.cuda.synchronize()
