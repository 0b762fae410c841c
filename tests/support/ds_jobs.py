"""Real DeepSpeed jobs on the ranks of multi-process tests, with ftckpt or without."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.faults import Fault
from tests.support.jobs import Outcome
from tests.support.pool import RankResult, run_ranks

TINY = ["--layers", "2", "--hidden", "32", "--seq", "32"]
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": None,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 4}},
}
SMALL: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": None,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
}
"""The configuration of models of some rows."""
BF16 = {"bf16": {"enabled": True}}


def fp16(power: int) -> dict[str, Any]:
    """Loss scaling that begins at 2 ** power, too high, so that steps are skipped."""
    return {"fp16": {"enabled": True, "initial_scale_power": power, "loss_scale_window": 2, "hysteresis": 1}}


@dataclass(frozen=True)
class Shape:
    """One configuration: ranks, arguments of train_deepspeed, and what is added to BASE."""

    ranks: int
    argv: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        merged = {**BASE, **self.config}
        return {name: value for name, value in merged.items() if value != "none"}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """Settings of ZeRO that make a tiny model have several buckets."""
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 5000, "allgather_bucket_size": 5000, **more}}


SHAPES = {
    "fp32": Shape(2),
    "fp32-sgd": Shape(2, ["--optimizer", "sgd", "--freeze"], {"optimizer": "none", "scheduler": "none"}),
    "fp16": Shape(2, config=fp16(36)),
    "bf16": Shape(2, config=BF16),
    "zero1": Shape(2, config=BF16 | zero(1)),
    "zero1-fp16": Shape(2, config=fp16(19) | zero(1)),
    "zero1-fp32": Shape(2, config=zero(1)),
    "zero2": Shape(2, ["--tie"], BF16 | zero(2, overlap_comm=True)),
    "zero2-offload": Shape(2, config=BF16 | zero(2, offload_optimizer={"device": "cpu"})),
    "zero3": Shape(2, config=BF16 | zero(3, stage3_param_persistence_threshold=100)),
    "zero3-fp32": Shape(2, ["--freeze"], zero(3, stage3_param_persistence_threshold=0)),
    "zero3-tp2": Shape(4, ["--tp", "2"], BF16 | zero(3, stage3_param_persistence_threshold=100)),
    "bf16-optimizer": Shape(2, config=BF16 | zero(1) | {"data_types": {"grad_accum_dtype": "fp32"}}),
    "pp2-dp2": Shape(4, ["--pp", "2", "--tie"], BF16 | zero(1)),
    "pp2-fp16": Shape(2, ["--pp", "2"], fp16(36)),
    "pp4": Shape(4, ["--pp", "4", "--layers", "4"], {"gradient_accumulation_steps": 4}),
    "pp2-tp2-dp2": Shape(8, ["--pp", "2", "--tp", "2", "--tie"], BF16 | zero(1)),
    "moe-ep2": Shape(2, ["--num-experts", "4", "--ep", "2"], BF16),
    "moe-ep2-zero2": Shape(4, ["--num-experts", "4", "--ep", "2"], BF16 | zero(2)),
}
"""Every configuration that ftckpt supports."""


@dataclass(frozen=True)
class Run:
    """One attempt of a job.

    ``settings`` are fields of the section "ftckpt", None trains without it. ``end`` is what ranks do after iteration
    ``until``: ``close``, ``keep`` (leave the arenas) or ``die``.
    """

    shape: Shape
    until: int
    settings: Mapping[str, Any] | None = None
    argv: Sequence[str] = ()
    faults: Sequence[Fault] = ()
    end: str = "close"


def script() -> Any:
    """The module of the example, over the stand-in."""
    from tests.standin import deepspeed as standin

    standin.install()
    import train_deepspeed

    return train_deepspeed


def build(shape: Shape, argv: Sequence[str] = TINY, **more: Any) -> Any:
    """The example job of a configuration; ``more`` comes into its JSON."""
    example = script()
    return example.build(example.parse_args([*argv, *shape.argv]), {**shape.json(), **more})


def train(rank: int, world_size: int, run: Run) -> Outcome:
    """Build the example job after importing ``ftckpt.deepspeed``, train and end as ``run`` requests."""
    from tests.support import faults

    example, config = script(), {}
    if run.settings is not None:
        import ftckpt.deepspeed  # noqa: F401 - the integration

        config["ftckpt"] = {"enabled": True, "node": "node", "protect": "none", "interval": 1, **run.settings}
    faults.install(run.faults, rank, world_size)
    job = build(run.shape, [*TINY, *run.argv, "--iterations", str(run.until)], **config)
    start = job.engine.global_steps or None
    rows = [(m["iteration"], m["loss"], m["grad_norm"]) for m in example.train(job)]
    if run.end == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    hashes = example.final_hashes(job)
    if run.settings is not None and run.end == "close":
        job.engine.destroy()
    return Outcome(start, rows, hashes)


def outcomes(run: Run, timeout_secs: float = 120.0) -> list[Outcome]:
    """Run to the end on all ranks."""
    results = run_ranks(train, run.shape.ranks, run, timeout_secs=timeout_secs, stand_in=False)
    return [result.value for result in results]


def broken(run: Run, timeout_secs: float = 120.0, grace_secs: float = 3.0) -> list[RankResult]:
    """Run an attempt that is meant to fail."""
    return run_ranks(
        train, run.shape.ranks, run, timeout_secs=timeout_secs, stand_in=False,
        expect_failures=True, grace_secs=grace_secs,
    )  # fmt: skip
