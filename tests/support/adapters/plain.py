"""Plain torch: launch/train_plain.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import ftckpt.torch
from ftckpt.config import Config
from ftckpt.torch.hooks import follow
from ftckpt.torch.state import PlainState
from tests.support.adapters import ScriptJob
from tests.support.conformance.adapter import Adapter

TINY = ["--layers", "2", "--hidden", "32", "--seq", "32", "--global-batch", "8"]
CONFIGURATIONS: dict[str, tuple[int, tuple[str, ...]]] = {
    "none": (2, ("--wrap", "none", "--precision", "fp32", "--optimizer", "adam")),
    "ddp": (3, ("--wrap", "ddp", "--global-batch", "12")),
    "ddp-fp16-sgd": (
        2,
        ("--wrap", "ddp", "--precision", "fp16", "--loss-scale", "262144", "--optimizer", "sgd", "--freeze"),
    ),
    "fsdp2": (2, ("--wrap", "fsdp2")),
    "fsdp2-bf16": (3, ("--wrap", "fsdp2", "--precision", "bf16", "--global-batch", "12", "--freeze")),
    "hsdp": (4, ("--wrap", "fsdp2", "--replicas", "2")),
}


class PlainJob(ScriptJob):
    def __init__(self, argv: tuple[str, ...]) -> None:
        import train_plain

        args = train_plain.parse_args([*TINY, *argv, "--iterations", "1000"])
        super().__init__(train_plain, train_plain.build(args))

    @property
    def iteration(self) -> int:
        return self._job.progress.iteration

    def attach(self, config: Config) -> Any:
        job = self._job
        job.checkpointer = ftckpt.torch.attach(job.model, job.optimizer, job.scheduler, job.objects, config)
        job.checkpointer.restore()
        return job.checkpointer

    def state(self) -> Any:
        return PlainState(self._job.model, self._job.optimizer, self._job.scheduler, self._job.objects)

    def optimizers(self) -> list[Any]:
        return [self._job.optimizer]

    def listen(self, trainer: Any) -> tuple[()]:
        state = self.state()
        state.describe()
        follow(ftckpt.torch.patches, trainer, self._job.model, self._job.optimizer, state)
        return ()

    def remove_hooks(self) -> None:
        ftckpt.torch.patches.remove()

    def evaluate(self) -> None:
        job = self._job
        job.model.eval()
        self._script.loss_of(job, job.data.next_batch(1, job.args.micro_batch, 0, 1)[0].to(job.device))
        job.model.train()
        with torch.no_grad():
            self._script.loss_of(job, job.data.next_batch(1, job.args.micro_batch, 0, 1)[0].to(job.device))

    def add_parameter(self) -> None:
        getattr(self._job.model, "module", self._job.model).extra = torch.nn.Linear(2, 2, bias=False)


ADAPTERS = tuple(
    Adapter("plain", name, ranks, False, partial(PlainJob, argv), {"stand_in": False})
    for name, (ranks, argv) in CONFIGURATIONS.items()
)
