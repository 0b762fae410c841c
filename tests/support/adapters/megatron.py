"""Megatron-core: launch/train_gpt.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ftckpt.config import Config
from tests.support import jobs
from tests.support.adapters import ScriptJob
from tests.support.conformance.adapter import Adapter

CONFIGURATIONS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp2pp2": (4, ("--tp", "2", "--pp", "2")),
    "dp2-fp16": (2, ("--precision", "fp16", "--loss-scale", "262144", "--loss-scale-window", "2")),
    "dp2-fp32": (2, ("--precision", "fp32", "--no-distributed-optimizer")),
    "ep2": (2, ("--ep", "2", "--num-experts", "4", "--router-bias")),
}


class MegatronJob(ScriptJob):
    def __init__(self, argv: tuple[str, ...]) -> None:
        import train_gpt

        args = train_gpt.parse_args([*jobs.TINY, *argv, "--iterations", "1000"])
        super().__init__(train_gpt, train_gpt.build(args))

    @property
    def iteration(self) -> int:
        return self._job.iteration

    def attach(self, config: Config) -> Any:
        import ftckpt.megatron

        job = self._job
        objects = {"data": job.data, "progress": job.progress}
        job.checkpointer = ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, objects, config)
        job.checkpointer.restore()
        return job.checkpointer

    def state(self) -> Any:
        from ftckpt.megatron.state import MegatronState

        objects = {"data": self._job.data, "progress": self._job.progress}
        return MegatronState(self._job.model, self._job.optimizer, self._job.scheduler, objects)

    def optimizers(self) -> list[Any]:
        from ftckpt.megatron.optimizers import leaf_optimizers

        return [leaf.optimizer for leaf in leaf_optimizers(self._job.optimizer) if leaf.optimizer is not None]

    def listen(self, trainer: Any) -> list[Callable[[], object]]:
        from ftckpt.megatron import door, hooks

        hooks.install()
        hooks.follow(trainer, self._job.optimizer, None)  # type: ignore[arg-type]
        outer, *inner = door.hooks.undo

        def without_inner() -> None:
            door.hooks.undo[1:] = []
            for undo in inner:
                undo()

        def without_outer() -> None:
            door.hooks.undo.remove(outer)
            outer()

        return [without_outer, without_inner]

    def remove_hooks(self) -> None:
        from ftckpt.megatron import door

        door.remove()

    def evaluate(self) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        job, args = self._job, self._job.args
        batch = job.data.next_batch(job.num_micro, args.micro_batch, 0, 1)
        get_forward_backward_func()(
            forward_step_func=self._script.forward_step,
            data_iterator=[iter(batch) for _ in job.model],
            model=job.model,
            num_microbatches=job.num_micro,
            seq_length=args.seq,
            micro_batch_size=args.micro_batch,
            forward_only=True,
        )

    def add_parameter(self) -> None:
        jobs.add_parameter(self._job.model[0])


ADAPTERS = tuple(
    Adapter("megatron", name, ranks, "fp32" not in name, partial(MegatronJob, argv))
    for name, (ranks, argv) in CONFIGURATIONS.items()
)
