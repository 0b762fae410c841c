"""DeepSpeed: launch/train_deepspeed.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ftckpt.config import Config
from tests.support import ds_jobs
from tests.support.adapters import ScriptJob
from tests.support.conformance.adapter import Adapter

# Three replicas where they cost no more than two: sums of two do not depend on the order of their summands.
CONFIGURATIONS: dict[str, ds_jobs.Shape] = {
    "zero0": ds_jobs.SHAPES["fp32"],
    "bf16": replace(ds_jobs.SHAPES["bf16"], ranks=3),
    "fp16": ds_jobs.SHAPES["fp16"],
    "bf16-optimizer": ds_jobs.SHAPES["bf16-optimizer"],
    "zero1": replace(ds_jobs.SHAPES["zero1"], ranks=3),
    "zero2": replace(ds_jobs.SHAPES["zero2"], ranks=3),
    "zero3": ds_jobs.SHAPES["zero3"],
    # Four, since three leave padding in the shards, whose bytes mean nothing.
    "zero3-four": replace(ds_jobs.SHAPES["zero3"], ranks=4),
    "offload": ds_jobs.SHAPES["zero2-offload"],
    "moe": ds_jobs.SHAPES["moe-ep2"],
    "pp2dp2": ds_jobs.SHAPES["pp2-dp2"],
    "2x2x2": ds_jobs.SHAPES["pp2-tp2-dp2"],
}


class DeepSpeedJob(ScriptJob):
    def __init__(self, shape: ds_jobs.Shape) -> None:
        import ftckpt.deepspeed  # noqa: F401 - before the script registers its data

        super().__init__(ds_jobs.script(), ds_jobs.build(shape, [*ds_jobs.TINY, "--iterations", "1000"]))

    @property
    def iteration(self) -> int:
        return int(self._job.engine.global_steps)

    def attach(self, config: Config) -> Any:
        import ftckpt.deepspeed

        return ftckpt.deepspeed.attach(self._job.engine, config=config)

    def state(self) -> Any:
        from ftckpt.deepspeed.state import DeepSpeedState

        return DeepSpeedState(self._job.engine, {"data": self._job.data})

    def optimizers(self) -> list[Any]:
        from ftckpt.deepspeed.optimizers import inner

        return [inner(self._job.engine.optimizer)]

    def listen(self, trainer: Any) -> list[Callable[[], object]]:
        from ftckpt.deepspeed.active_engine import door
        from ftckpt.deepspeed.hooks import EngineHooks
        from ftckpt.deepspeed.pipeline import follow_pipeline

        hooks = EngineHooks(door.hooks, self._job.engine, trainer, lambda: None)
        if self._job.is_pipeline:
            follow_pipeline(hooks, lambda given: given)
        else:
            hooks.follow_micro_batches()
        hooks.see_pauses()
        hooks.fence_optimizer()

        def without(index: int) -> None:
            door.hooks.undo.pop(index)()

        return [partial(without, -2), partial(without, -1)]

    def remove_hooks(self) -> None:
        from ftckpt.deepspeed.active_engine import door

        door.hooks.remove()

    def evaluate(self) -> None:
        job = self._job
        if job.is_pipeline:
            job.engine.eval_batch(job.batches)
            return
        tokens, labels = next(job.batches)
        job.engine.eval()
        job.engine(tokens, labels)
        job.engine.train()

    def add_parameter(self) -> None:
        import torch

        self._job.engine.module.extra = torch.nn.Linear(2, 2, bias=False)


ADAPTERS = tuple(
    Adapter("deepspeed", name, shape.ranks, name != "zero0", partial(DeepSpeedJob, shape), {"stand_in": False})
    for name, shape in CONFIGURATIONS.items()
)
