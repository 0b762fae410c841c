"""Restarts from memory in another layout: every element of every tensor, of each framework; and the same losses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.promises.bit_exact.reshaping import DEEPSPEED, ITERATION, job_of, ranks_of
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(900)]

PAIRS = """
gpt-tied/tp2pp2dp2: tp1pp1dp1 tp2pp1dp2 tp1pp2dp2 tp2pp2dp1 tp4pp1dp1 tp1pp4dp1 tp2pp2dp1z
gpt-tied/tp1pp2vpp2dp2z: tp2pp2dp1 tp1pp2vpp2dp2 tp1pp1dp4
llama-gqa-untied/tp4pp1dp1: tp2pp2dp1 tp1pp2vpp2dp2 tp2pp1dp2z
moe-sequential/tp2pp1ep2dp2: tp1pp2ep2dp2 tp1pp1ep4dp4 tp2pp2dp1
moe-sequential/tp1pp1dp2z: tp1pp1ep2dp2 tp2pp1dp1
gpt-fp32/tp2pp1dp1: tp1pp2dp1 tp1pp1dp2z
zero1-dp2: zero2-dp4 zero3-dp1
zero1-dp3: bf16-optimizer-dp2
zero3-dp4: zero1-dp3 zero3-tp2-dp2
zero3-tp2-dp2: zero1-dp2
zero1-tp2-dp1: zero2-dp4
bf16-optimizer-dp2: zero3-dp4
zero2-offload-dp2: zero1-dp3
fp32-dp2: fp32-zero1-dp2 fp32-zero3-dp4
fp32-zero1-dp2: fp32-dp4
fp16-dp2: fp16-zero2-dp3
pp2-dp2: pp4-dp1 pp2-tp2
pp4-dp1: pp1-dp2
pp2-tp2: pp2-dp2
ep2: ep4 ep1
ep4: ep2
fused-zero1-dp2: cpu-adam-zero3-dp4
cpu-adam-zero3-dp4: fused-zero1-dp2
ddp2: ddp3
ddp3: fsdp4
fsdp4: ddp2
fsdp3: hsdp2x2
hsdp2x2: fsdp2
fsdp2: tp2x2
tp2x2: none1
none1: fsdp3
"""
"""Source: targets, which have the model of the source where it names one."""
QUICK = """
gpt-tied/tp2pp2dp2: tp2pp1dp2 tp4pp1dp1 tp1pp4dp1 tp2pp2dp1z
moe-sequential/tp2pp1ep2dp2: tp1pp2ep2dp2 tp1pp1ep4dp4
zero1-dp2: zero2-dp4
zero3-dp4: zero3-tp2-dp2
fp32-zero1-dp2: fp32-dp4
pp2-dp2: pp4-dp1
ep2: ep4
ddp3: fsdp4
tp2x2: none1
"""


def pairs(table: str) -> list[tuple[str, str]]:
    found = []
    for line in table.split("\n")[1:-1]:
        source, _, targets = line.partition(": ")
        model, slash, _ = source.rpartition("/")
        found += [(source, model + slash + target) for target in targets.split()]
    return found


@pytest.fixture(scope="module")
def left() -> dict[str, Path]:
    """The memory that a job has left, by its layout: each target restores a copy of it."""
    return {}


def options(layout: str) -> dict[str, Any]:
    if layout in DEEPSPEED:
        pytest.importorskip("deepspeed")
    return {"stand_in": "/" in layout, "timeout_secs": 600.0, "pg_timeout_secs": 600.0}


def settings_in(root: Path) -> dict[str, Any]:
    small = {"chunk_size": "64KiB", "objects_size": "1MiB", "slots": 2}
    return {"job": "test", "arena": str(root), "start_timeout_secs": 60.0, **small}


def leave(rank: int, world_size: int, layout: str, settings: dict[str, Any]) -> None:
    job = job_of(layout, {**settings, "node": "node"}, "leave")
    assert job.start is None
    job.snapshot()
    job.close(remove=False)


def arrive(
    rank: int, world_size: int, source: str, layout: str, settings: dict[str, Any]
) -> tuple[int | None, list[str], int, float | None]:
    """The iteration restored, problems, the number of elements compared, and the loss of one iteration more."""
    # Two of three ranks read over the network.
    job = job_of(layout, {**settings, "node": ("node", "other", "other")[rank % 3]}, "arrive")
    problems, compared = job.problems(source, layout)
    loss = job.train()
    job.close(remove=True)
    return job.start, problems, compared, loss


@pytest.mark.parametrize(("source", "target"), by_default(pairs(PAIRS), pairs(QUICK)))
def test_every_element_arrives_in_another_layout(
    source: str, target: str, left: dict[str, Path], module_root: Path, arena_root: Path
) -> None:
    if source not in left:
        root = module_root / source.replace("/", "-")
        root.mkdir()
        run_ranks(leave, ranks_of(source), source, settings_in(root), **options(source))
        left[source] = root
    shutil.copytree(left[source], arena_root / "copy", copy_function=shutil.copy)
    settings = settings_in(arena_root / "copy")
    results = run_ranks(arrive, ranks_of(target), source, target, settings, **options(target))
    starts, problems, compared, losses = zip(*(result.value for result in results), strict=True)
    wrong = [f"rank {rank}: {text}" for rank, texts in enumerate(problems) for text in texts]
    assert not wrong, wrong[:10]
    assert set(starts) == {ITERATION} and min(compared) > 20
    seen = [loss for loss in losses if loss is not None]
    assert seen and all(0 < loss < 1e4 for loss in seen)
    assert not list(arena_root.rglob("slot*")), "arenas are left after the job has ended"


BROKEN, UNTIL = 5, 8


def trained(rank: int, world_size: int, layout: str, argv: str, goal: tuple[dict[str, Any], int]) -> Any:
    """Trains from wherever the job stands to an iteration: where it began, the losses, and their noise."""
    settings, until = goal
    job = job_of(layout, {**settings, "node": "node"}, "train", argv)
    losses = {}
    while job.iteration < until:
        loss = job.train()
        losses[job.iteration] = loss
    job.close(remove=until == UNTIL)
    return job.start, {iteration: loss for iteration, loss in losses.items() if loss is not None}, job.noise


@pytest.mark.parametrize(
    ("source", "target", "argv"),
    by_default(
        [
            ("gpt-tied/tp2pp1dp2", "gpt-tied/tp1pp2vpp2dp1z", ""),
            ("llama-gqa-untied/tp1pp2dp1", "llama-gqa-untied/tp4pp1dp1", ""),
            ("moe-sequential/tp1pp1ep2dp2", "moe-sequential/tp2pp1ep1dp1", ""),
            ("zero2-dp4", "zero1-dp2", "--data engine"),
            ("zero1-dp2", "zero2-dp4", "--data own"),
            ("pp4-dp1", "pp2-dp2", "--data iterator"),
            ("pp2-dp2", "pp4-dp1", "--data engine"),
        ],
        [("zero2-dp4", "zero1-dp2", "--data engine")],
    ),
)
def test_training_goes_on_with_the_losses_of_an_unbroken_run(
    source: str, target: str, argv: str, arena_root: Path
) -> None:
    """Another number of replicas takes the same batch apart in its own way."""

    def run(layout: str, job: str, until: int) -> tuple[int | None, dict[int, float], float]:
        goal = {**settings_in(arena_root), "job": job}, until
        ranks = run_ranks(trained, ranks_of(layout), layout, argv, goal, **options(layout))
        results = [rank.value for rank in ranks]
        losses: dict[int, float] = {}
        for _, of_rank, _ in results:
            losses.update(of_rank)
        return results[0][0], losses, results[0][2]

    _, unbroken, noise = run(source, "unbroken", UNTIL)
    run(source, "test", BROKEN)
    start, resumed, _ = run(target, "test", UNTIL)
    assert start == BROKEN and sorted(resumed) == list(range(BROKEN + 1, UNTIL + 1))
    off = {i: abs(resumed[i] - unbroken[i]) / unbroken[i] for i in resumed}
    assert max(off.values()) < noise, off
    assert abs(unbroken[UNTIL] - unbroken[BROKEN]) / unbroken[BROKEN] > 2 * noise, "losses stand still"
