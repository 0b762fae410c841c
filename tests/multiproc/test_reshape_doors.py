"""Jobs of DeepSpeed and of plain torch restart from memory in another layout: every element of every tensor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ftckpt.torch
from ftckpt.config import Config
from ftckpt.torch.state import PlainState
from tests.support.ds_jobs import BASE, BF16, fp16, zero
from tests.support.pool import RankFailure, run_ranks
from tests.support.reshaping import CONSUMED, ITERATION, STEP, fill, wrong
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

NOISE = 1e-4
"""Relative; products of fp32 numbers are summed in another order."""
EPSILON = 2.0**-17
ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
FUSED = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
"""What DeepSpeed compiles, which takes minutes: it counts its steps in numbers of Python's."""
DEEPSPEED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fp32-dp2": (2, "", {}),
    "fp32-dp4": (4, "", {}),
    "fp32-zero1-dp2": (2, "", zero(1)),
    "fp32-zero3-dp4": (4, "", zero(3, stage3_param_persistence_threshold=100)),
    "fp16-dp2": (2, "", fp16(8)),
    "fp16-zero2-dp3": (3, "", fp16(8) | zero(2)),
    "zero1-dp2": (2, "", BF16 | zero(1)),
    "zero1-dp3": (3, "", BF16 | zero(1)),
    "zero2-dp4": (4, "", BF16 | zero(2)),
    "zero2-offload-dp2": (2, "", BF16 | zero(2, offload_optimizer={"device": "cpu"})),
    "zero3-dp1": (1, "", BF16 | zero(3)),
    "zero3-dp4": (4, "", BF16 | zero(3, stage3_param_persistence_threshold=100)),
    "bf16-optimizer-dp2": (2, "", BF16 | zero(1) | ACCUMULATION),
    "zero3-tp2-dp2": (4, "--tp 2", BF16 | zero(3)),
    "zero1-tp2-dp1": (2, "--tp 2", BF16 | zero(1)),
    "pp2-dp2": (4, "--pp 2", BF16 | zero(1)),
    "pp1-dp2": (2, "--pp 1", BF16 | zero(1)),
    "pp4-dp1": (4, "--pp 4", BF16),
    "pp2-tp2": (4, "--pp 2 --tp 2", BF16 | zero(1)),
    "ep2": (2, "--num-experts 4 --ep 2", BF16 | zero(1)),
    "ep1": (2, "--num-experts 4", BF16 | zero(2)),
    "ep4": (4, "--num-experts 4 --ep 4", BF16),
    "fused-zero1-dp2": (2, "", BF16 | zero(1) | FUSED),
    "cpu-adam-zero3-dp4": (4, "", BF16 | zero(3, offload_optimizer={"device": "cpu"}, sub_group_size=500) | FUSED),
}
"""Ranks, arguments of train_deepspeed, and its configuration."""
PLAIN = ("none1", "ddp2", "ddp3", "fsdp2", "fsdp3", "fsdp4", "hsdp2x2", "tp2x2")
"""How ranks divide the model, and their number."""

PAIRS = [
    ("zero1-dp2", "zero2-dp4"),
    ("zero1-dp2", "zero3-dp1"),
    ("zero1-dp3", "bf16-optimizer-dp2"),
    ("zero3-dp4", "zero1-dp3"),
    ("zero3-dp4", "zero3-tp2-dp2"),
    ("zero3-tp2-dp2", "zero1-dp2"),
    ("zero1-tp2-dp1", "zero2-dp4"),
    ("bf16-optimizer-dp2", "zero3-dp4"),
    ("zero2-offload-dp2", "zero1-dp3"),
    ("fp32-dp2", "fp32-zero1-dp2"),
    ("fp32-dp2", "fp32-zero3-dp4"),
    ("fp32-zero1-dp2", "fp32-dp4"),
    ("fp16-dp2", "fp16-zero2-dp3"),
    ("pp2-dp2", "pp4-dp1"),
    ("pp2-dp2", "pp2-tp2"),
    ("pp4-dp1", "pp1-dp2"),
    ("pp2-tp2", "pp2-dp2"),
    ("ep2", "ep4"),
    ("ep2", "ep1"),
    ("ep4", "ep2"),
    ("fused-zero1-dp2", "cpu-adam-zero3-dp4"),
    ("cpu-adam-zero3-dp4", "fused-zero1-dp2"),
    ("ddp2", "ddp3"),
    ("ddp3", "fsdp4"),
    ("fsdp4", "ddp2"),
    ("fsdp3", "hsdp2x2"),
    ("hsdp2x2", "fsdp2"),
    ("fsdp2", "tp2x2"),
    ("tp2x2", "none1"),
    ("none1", "fsdp3"),
]
QUICK = [
    ("zero1-dp2", "zero2-dp4"),
    ("zero3-dp4", "zero3-tp2-dp2"),
    ("fp32-dp2", "fp32-zero1-dp2"),
    ("fp32-zero1-dp2", "fp32-dp4"),
    ("pp2-dp2", "pp4-dp1"),
    ("ep2", "ep4"),
    ("ddp3", "fsdp4"),
    ("tp2x2", "none1"),
]


@pytest.fixture
def settings(arena_root: Path) -> dict[str, Any]:
    small = {"chunk_size": "64KiB", "objects_size": "1MiB", "slots": 2, "protect": "none", "start_timeout_secs": 60.0}
    return {"job": "test", "node": "node", "arena": str(arena_root), **small}


OPTIONS: dict[str, Any] = {"stand_in": False, "timeout_secs": 600.0, "pg_timeout_secs": 600.0}


def ranks_of(layout: str) -> int:
    if layout in DEEPSPEED:
        return DEEPSPEED[layout][0]
    sizes = [int(size) for size in re.findall(r"\d+", layout)]
    return sizes[0] * (sizes[1] if len(sizes) > 1 else 1)


class DeepSpeedJob:
    """The example job under the door, restored as soon as it is made."""

    def __init__(self, layout: str, settings: dict[str, Any], fills: bool, argv: str = "", config: Any = None):
        from tests.support.standin import deepspeed as standin

        standin.install()
        import train_deepspeed

        import ftckpt.deepspeed  # noqa: F401 - the door

        _, sizes, of_layout = DEEPSPEED[layout]
        small = "--layers 4 --hidden 16 --heads 4 --seq 16 --iterations 99 --dropout 0"
        args = train_deepspeed.parse_args([*small.split(), *sizes.split(), *argv.split()])
        steps = {"gradient_accumulation_steps": 2 if fills else 1}
        whole = {**BASE, **of_layout, **steps, **(config or {}), "ftckpt": {"enabled": True, **settings}}
        whole = {name: value for name, value in whole.items() if value != "none"}
        self.job = train_deepspeed.build(args, whole)
        self.engine = self.job.engine
        self.start = self.engine.global_steps or None
        self._step = train_deepspeed.train_step
        if fills:
            fill(self.describe())

    def describe(self) -> Any:
        from ftckpt.deepspeed.state import DeepSpeedState

        return DeepSpeedState(self.engine, {}).describe()

    def advance(self) -> None:
        """As if it had trained."""
        from ftckpt.deepspeed import optimizers

        with torch.no_grad():
            optimizers.spread(self.engine.optimizer)
        inner = optimizers.inner(self.engine.optimizer)
        for group in inner.param_groups:
            group["eps"] = EPSILON
        for state in inner.state.values():
            if isinstance(state.get("step"), int):
                state["step"] = int(STEP)
        self.engine.global_steps, self.engine.micro_steps = ITERATION, 2 * ITERATION
        self.job.data.consumed_samples = CONSUMED

    def snapshot(self) -> None:
        from ftckpt.deepspeed.active_engine import door

        door.checkpointer.step(ITERATION)
        self.leave()

    def leave(self) -> None:
        """Its snapshots stay in memory."""
        from ftckpt.deepspeed.active_engine import door

        door.checkpointer.close(remove=False)

    def wrong_objects(self) -> list[str]:
        from ftckpt.deepspeed import optimizers

        inner, engine = optimizers.inner(self.engine.optimizer), self.engine
        found = {
            "eps": {group["eps"] for group in inner.param_groups},
            "steps": {state["step"] for state in inner.state.values() if isinstance(state.get("step"), int)},
            "data": self.job.data.consumed_samples,
            "counters": (engine.global_steps, engine.micro_steps),
        }
        wanted = {
            "eps": {EPSILON},
            "steps": {STEP} if found["steps"] else set(),
            "data": CONSUMED,
            "counters": (ITERATION, engine.gradient_accumulation_steps() * ITERATION),
        }
        return [f"{name} is {found[name]}, not {wanted[name]}" for name in found if found[name] != wanted[name]]

    def train(self) -> float:
        return float(self._step(self.job)["loss"])

    def close(self) -> None:
        self.engine.destroy()


class PlainJob:
    """A model of a user's own, wrapped as ``layout`` says."""

    def __init__(self, layout: str, settings: dict[str, Any], fills: bool):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        torch.manual_seed(3)
        model: Any = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 5), nn.Linear(5, 1))
        kind, sizes = re.match(r"[a-z]+", layout)[0], [int(size) for size in re.findall(r"\d+", layout)]
        if kind == "ddp":
            model = DistributedDataParallel(model)
        elif kind in ("fsdp", "hsdp"):
            names = ("replica", "shard")[-len(sizes) :]
            fully_shard(model, mesh=init_device_mesh("cpu", tuple(sizes), mesh_dim_names=names))
        elif kind == "tp":
            mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=None), "2": RowwiseParallel()})
            fully_shard(model, mesh=mesh["dp"])
        self._model, self._kind = model, kind
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self._scheduler = torch.optim.lr_scheduler.StepLR(self._optimizer, 2)
        if fills:  # before anything can take it for a write without a fence
            fill(self.describe())
            for buffer in model.buffers() if kind == "ddp" else ():
                buffer.add_(dist.get_rank())  # the first replica's count
        config = Config(enabled=True, **settings)
        self._checkpointer: Any = ftckpt.torch.attach(model, self._optimizer, self._scheduler, {}, config)
        self.start = self._checkpointer.restore()

    def describe(self) -> Any:
        return PlainState(self._model, self._optimizer, None, {}).describe()

    def advance(self) -> None:
        self._scheduler.last_epoch = ITERATION
        self._optimizer.param_groups[0]["eps"] = EPSILON

    def snapshot(self) -> None:
        self._checkpointer.fence()
        self._checkpointer.step(ITERATION)
        self._checkpointer.close(remove=False)

    def wrong_objects(self) -> list[str]:
        found = (self._scheduler.last_epoch, self._optimizer.param_groups[0]["eps"])
        return [] if found == (ITERATION, EPSILON) else [f"scheduler and eps are {found}"]

    def train(self) -> float:
        if self._kind == "tp":  # its batch norm has no parallel form
            return 1.0
        loss = self._model(torch.randn(4, 6)).square().sum()
        loss.backward()
        self._optimizer.step()
        self._scheduler.step()
        self._checkpointer.step(ITERATION + 1)
        return float(loss.detach())

    def close(self) -> None:
        self._checkpointer.close()
        ftckpt.torch.remove()


def job_of(layout: str, settings: dict[str, Any], fills: bool) -> Any:
    return (DeepSpeedJob if layout in DEEPSPEED else PlainJob)(layout, settings, fills)


def leave(rank: int, world_size: int, layout: str, settings: dict[str, Any]) -> str:
    job = job_of(layout, settings, fills=True)
    job.advance()
    job.snapshot()
    return ""


def arrive(rank: int, world_size: int, layout: str, settings: dict[str, Any]) -> tuple[list[str], int, int, float]:
    """Problems, the iteration restored, the number of elements compared, and the loss of one iteration more."""
    job = job_of(layout, settings, fills=False)
    problems, compared = wrong(job.describe(), 1 << 30)
    problems += job.wrong_objects()
    loss = job.train()
    job.close()
    return problems, job.start, compared, loss


def require(layout: str) -> None:
    if layout in DEEPSPEED:
        pytest.importorskip("deepspeed")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("source", "target"), by_default(PAIRS, QUICK))
def test_every_element_arrives_in_another_layout(settings: dict[str, Any], source: str, target: str) -> None:
    require(source)
    run_ranks(leave, ranks_of(source), source, settings, **OPTIONS)
    results = run_ranks(arrive, ranks_of(target), target, settings, **OPTIONS)
    problems = [f"rank {rank}: {text}" for rank, one in enumerate(results) for text in one.value[0]]
    assert not problems, problems[:10]
    assert {one.value[1] for one in results} == {ITERATION}
    assert all(one.value[2] > (1000 if source in DEEPSPEED else 20) for one in results)
    assert all(0 < one.value[3] < 1e4 for one in results)
    assert not list(Path(settings["arena"]).rglob("slot*")), "arenas are left after the job has ended"


def trained(rank: int, world_size: int, layout: str, data: str, run: tuple[dict[str, Any], int]) -> Any:
    """Train the example job from wherever it stands to an iteration: where it began, and its losses."""
    settings, until = run
    job = DeepSpeedJob(layout, settings, fills=False, argv=f"--data {data}", config=BATCH)
    losses = {}
    while job.engine.global_steps < until:
        loss = job.train()
        losses[job.engine.global_steps] = loss
    if until == UNTIL:
        job.close()
    else:
        job.leave()
    return job.start, losses


BATCH = {"train_batch_size": 8, "gradient_accumulation_steps": "none", "bf16": "none"}
BROKEN, UNTIL = 3, 6


@pytest.mark.parametrize(
    ("source", "target", "data"),
    by_default(
        [
            ("zero2-dp4", "zero1-dp2", "engine"),
            ("zero1-dp2", "zero2-dp4", "own"),
            ("pp4-dp1", "pp2-dp2", "iterator"),
            ("pp2-dp2", "pp4-dp1", "engine"),
        ],
        [("zero2-dp4", "zero1-dp2", "engine")],
    ),
)
def test_training_goes_on_with_the_same_samples(
    settings: dict[str, Any], source: str, target: str, data: str
) -> None:
    """Another number of replicas takes the same batch apart in its own way: losses are those of an unbroken run."""
    pytest.importorskip("deepspeed")

    def run(layout: str, job: str, until: int) -> tuple[int | None, dict[int, float]]:
        named = {**settings, "job": job}
        results = run_ranks(trained, ranks_of(layout), layout, data, (named, until), **OPTIONS)
        return results[0].value

    _, unbroken = run(source, "unbroken", UNTIL)
    run(source, "test", BROKEN)
    start, resumed = run(target, "test", UNTIL)
    assert start == BROKEN
    assert sorted(resumed) == list(range(BROKEN + 1, UNTIL + 1))
    off = {i: abs(resumed[i] - unbroken[i]) / unbroken[i] for i in resumed}
    assert max(off.values()) < NOISE, (off, unbroken)


def draws(rank: int, world_size: int, layout: str, settings: dict[str, Any], micro_batch: int) -> Any:
    config = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": 1}
    job = DeepSpeedJob(layout, settings, fills=False, argv="--data engine", config=config)
    job.train()
    job.leave()
    return job.start


def test_a_layout_that_draws_past_the_sample_is_refused(settings: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed")
    run_ranks(draws, 2, "zero1-dp2", settings, 1, stand_in=False)
    with pytest.raises(RankFailure, match="after 2 samples, which is no multiple of the 3 that this layout draws"):
        run_ranks(draws, 3, "zero1-dp3", settings, 1, stand_in=False)
