"""Jobs of all frameworks behind one interface: each adapter builds its example job of ``launch/``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from ftckpt.config import Config
from ftckpt.model.training_state import TrainingState
from ftckpt.session.checkpointer import Checkpointer
from tests.support import ds_jobs, jobs

PLAIN_TINY = ["--layers", "2", "--hidden", "32", "--seq", "32", "--global-batch", "8"]


class Job(Protocol):
    """One rank's job, built and ready to train."""

    @property
    def iteration(self) -> int:
        """Iterations that are done, those before a restore among them."""

    def attach(self, config: Config) -> Checkpointer:
        """Attach ftckpt and restore; from then on iterations end with a snapshot. Collective."""

    def train_iteration(self) -> Sequence[float | None]:
        """One iteration, up to the boundary and with it; returns loss and what else must be the same again."""

    def hashes(self) -> Mapping[str, str]:
        """Hashes of every tensor of this rank: weights, buffers, masters, moments, RNG."""

    def state(self) -> TrainingState:
        """The state as ``attach`` describes it."""

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The torch optimizers that step this rank's shard."""

    def listen(self, trainer: Any) -> Sequence[Callable[[], object]]:
        """Install the hooks of a session without one: they report to ``trainer``. Returns functions that remove one
        of two fences each, if there are two."""

    def remove_hooks(self) -> None:
        """Remove those hooks."""

    def evaluate(self) -> None:
        """A forward that trains nothing."""

    def add_parameter(self) -> None:
        """Give the model one more, ``extra.weight``, that needs gradients and that no optimizer steps."""


@dataclass(frozen=True)
class Adapter:
    """One framework in one configuration, such as ``tp2pp2``, unique within the framework. It is sent to every rank.

    ``masters``: weights are casts of masters. ``build`` makes the job on a rank, where torch.distributed is ready.
    ``pool`` are options of ``pool.spawn_ranks``.
    """

    framework: str
    configuration: str
    ranks: int
    masters: bool
    build: Callable[[], Job] = field(compare=False)
    pool: Mapping[str, Any] = field(default_factory=dict, compare=False)


class ScriptJob:
    """A job of one of the example scripts, for ``Job``.

    Args:
        script: the module, with ``train_step`` and ``final_hashes``.
        job: the job that its ``build`` returned.
    """

    def __init__(self, script: Any, job: Any) -> None:
        self.script = script
        self.job = job

    @property
    def iteration(self) -> int:
        return self.job.iteration  # type: ignore[no-any-return]

    def train_iteration(self) -> list[float | None]:
        metrics = self.script.train_step(self.job)
        if getattr(self.job, "checkpointer", None):  # DeepSpeed's engine steps by itself
            self.job.checkpointer.step(self.iteration)
        return [metrics["loss"], metrics["grad_norm"], metrics["lr"], metrics["loss_scale"]]

    def hashes(self) -> Mapping[str, str]:
        hashes: Mapping[str, str] = self.script.final_hashes(self.job)
        return hashes

    def _restored(self, checkpointer: Any) -> Any:
        self.job.checkpointer = checkpointer
        checkpointer.restore()
        return checkpointer


class DeepSpeedJob(ScriptJob):
    """launch/train_deepspeed.py."""

    def __init__(self, shape: ds_jobs.Shape) -> None:
        import ftckpt.deepspeed  # noqa: F401 - before the script registers its data

        super().__init__(ds_jobs.script(), ds_jobs.build(shape, [*ds_jobs.TINY, "--iterations", "1000"]))

    @property
    def iteration(self) -> int:
        return int(self.job.engine.global_steps)

    def attach(self, config: Config) -> Any:
        import ftckpt.deepspeed

        return ftckpt.deepspeed.attach(self.job.engine, config=config)

    def state(self) -> Any:
        from ftckpt.deepspeed.state import DeepSpeedState

        return DeepSpeedState(self.job.engine, {"data": self.job.data})

    def optimizers(self) -> list[Any]:
        from ftckpt.deepspeed.optimizers import inner

        return [inner(self.job.engine.optimizer)]

    def listen(self, trainer: Any) -> list[Callable[[], object]]:
        from ftckpt.deepspeed.active_engine import integration
        from ftckpt.deepspeed.hooks import EngineHooks
        from ftckpt.deepspeed.pipeline import follow_pipeline

        hooks = EngineHooks(integration.hooks, self.job.engine, trainer, lambda: None)
        if self.job.is_pipeline:
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
        job = self.job
        if job.is_pipeline:
            job.engine.eval_batch(job.batches)
            return
        tokens, labels = next(job.batches)
        job.engine.eval()
        job.engine(tokens.to(job.engine.device), labels.to(job.engine.device))
        job.engine.train()

    def add_parameter(self) -> None:
        self.job.engine.module.extra = torch.nn.Linear(2, 2, bias=False)


class MegatronJob(ScriptJob):
    """launch/train_gpt.py."""

    def __init__(self, argv: Sequence[str]) -> None:
        import train_gpt

        args = train_gpt.parse_args([*jobs.TINY, *argv, "--iterations", "1000"])
        super().__init__(train_gpt, train_gpt.build(args))
        self._objects = {"data": self.job.data, "progress": self.job.progress}

    def attach(self, config: Config) -> Any:
        import ftckpt.megatron

        job = self.job
        return self._restored(ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, self._objects, config))

    def state(self) -> Any:
        from ftckpt.megatron.state import MegatronState

        return MegatronState(self.job.model, self.job.optimizer, self.job.scheduler, self._objects)

    def optimizers(self) -> list[Any]:
        from ftckpt.megatron.optimizers import leaf_optimizers

        return [leaf.optimizer for leaf in leaf_optimizers(self.job.optimizer) if leaf.optimizer is not None]

    def listen(self, trainer: Any) -> list[Callable[[], object]]:
        from ftckpt.megatron import hooks, integration

        hooks.install()
        hooks.follow(trainer, self.job.optimizer, None)  # type: ignore[arg-type]
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

        job, args = self.job, self.job.args
        batches = [batch.cuda() for batch in job.data.next_batch(job.num_micro, args.micro_batch, 0, 1)]
        get_forward_backward_func()(
            forward_step_func=self.script.forward_step,
            data_iterator=[iter(batches) for _ in job.model],
            model=job.model,
            num_microbatches=job.num_micro,
            seq_length=args.seq,
            micro_batch_size=args.micro_batch,
            forward_only=True,
        )

    def add_parameter(self) -> None:
        jobs.add_parameter(self.job.model[0])


class PlainJob(ScriptJob):
    """launch/train_plain.py."""

    def __init__(self, argv: Sequence[str]) -> None:
        import train_plain

        args = train_plain.parse_args([*PLAIN_TINY, *argv, "--iterations", "1000"])
        super().__init__(train_plain, train_plain.build(args))

    @property
    def iteration(self) -> int:
        return self.job.progress.iteration  # type: ignore[no-any-return]

    def attach(self, config: Config) -> Any:
        import ftckpt.torch

        job = self.job
        return self._restored(ftckpt.torch.attach(job.model, job.optimizer, job.scheduler, job.objects, config))

    def state(self) -> Any:
        from ftckpt.torch.state import PlainState

        return PlainState(self.job.model, self.job.optimizer, self.job.scheduler, self.job.objects)

    def optimizers(self) -> list[Any]:
        return [self.job.optimizer]

    def listen(self, trainer: Any) -> tuple[()]:
        import ftckpt.torch
        from ftckpt.torch.hooks import follow

        state = self.state()
        state.describe()
        follow(ftckpt.torch.patches, trainer, self.job.model, self.job.optimizer, state)
        return ()

    def remove_hooks(self) -> None:
        import ftckpt.torch

        ftckpt.torch.patches.remove()

    def evaluate(self) -> None:
        job = self.job
        job.model.eval()
        self.script.loss_of(job, job.data.next_batch(1, job.args.micro_batch, 0, 1)[0].to(job.device))
        job.model.train()
        with torch.no_grad():
            self.script.loss_of(job, job.data.next_batch(1, job.args.micro_batch, 0, 1)[0].to(job.device))

    def add_parameter(self) -> None:
        getattr(self.job.model, "module", self.job.model).extra = torch.nn.Linear(2, 2, bias=False)


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
