"""``ftckpt plan`` agrees with the start of the same job: bytes of each rank, replica sets, losses.

Small jobs of each way to divide state start for real, on nodes that are only names: their manifests, and the table of
their log, against the plan of a job of that size. The tolerances are those that the plan documents.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ftckpt.cli.main import main
from ftckpt.cli.plan_holdings import HEADER_BYTES, ProtectionPlan, resolved
from ftckpt.cli.plan_job import JobShape, add_shape, job_of
from ftckpt.config import Config
from ftckpt.frameworks import entry
from ftckpt.session.checkpointer import Checkpointer
from tests.support import jobs
from tests.support.ds_jobs import BF16, Shape, fp16, zero
from tests.support.pool import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

WIDE = ["--hidden", "64"]
TOLERANCE = 0.03
"""Share of a rank's bytes: layernorms that tensor-parallel ranks share, rows of a tensor that divide unevenly."""
LARGE = 0.1
"""Share of all state: replica sets that a plan must have. Others are layernorms, and numbers."""
NUMBERS = 4096
"""Bytes: counts of steps."""
HEADERS = {"slots": 6, "in_slots": 1, "parity": 1, "packages": 12, "sum": 19, "node": 2, "job": 4}
"""How many headers a plan may have guessed too long: three slots of two ranks; three packages of each of four."""


@dataclass(frozen=True)
class Case:
    """A job of ``ranks``, two to a node, and the arguments of ``ftckpt plan`` that describe it.

    ``argv`` are those of its script, or a layout of ``megatron_models``.
    """

    framework: str
    ranks: int
    plan: str
    argv: Any = ()
    config: Mapping[str, Any] | None = None


CASES = {
    "zero0-fp32": Case("deepspeed", 4, "--zero 0 --dtype fp32", config={}),
    "zero0-fp16": Case("deepspeed", 4, "--zero 0 --dtype fp16", config=fp16(8)),
    "zero0-bf16": Case("deepspeed", 4, "--zero 0", config=BF16),
    "zero0-bf16-pp2": Case("deepspeed", 4, "--zero 0 --pp 2", ["--pp", "2"], BF16),
    "zero1": Case("deepspeed", 4, "--zero 1", config=BF16 | zero(1)),
    "zero1-fp32": Case("deepspeed", 4, "--zero 1 --dtype fp32", config=zero(1)),
    "zero1-ep2": Case("deepspeed", 4, "--zero 1 --ep 2", ["--num-experts", "4", "--ep", "2"], BF16 | zero(1)),
    "zero2": Case("deepspeed", 4, "--zero 2", config=BF16 | zero(2)),
    "zero3": Case("deepspeed", 4, "--zero 3", config=BF16 | zero(3)),
    "zero3-fp32": Case("deepspeed", 4, "--zero 3 --dtype fp32", config=zero(3)),
    "fsdp": Case("plain", 4, "--fsdp", ["--wrap", "fsdp2"]),
    "fsdp-bf16": Case("plain", 4, "--fsdp --dtype bf16", ["--wrap", "fsdp2", "--precision", "bf16"]),
    "hsdp": Case("plain", 4, "--fsdp --fsdp-replicas 2", ["--wrap", "fsdp2", "--replicas", "2"]),
    "ddp": Case("plain", 4, "--optimizer replicated --dtype fp32", ["--wrap", "ddp"]),
    "distributed": Case("megatron", 4, "--tp 2", ["--tp", "2"]),
    "replicated": Case("megatron", 4, "--tp 2 --optimizer replicated", ["--tp", "2", "--no-distributed-optimizer"]),
    "vpp": Case("megatron", 4, "--pp 2", ["--pp", "2", "--vpp", "2", "--layers", "4", "--untie"]),
    "experts": Case("layout", 4, "--tp 2 --ep 2", {"tp": 2, "ep": 2}),
    "experts-etp1": Case("layout", 4, "--tp 2 --ep 2 --etp 1", {"tp": 2, "ep": 2, "etp": 1}),
    "experts-ep4-replicated": Case(
        "layout", 4, "--tp 2 --ep 4 --etp 1 --optimizer replicated", {"tp": 2, "ep": 4, "etp": 1}
    ),
    "experts-ep1-replicated": Case("layout", 4, "--tp 2 --etp 1 --optimizer replicated", {"tp": 2, "etp": 1}),
}


@dataclass(frozen=True)
class Started:
    """The shard of one rank, and the report of the start. ``sections``: kind, group and bytes. ``numels``: the
    elements of each parameter that it has moments of."""

    shard: str
    modes: tuple[str, ...]
    sections: list[tuple[str, str, int]]
    slot_bytes: int
    numels: dict[str, int]


def start(rank: int, world_size: int, case: Case, settings: dict[str, Any]) -> Started:
    config = Config(
        enabled=True, **settings, node=f"n{rank // 2}", chunk_size="64KiB", objects_size="1MiB", schedule="thread"
    )
    if case.framework == "layout":
        from tests.integrations import megatron_models as models

        with models.parallel(case.argv):
            return _told(_layout(case, config))
    return _told(_script(case, config))


def _script(case: Case, config: Any) -> Any:
    """The checkpointer of an example job that its integration has started."""
    if case.framework == "deepspeed":
        from tests.integrations.adapters import DeepSpeedJob

        return DeepSpeedJob(Shape(case.ranks, [*WIDE, *case.argv], case.config or {})).attach(config)
    if case.framework == "plain":
        from tests.integrations.adapters import PlainJob

        return PlainJob((*WIDE, *case.argv)).attach(config)
    from tests.integrations.adapters import MegatronJob

    return MegatronJob((*WIDE, *case.argv)).attach(config)


def _layout(case: Case, config: Any) -> Any:
    """The same of a model of experts in a layout that the example script cannot have."""
    from ftckpt.megatron.geometry import coordinates, layout_sizes
    from ftckpt.megatron.state import MegatronState
    from tests.integrations import megatron_models as models

    sharded = "replicated" not in case.plan
    model = models.Model({"num_moe_experts": 4, "moe_router_topk": 2}, sharded=sharded)
    built = models.build(model, case.argv)
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), lambda _: 1.0)
    state = MegatronState(built.chunks, built.optimizer, scheduler, {})
    begun = entry.start(config, lambda: (coordinates(), layout_sizes(sharded)))
    checkpointer = Checkpointer(begun.config, state, begun.topology, group=begun.group)
    checkpointer.restore()
    return checkpointer


def _told(checkpointer: Any) -> Started:
    image = checkpointer.arena.image
    holding = image.holding("", "", "")
    sections = [(section.kind, section.group, sum(section.lengths)) for section in holding.sections]
    numels = {
        piece.fragment.key: _numel(piece.fragment.global_shape)
        for piece in checkpointer.snapshots.shard.state.stepped
        if piece.fragment.key.startswith("exp_avg/")
    }
    modes = checkpointer.rank.protection.modes.names
    checkpointer.close(remove=True)
    return Started(holding.shard, modes, sections, holding.slot_bytes, numels)


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def planned(case: Case, numels: Mapping[str, int], capsys: pytest.CaptureFixture[str]) -> tuple[JobShape, Any]:
    """The plan of a job of as many parameters: the job as it is understood, and what is printed."""
    experts = sum(numel for key, numel in numels.items() if ".experts." in key)
    words = case.plan.split()
    sizes = {name: int(words[words.index(f"--{name}") + 1]) for name in ("tp", "pp") if f"--{name}" in words}
    dp = case.ranks // sizes.get("tp", 1) // sizes.get("pp", 1)
    text = f"--dp {dp} --gpus-per-node 2 --params {sum(numels.values())} --chunk-size 64KiB --objects-size 1MiB"
    words += [*text.split(), *(["--expert-params", str(experts)] if experts else [])]
    assert main(["plan", *words, "--json"]) == 0
    parser = argparse.ArgumentParser()
    add_shape(parser)
    arguments, _ = parser.parse_known_args(words)
    return job_of(arguments, Config(chunk_size="64KiB", objects_size="1MiB")), json.loads(capsys.readouterr().out)


def held(sections: Iterable[tuple[str, str, int]], *kinds: str) -> int:
    return sum(nbytes for kind, _, nbytes in sections if kind in kinds)


def replica_sets(ranks: Sequence[Started]) -> dict[tuple[int, ...], int]:
    """Ranks → bytes, by the second half of a group's name."""
    members: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, started in enumerate(ranks):
        for kind, group, nbytes in started.sections:
            if kind == "shared":
                members[group[8:]][rank] = nbytes
    return {tuple(sorted(own)): sum(own.values()) for own in members.values()}


def large(sets: Mapping[tuple[int, ...], int], state_bytes: int) -> dict[tuple[int, ...], int]:
    return {ranks: n for ranks, n in sets.items() if len(ranks) > 1 and n > LARGE * state_bytes}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_says_what_the_start_of_that_job_says(
    name: str, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    pool = {} if case.framework in ("megatron", "layout") else {"stand_in": False}
    ranks = [result.value for result in run_ranks(start, case.ranks, case, settings, **pool)]
    numels = {key: numel for rank in ranks for key, numel in rank.numels.items()}
    job, said = planned(case, numels, capsys)
    told = jobs.events(settings, "protection")[0]
    copied = [held(rank.sections, "private", "shared") for rank in ranks]
    assert sum(copied) == pytest.approx(job.state_bytes, rel=TOLERANCE)

    modes = tuple(said["protect"].split(","))
    holdings = ProtectionPlan(job, resolved(job, Config(chunk_size="64KiB", objects_size="1MiB"))[0]).holdings
    for rank, holding in zip(ranks, holdings, strict=True):
        of_plan = [(section.kind, "", sum(section.lengths)) for section in holding.sections]
        about = {"rel": TOLERANCE, "abs": NUMBERS}
        assert held(rank.sections, "private", "shared") == pytest.approx(held(of_plan, "private", "shared"), **about)
        for kind in ("private", "parity"):
            about = {"abs": NUMBERS + TOLERANCE * held(of_plan, "private", "shared")}
            assert held(rank.sections, kind) == pytest.approx(held(of_plan, kind), **about), kind
        assert abs(holding.slot_bytes - rank.slot_bytes) <= HEADER_BYTES + TOLERANCE * rank.slot_bytes
    found, wanted = large(replica_sets(ranks), job.state_bytes), large(job.replica_sets, job.state_bytes)
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, abs=TOLERANCE * job.state_bytes)

    assert modes == tuple(told["modes"])
    for row, real in zip(said["failures"], told["failures"], strict=True):
        assert (row["lost"], row["cases"]) == (real["lost"], real["cases"])
        assert real["survived"] == row["survived"], row["lost"]
    for what in ("memory_per_node", "network_bytes"):
        for part, nbytes in told[what].items():
            room = HEADERS[part] * HEADER_BYTES
            assert said[what][part] == pytest.approx(nbytes, rel=TOLERANCE, abs=room), part
