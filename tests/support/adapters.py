"""The frameworks as the conformance suite sees them: each adapter builds its example job of ``launch/``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ftckpt.config import Config
from tests.support import ds_jobs, jobs
from tests.support.conformance import Adapter

PLAIN_TINY = ["--layers", "2", "--hidden", "32", "--seq", "32", "--global-batch", "8"]


class ScriptJob:
    """A job of one of the example scripts, for ``tests.support.conformance.Job``.

    Args:
        script: the module, with ``train_step`` and ``final_hashes``.
        job: what its ``build`` made.
    """

    def __init__(self, script: Any, job: Any) -> None:
        self._script = script
        self._job = job

    @property
    def iteration(self) -> int:
        return self._job.iteration  # type: ignore[no-any-return]

    def train_iteration(self) -> list[float | None]:
        metrics = self._script.train_step(self._job)
        if getattr(self._job, "checkpointer", None):  # DeepSpeed's engine steps by itself
            self._job.checkpointer.step(self.iteration)
        return [metrics["loss"], metrics["grad_norm"], metrics["lr"], metrics["loss_scale"]]

    def hashes(self) -> Mapping[str, str]:
        hashes: Mapping[str, str] = self._script.final_hashes(self._job)
        return hashes

    def _restored(self, checkpointer: Any) -> Any:
        self._job.checkpointer = checkpointer
        checkpointer.restore()
        return checkpointer


class DeepSpeedJob(ScriptJob):
    """launch/train_deepspeed.py."""

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
        from ftckpt.deepspeed.active_engine import integration
        from ftckpt.deepspeed.hooks import EngineHooks
        from ftckpt.deepspeed.pipeline import follow_pipeline

        hooks = EngineHooks(integration.hooks, self._job.engine, trainer, lambda: None)
        if self._job.is_pipeline:
            follow_pipeline(hooks, lambda given: given)
        else:
            hooks.follow_micro_batches()
        hooks.see_pauses()
        hooks.fence_optimizer()

        def without(index: int) -> None:
            integration.hooks.undo.pop(index)()

        return [partial(without, -2), partial(without, -1)]

    def remove_hooks(self) -> None:
        from ftckpt.deepspeed.active_engine import integration

        integration.hooks.remove()

    def evaluate(self) -> None:
        job = self._job
        if job.is_pipeline:
            job.engine.eval_batch(job.batches)
            return
        tokens, labels = next(job.batches)
        job.engine.eval()
        job.engine(tokens.to(job.engine.device), labels.to(job.engine.device))
        job.engine.train()

    def add_parameter(self) -> None:
        import torch

        self._job.engine.module.extra = torch.nn.Linear(2, 2, bias=False)


class MegatronJob(ScriptJob):
    """launch/train_gpt.py."""

    def __init__(self, argv: Sequence[str]) -> None:
        import train_gpt

        args = train_gpt.parse_args([*jobs.TINY, *argv, "--iterations", "1000"])
        super().__init__(train_gpt, train_gpt.build(args))
        self._objects = {"data": self._job.data, "progress": self._job.progress}

    def attach(self, config: Config) -> Any:
        import ftckpt.megatron

        job = self._job
        return self._restored(ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, self._objects, config))

    def state(self) -> Any:
        from ftckpt.megatron.state import MegatronState

        return MegatronState(self._job.model, self._job.optimizer, self._job.scheduler, self._objects)

    def optimizers(self) -> list[Any]:
        from ftckpt.megatron.optimizers import leaf_optimizers

        return [leaf.optimizer for leaf in leaf_optimizers(self._job.optimizer) if leaf.optimizer is not None]

    def listen(self, trainer: Any) -> list[Callable[[], object]]:
        from ftckpt.megatron import hooks, integration

        hooks.install()
        hooks.follow(trainer, self._job.optimizer, None)  # type: ignore[arg-type]
        outer, *inner = integration.hooks.undo

        def without_inner() -> None:
            integration.hooks.undo[1:] = []
            for undo in inner:
                undo()

        def without_outer() -> None:
            integration.hooks.undo.remove(outer)
            outer()

        return [without_outer, without_inner]

    def remove_hooks(self) -> None:
        from ftckpt.megatron import integration

        integration.remove()

    def evaluate(self) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        job, args = self._job, self._job.args
        batches = [batch.cuda() for batch in job.data.next_batch(job.num_micro, args.micro_batch, 0, 1)]
        get_forward_backward_func()(
            forward_step_func=self._script.forward_step,
            data_iterator=[iter(batches) for _ in job.model],
            model=job.model,
            num_microbatches=job.num_micro,
            seq_length=args.seq,
            micro_batch_size=args.micro_batch,
            forward_only=True,
        )

    def add_parameter(self) -> None:
        jobs.add_parameter(self._job.model[0])


class PlainJob(ScriptJob):
    """launch/train_plain.py."""

    def __init__(self, argv: Sequence[str]) -> None:
        import train_plain

        args = train_plain.parse_args([*PLAIN_TINY, *argv, "--iterations", "1000"])
        super().__init__(train_plain, train_plain.build(args))

    @property
    def iteration(self) -> int:
        return self._job.progress.iteration  # type: ignore[no-any-return]

    def attach(self, config: Config) -> Any:
        import ftckpt.torch

        job = self._job
        return self._restored(ftckpt.torch.attach(job.model, job.optimizer, job.scheduler, job.objects, config))

    def state(self) -> Any:
        from ftckpt.torch.state import PlainState

        return PlainState(self._job.model, self._job.optimizer, self._job.scheduler, self._job.objects)

    def optimizers(self) -> list[Any]:
        return [self._job.optimizer]

    def listen(self, trainer: Any) -> tuple[()]:
        import ftckpt.torch
        from ftckpt.torch.hooks import follow

        state = self.state()
        state.describe()
        follow(ftckpt.torch.patches, trainer, self._job.model, self._job.optimizer, state)
        return ()

    def remove_hooks(self) -> None:
        import ftckpt.torch

        ftckpt.torch.patches.remove()

    def evaluate(self) -> None:
        import torch

        job = self._job
        job.model.eval()
        self._script.loss_of(job, job.data.next_batch(1, job.args.micro_batch, 0, 1)[0].to(job.device))
        job.model.train()
        with torch.no_grad():
            self._script.loss_of(job, job.data.next_batch(1, job.args.micro_batch, 0, 1)[0].to(job.device))

    def add_parameter(self) -> None:
        import torch

        getattr(self._job.model, "module", self._job.model).extra = torch.nn.Linear(2, 2, bias=False)


# Three replicas where they cost no more than two: sums of two do not depend on the order of their summands. Four of
# ZeRO-3, since three leave padding in the shards, whose bytes mean nothing.
_SHAPES = {
    "zero0": ds_jobs.SHAPES["fp32"], "bf16": replace(ds_jobs.SHAPES["bf16"], ranks=3),
    "fp16": ds_jobs.SHAPES["fp16"], "zero1": replace(ds_jobs.SHAPES["zero1"], ranks=3),
    "bf16-optimizer": ds_jobs.SHAPES["bf16-optimizer"],
    "zero2": replace(ds_jobs.SHAPES["zero2"], ranks=3), "zero3": ds_jobs.SHAPES["zero3"],
    "zero3-four": replace(ds_jobs.SHAPES["zero3"], ranks=4), "offload": ds_jobs.SHAPES["zero2-offload"],
    "moe": ds_jobs.SHAPES["moe-ep2"], "pp2dp2": ds_jobs.SHAPES["pp2-dp2"], "2x2x2": ds_jobs.SHAPES["pp2-tp2-dp2"],
}  # fmt: skip
_FP16 = ("--precision", "fp16", "--loss-scale", "262144")
_MEGATRON: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp2pp2": (4, ("--tp", "2", "--pp", "2")),
    "dp2-fp16": (2, (*_FP16, "--loss-scale-window", "2")),
    "dp2-fp32": (2, ("--precision", "fp32", "--no-distributed-optimizer")),
    "ep2": (2, ("--ep", "2", "--num-experts", "4", "--router-bias")),
}
_PLAIN: dict[str, tuple[int, tuple[str, ...]]] = {
    "none": (2, ("--wrap", "none", "--precision", "fp32", "--optimizer", "adam")),
    "ddp": (3, ("--wrap", "ddp", "--global-batch", "12")),
    "ddp-fp16-sgd": (2, ("--wrap", "ddp", *_FP16, "--optimizer", "sgd", "--freeze")),
    "fsdp2": (2, ("--wrap", "fsdp2")),
    "fsdp2-bf16": (3, ("--wrap", "fsdp2", "--precision", "bf16", "--global-batch", "12", "--freeze")),
    "hsdp": (4, ("--wrap", "fsdp2", "--replicas", "2")),
}
_BARE = {"stand_in": False}

ADAPTERS = tuple(
    adapter
    for adapter in (
        *(Adapter("megatron", n, r, "fp32" not in n, partial(MegatronJob, a)) for n, (r, a) in _MEGATRON.items()),
        *(Adapter("plain", n, r, False, partial(PlainJob, a), _BARE) for n, (r, a) in _PLAIN.items()),
        *(
            Adapter("deepspeed", n, s.ranks, n != "zero0", partial(DeepSpeedJob, s), _BARE)
            for n, s in _SHAPES.items()
        ),
    )
    if adapter.framework == "plain" or importlib.util.find_spec(adapter.framework) is not None
)
"""All configurations of the frameworks that are installed."""
