"""What a Megatron rank says of its state is true: geometry, classes, derived weights, shares."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from typing import Any

import pytest
import torch

from ftckpt.capture.assignment import as_bytes, assign, content_hashes, rule_holds
from ftckpt.config import Config
from ftckpt.errors import MismatchError
from ftckpt.frameworks import entry
from ftckpt.model import objects
from tests.support import jobs
from tests.support.elements import Elements, held, put_together
from tests.support.errors import a_rank_raises
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc

LAYOUTS = {
    "tp2-pp2-dp2": (8, ["--tp", "2", "--pp", "2"]),
    "tp2-pp2-dp2-replicated": (8, ["--tp", "2", "--pp", "2", "--no-distributed-optimizer"]),
    "tp2-swiglu-gqa-untied": (2, ["--tp", "2", "--swiglu", "--kv-groups", "2", "--untie"]),
    "pp2-vpp2": (2, ["--pp", "2", "--vpp", "2", "--layers", "4"]),
    "tp2-ep2-experts": (4, ["--tp", "2", "--ep", "2", "--num-experts", "4", "--router-bias"]),
    "dp2-fp32": (2, ["--precision", "fp32", "--no-distributed-optimizer"]),
}


def described_tensors(rank: int, world_size: int, argv: list[str]) -> list[Elements]:
    _, state = jobs.built(*argv)
    return held(state.describe().stepped)


@pytest.mark.parametrize("name", LAYOUTS)
def test_fragments_of_all_ranks_make_up_every_tensor(name: str) -> None:
    """Under the distributed optimizer the owned ranges of a parameter make it up as well."""
    world_size, argv = LAYOUTS[name]
    ranks = [result.value for result in run_ranks(described_tensors, world_size, argv)]
    assert not (wrong := put_together(ranks)), wrong[:3]
    roles = {fragment.key.partition("/")[0] for of_rank in ranks for fragment, _ in of_rank}
    assert {"weight", "exp_avg", "exp_avg_sq", "step"} <= roles
    assert ("master" in roles) == ("fp32" not in name)


def stepped_bytes_at_the_fence(rank: int, world_size: int, argv: list[str]) -> list[str]:
    """Keys of stepped pieces that changed between the boundary and the fence, over three iterations."""
    import train_gpt
    from megatron.core.pipeline_parallel import schedules

    job, state = jobs.built(*argv)
    pieces = state.describe().stepped
    changed: list[str] = []
    fences: list[int] = []

    def hashes() -> list[int]:
        return content_hashes([as_bytes(piece.tensor) for piece in pieces])

    def at_the_fence(*_args: Any, **_kwargs: Any) -> Any:
        fences.append(1)
        changed.extend(p.fragment.key for p, a, b in zip(pieces, before, hashes(), strict=True) if a != b)
        return finalize(*_args, **_kwargs)

    finalize = job.config.finalize_model_grads_func
    job.config.finalize_model_grads_func = at_the_fence
    assert schedules is not None
    for _ in range(3):
        before = hashes()
        train_gpt.train_step(job)
    assert len(fences) == 3
    return changed


@pytest.mark.parametrize(
    "argv",
    [
        ["--pp", "2"],
        ["--overlap-grad-reduce", "--overlap-param-gather"],
        ["--no-distributed-optimizer", "--overlap-grad-reduce"],
        ["--ep", "2", "--num-experts", "4", "--router-bias"],
    ],
    ids=" ".join,
)
def test_no_stepped_byte_changes_between_boundary_and_fence(argv: list[str]) -> None:
    for result in run_ranks(stepped_bytes_at_the_fence, 4, argv):
        assert result.value == []


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
        "volatile": [f.key for f in assignment.manifest.volatile],
    }


@pytest.mark.parametrize("optimizer", ["--distributed-optimizer", "--no-distributed-optimizer"])
def test_each_rank_copies_its_equal_share_without_derived_weights(optimizer: str) -> None:
    results = [r.value for r in run_ranks(captured, 8, ["--tp", "2", "--pp", "2", optimizer])]
    holders: dict[str, int] = defaultdict(int)
    for value in results:
        for name in value["held"]:
            holders[name] += 1
    for value in results:
        derived = set(value["derived"])
        assert derived and all(key.startswith("weight/") for key in derived)
        due = sum(nbytes / holders[name] for name, nbytes in value["held"].items() if not name.startswith("weight/"))
        assert abs(value["copied"] - due) <= 64 * 8, f"copies {value['copied']} bytes, its share is {due}"


def test_router_bias_and_counts_are_volatile() -> None:
    for result in run_ranks(captured, 2, ["--ep", "2", "--num-experts", "4", "--router-bias"]):
        assert any("expert_bias" in key for key in result.value["volatile"])
        assert any("tokens_per_expert" in key for key in result.value["volatile"])


def weights_off_their_masters(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """What is taken as derived once one weight is no cast of its master any more."""
    _, state = jobs.built()
    pieces = [p for p in state.describe().stepped if p.derived_from is not None]
    before = [p.fragment.key for p in pieces if not rule_holds(p)]
    pieces[0].tensor[0] += 1
    return before, [p.fragment.key for p in pieces if not rule_holds(p)]


def test_a_weight_that_is_no_cast_of_its_master_is_copied() -> None:
    for result in run_ranks(weights_off_their_masters, 2):
        before, after = result.value
        assert before == []
        assert len(after) == 1


FP16 = ["--precision", "fp16", "--loss-scale", "65536", "--loss-scale-window", "2", "--layers", "4"]
EXPERTS = ["--num-experts", "4", "--layers", "4"]


def objects_after(rank: int, world_size: int, argv: list[str], iterations: int) -> bytes:
    """What a rank saves after some iterations."""
    import train_gpt

    job, state = jobs.built(*argv)
    state.describe()
    for _ in range(iterations):
        train_gpt.train_step(job)
    return objects.encode(state.save_objects())


def reshaped(rank: int, world_size: int, argv: list[str], source: list[bytes]) -> dict[str, Any]:
    """What a rank of another layout has taken from these, and what it draws then, twice."""
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    job, state = jobs.built(*argv)
    state.describe()
    kinds = [[group["is_expert_parallel"] for group in leaf.optimizer.param_groups] for leaf in state._leaves]
    before = torch.cuda.get_rng_state()
    state.load_reshaped([objects.decode(of_stage) for of_stage in source], 3)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    state.finish_load()

    def draw() -> dict[str, list[float]]:
        found = {"default": torch.rand(2).tolist()}
        for name in get_cuda_rng_tracker().get_states():
            with get_cuda_rng_tracker().fork(name):
                found[name] = torch.rand(2).tolist()
        return found

    drawn = draw()
    state.set_rng()
    assert draw() == drawn
    groups = [group for leaf in state._leaves for group in leaf.optimizer.param_groups]
    assert [[group["is_expert_parallel"] for group in leaf.optimizer.param_groups] for leaf in state._leaves] == kinds
    return {
        "place": (mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()),
        "lr": {group["lr"] for group in groups},
        "weight_decay": sorted({group["weight_decay"] for group in groups}),
        "scale": float(job.optimizer.get_loss_scale()),
        "scheduler": job.scheduler.num_steps,
        "data": job.data.consumed_samples,
        "drawn": drawn,
    }


def saved(world_size: int, argv: list[str], iterations: int) -> tuple[list[bytes], list[dict[str, Any]]]:
    """What each rank saves, encoded and not."""
    encoded = [result.value for result in run_ranks(objects_after, world_size, argv, iterations)]
    return encoded, [objects.decode(of_rank) for of_rank in encoded]


def test_objects_of_one_layout_are_taken_in_another() -> None:
    encoded, source = saved(2, [*FP16, "--pp", "2"], 3)
    results = [result.value for result in run_ranks(reshaped, 4, [*FP16, "--tp", "2"], encoded)]
    lr = {group["lr"] for optimizer in source[0]["optimizers"] for group in optimizer["groups"]}
    assert len(lr) == 1
    for value in results:
        assert value["lr"] == lr
        assert value["weight_decay"] == [0.0, 0.01]
        assert value["scale"] == float(source[0]["optimizers"][0]["scaler"]["scale"]) == 131072.0
        assert value["scheduler"] == value["data"] == 24
    assert_drawn_as_seeded(results)


def assert_drawn_as_seeded(results: list[dict[str, Any]]) -> None:
    """Alike where ``model_parallel_cuda_manual_seed`` seeds alike, and different where it does not."""
    for one in results:
        for other in results:
            for name, numbers in one["drawn"].items():
                same_stage = one["place"][1] == other["place"][1]
                alike = same_stage and (
                    one["place"] == other["place"] or "parallel-rng" not in name or "data" in name
                )
                if "expert" not in name:
                    assert (numbers == other["drawn"][name]) == alike, (name, one["place"], other["place"])


def test_groups_of_experts_are_found_whether_experts_are_divided_or_not() -> None:
    alone, whole = saved(1, EXPERTS, 2)
    divided, parts = saved(2, [*EXPERTS, "--ep", "2"], 2)
    assert len(whole[0]["optimizers"]) < len(parts[0]["optimizers"])
    for source, world_size, argv in ((alone, 2, [*EXPERTS, "--ep", "2"]), (divided[:1], 1, EXPERTS)):
        for result in run_ranks(reshaped, world_size, argv, source):
            assert result.value["lr"] == {group["lr"] for group in whole[0]["optimizers"][0]["groups"]}


def graph_safe_tracker(rank: int, world_size: int) -> list[bool]:
    """With generators in the place of states, as ``use_cudagraphable_rng`` makes them on a device."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from ftckpt.megatron.state import load_rng, save_rng

    jobs.built()
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name: torch.Generator().manual_seed(7) for name in tracker.get_states()})
    saved = objects.decode(objects.encode(save_rng()))
    before = tracker.get_states()
    drawn = [torch.rand(4, generator=generator) for generator in before.values()]
    load_rng(saved)
    after = tracker.get_states()
    assert list(after) == list(before) and "model-parallel-rng" in after
    # New ones: what has taken hold of the old ones keeps its place in their numbers.
    assert all(after[name] is not before[name] for name in before)
    again = [torch.rand(4, generator=generator) for generator in after.values()]
    return [torch.equal(one, other) for one, other in zip(drawn, again, strict=True)]


def test_generators_of_a_graph_safe_tracker_come_back_as_generators() -> None:
    for result in run_ranks(graph_safe_tracker, 1):
        assert result.value and all(result.value)


def test_a_group_that_no_layout_had_is_an_error() -> None:
    source = saved(1, [], 1)[1][0]
    for optimizer in source["optimizers"]:
        optimizer["groups"] = [group for group in optimizer["groups"] if group["wd_mult"]]
    with a_rank_raises(MismatchError, "wd_mult 0.0"):
        run_ranks(reshaped, 1, [], [objects.encode(source)])


def test_log_sums_come_from_the_last_stage() -> None:
    from ftckpt.megatron.counters import Counters

    counters = Counters(Namespace(iteration=0))
    first = {"counters": {"iteration": 5}, "log_sums": {}}
    counters.load_reshaped([first, {"counters": {"iteration": 5}, "log_sums": {"lm loss": 2.5}}])
    sums: dict[str, Any] = {}
    assert counters.follow_log({}, sums, True) is False
    assert sums == {"lm loss": 2.5}
    assert counters._args.iteration == 5
