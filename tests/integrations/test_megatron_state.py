"""A Megatron rank's description of its state is right: geometry, classes, derived weights, shares."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import defaultdict
from typing import Any

import pytest

from ftckpt.capture.assignment import assign
from ftckpt.config import Config
from ftckpt.errors import MismatchError
from ftckpt.frameworks import entry
from ftckpt.model import objects
from tests.support import jobs
from tests.support.errors import a_rank_raises
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc


def captured(rank: int, world_size: int, argv: list[str]) -> dict[str, Any]:
    from ftckpt.megatron.geometry import coordinates, layout_sizes

    _, state = jobs.built(*argv)
    described = state.describe()
    is_distributed = "--no-distributed-optimizer" not in argv
    start = entry.start(Config(job="job", node="node"), lambda: (coordinates(), layout_sizes(is_distributed)))
    assignment = assign(start.group, start.topology, described, 1 << 20, 1 << 20)
    return {
        "copied": sum(f.nbytes for f in assignment.manifest.stepped),
        "held": {p.fragment.name: p.fragment.nbytes for p in described.stepped},
        "derived": [piece.fragment.key for piece in assignment.derived],
    }


def test_each_rank_copies_its_equal_share_without_derived_weights() -> None:
    results = [r.value for r in run_ranks(captured, 8, ["--tp", "2", "--pp", "2", "--no-distributed-optimizer"])]
    holders: dict[str, int] = defaultdict(int)
    for value in results:
        for name in value["held"]:
            holders[name] += 1
    for value in results:
        derived = set(value["derived"])
        assert derived and all(key.startswith("weight/") for key in derived)
        due = sum(nbytes / holders[name] for name, nbytes in value["held"].items() if not name.startswith("weight/"))
        assert abs(value["copied"] - due) <= 64 * 8, f"copies {value['copied']} bytes, its share is {due}"


FP16 = ["--precision", "fp16", "--loss-scale", "65536", "--loss-scale-window", "2", "--layers", "4"]
EXPERTS = ["--num-experts", "4", "--layers", "4"]


def objects_after(rank: int, world_size: int, argv: list[str], iterations: int) -> bytes:
    """The objects that a rank saves after some iterations."""
    import train_gpt

    job, state = jobs.built(*argv)
    state.describe()
    for _ in range(iterations):
        train_gpt.train_step(job)
    return objects.encode(state.save_objects())


def reshaped(rank: int, world_size: int, argv: list[str], source: list[bytes]) -> dict[str, Any]:
    """The objects of a rank of another layout after it has loaded these, except generators."""
    from ftckpt.megatron.optimizers import leaf_optimizers

    job, state = jobs.built(*argv)
    state.describe()
    groups = [group for leaf in leaf_optimizers(job.optimizer) for group in leaf.optimizer.param_groups]
    kinds = [group["is_expert_parallel"] for group in groups]
    state.load_reshaped([objects.decode(of_stage) for of_stage in source], 3)
    state.finish_load()
    assert [group["is_expert_parallel"] for group in groups] == kinds
    return {
        "lr": {group["lr"] for group in groups},
        "weight_decay": sorted({group["weight_decay"] for group in groups}),
        "scale": float(job.optimizer.get_loss_scale()),
        "scheduler": job.scheduler.num_steps,
        "data": job.data.consumed_samples,
    }


def saved(world_size: int, argv: list[str], iterations: int) -> tuple[list[bytes], list[dict[str, Any]]]:
    """The objects that each rank saves, encoded and not."""
    encoded = [result.value for result in run_ranks(objects_after, world_size, argv, iterations)]
    return encoded, [objects.decode(of_rank) for of_rank in encoded]


def test_objects_of_one_layout_are_taken_in_another() -> None:
    encoded, source = saved(2, [*FP16, "--pp", "2"], 3)
    lr = {group["lr"] for optimizer in source[0]["optimizers"] for group in optimizer["groups"]}
    assert len(lr) == 1
    model = json.loads(source[1]["model"])  # for convert --to huggingface
    found = tuple(model[name] for name in ("num_attention_heads", "layernorm_epsilon", "max_position_embeddings"))
    assert found == (4, 1e-5, 32) and model["position_embedding_type"] == "learned_absolute" and not model["swiglu"]
    for result in run_ranks(reshaped, 4, [*FP16, "--tp", "2"], encoded):
        value = result.value
        assert value["lr"] == lr
        assert value["weight_decay"] == [0.0, 0.01]
        assert value["scale"] == float(source[0]["optimizers"][0]["scaler"]["scale"]) == 131072.0
        assert value["scheduler"] == value["data"] == 24


def test_groups_of_experts_are_found_whether_experts_are_divided_or_not() -> None:
    alone, whole = saved(1, EXPERTS, 2)
    divided, parts = saved(2, [*EXPERTS, "--ep", "2"], 2)
    assert len(whole[0]["optimizers"]) < len(parts[0]["optimizers"])
    for source, world_size, argv in ((alone, 2, [*EXPERTS, "--ep", "2"]), (divided[:1], 1, EXPERTS)):
        for result in run_ranks(reshaped, world_size, argv, source):
            assert result.value["lr"] == {group["lr"] for group in whole[0]["optimizers"][0]["groups"]}


def test_a_group_that_no_layout_had_is_an_error() -> None:
    source = saved(1, [], 1)[1][0]
    for optimizer in source["optimizers"]:
        optimizer["groups"] = [group for group in optimizer["groups"] if group["wd_mult"]]
    with a_rank_raises(MismatchError, "wd_mult 0.0"):
        run_ranks(reshaped, 1, [], [objects.encode(source)])


def test_log_sums_come_from_the_last_stage() -> None:
    from ftckpt.megatron.counters import Counters

    args = Namespace(iteration=0)
    counters = Counters(args)
    first = {"counters": {"iteration": 5}, "log_sums": {}}
    counters.load_reshaped([first, {"counters": {"iteration": 5}, "log_sums": {"lm loss": 2.5}}])
    sums: dict[str, Any] = {}
    assert counters.follow_log({}, sums, True) is False
    assert sums == {"lm loss": 2.5}
    assert args.iteration == 5
