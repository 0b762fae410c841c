"""Megatron's own checkpoints to the universal form and back, loaded by Megatron itself in another layout."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.errors import ConvertError
from ftckpt.universal.conversion import Options, convert
from ftckpt.universal.language.spec import Spec
from ftckpt.universal.megatron.dist_reader import MegatronDistReader
from ftckpt.universal.megatron.dist_writer import MegatronDistWriter
from ftckpt.universal.megatron.legacy_reader import MegatronLegacyReader
from ftckpt.universal.universal_format import UniversalReader, UniversalWriter
from tests.support import jobs
from tests.support.elements import Elements, Wholes, differing, held, read_all, wholes
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

SEED = ("--seed", "77")
"""Another job's: nothing of the source is there by chance."""

LLAMA = ("--layers", "4", "--swiglu", "--kv-groups", "2", "--untie")
CASES = {
    "gpt-tp2pp2-to-tp1dp2": ((4, ("--tp", "2", "--pp", "2")), (2, ("--tp", "1"))),
    "llama-tp2-without-distributed-optimizer-to-pp2vpp2": (
        (2, (*LLAMA, "--tp", "2", "--no-distributed-optimizer")),
        (2, (*LLAMA, "--pp", "2", "--vpp", "2")),
    ),
    "moe-ep2-to-ep4-without-distributed-optimizer": (
        (2, ("--ep", "2", "--num-experts", "4", "--swiglu", "--router-bias")),
        (4, ("--ep", "4", "--num-experts", "4", "--swiglu", "--router-bias", "--no-distributed-optimizer")),
    ),
    "fp32-dp2-to-tp2-without-distributed-optimizer": (
        (2, ("--precision", "fp32")),
        (2, ("--precision", "fp32", "--tp", "2", "--no-distributed-optimizer")),
    ),
}


def sharded_state(job: Any, metadata: dict[str, Any], **loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    metadata = {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    chunks = [unwrap_model(chunk) for chunk in job.model]
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    state = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)}
    state["optimizer"] = job.optimizer.sharded_state_dict(state, metadata=metadata, **loading)
    state["opt_param_scheduler"] = job.scheduler.state_dict()
    return state


def pieces(state: Any) -> list[Elements]:
    described = state.describe()
    stays = [p for p in (*described.stepped, *described.volatile) if not p.fragment.key.startswith("local/")]
    return held(stays)


def saved(rank: int, world_size: int, argv: Sequence[str], path: str, sharding: str) -> list[Elements]:
    """Train two iterations, save as Megatron does; what the rank holds."""
    import train_gpt
    from megatron.core import dist_checkpointing

    job, state = jobs.built(*argv)
    for _ in range(2):
        train_gpt.train_step(job)
    metadata = {
        "distrib_optim_sharding_type": sharding,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }
    dist_checkpointing.save(
        {**sharded_state(job, metadata), "iteration": job.iteration, "checkpoint_version": 3.0},
        path,
        content_metadata=metadata,
    )
    return pieces(state)


def loaded(rank: int, world_size: int, argv: Sequence[str], path: str, iteration: int = 2) -> list[Elements]:
    """The state of a rank of another job after Megatron has loaded the checkpoint."""
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    job, state = jobs.built(*argv, *SEED)
    metadata = dist_checkpointing.load_content_metadata(path)
    found = dist_checkpointing.load(sharded_state(job, metadata, is_loading=True), path)
    for index, chunk in enumerate(job.model):
        unwrap_model(chunk).load_state_dict(found["model" if len(job.model) == 1 else f"model{index}"])
    job.optimizer.load_state_dict(found["optimizer"])
    job.scheduler.load_state_dict(found["opt_param_scheduler"])
    assert found["iteration"] == iteration
    assert job.scheduler.num_steps == iteration * 8
    return pieces(state)


def consolidated(results: Sequence[Any]) -> Wholes:
    """All ranks' pieces as full tensors; replicas must be equal, and nothing may be missing."""
    return wholes(piece for result in results for piece in result.value)


def assert_equal(found: Wholes, right: Wholes) -> None:
    assert set(found) == set(right) and not differing(found, right)


@pytest.mark.parametrize("name", by_default(CASES, []))
def test_megatron_to_universal_to_megatron_in_another_layout(name: str, tmp_path: Path) -> None:
    (world_size, argv), (other_size, other_argv) = CASES[name]
    (tmp_path / "save").mkdir()
    live = consolidated(run_ranks(saved, world_size, argv, str(tmp_path / "save"), "fully_reshardable"))

    source = MegatronDistReader(tmp_path / "save")
    report = convert(source, UniversalWriter(tmp_path / "universal"), Options())
    assert report.tensors >= len(live)
    source.close()
    assert_equal(read_all(UniversalReader(tmp_path / "universal")), live)

    writer = MegatronDistWriter(tmp_path / "back", max_file_bytes=100_000)
    report = convert(UniversalReader(tmp_path / "universal"), writer, Options(workers=2))
    assert report.files > 1
    again = consolidated(run_ranks(loaded, other_size, other_argv, str(tmp_path / "back" / "iter_0000002")))
    assert_equal(again, live)

    convert(MegatronDistReader(tmp_path / "back"), UniversalWriter(tmp_path / "again"), Options())
    assert_equal(read_all(UniversalReader(tmp_path / "again")), read_all(UniversalReader(tmp_path / "universal")))


@pytest.mark.slow
def test_optimizer_state_of_one_layout_is_refused_with_the_flag_to_save_otherwise(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    live = consolidated(run_ranks(saved, 2, ["--tp", "2"], str(tmp_path / "save"), "dp_reshardable"))
    with pytest.raises(ConvertError, match="--dist-ckpt-optim-fully-reshardable"):
        MegatronDistReader(tmp_path / "save")
    convert(
        MegatronDistReader(tmp_path / "save", roles={"weight"}), UniversalWriter(tmp_path / "universal"), Options()
    )
    assert_equal(
        read_all(UniversalReader(tmp_path / "universal")), {k: v for k, v in live.items() if k.startswith("weight/")}
    )


def saved_legacy(rank: int, world_size: int, argv: Sequence[str], path: str) -> list[Elements]:
    """Train two iterations and write what ``save_checkpoint`` writes in the ``torch`` format."""
    import train_gpt
    from megatron.core import parallel_state as mpu
    from megatron.core.utils import unwrap_model

    job, state = jobs.built(*argv)
    for _ in range(2):
        train_gpt.train_step(job)
    name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
    if mpu.get_expert_model_parallel_world_size() > 1:
        name += f"_{mpu.get_expert_model_parallel_rank():03d}"
    directory = Path(path) / "iter_0000002" / name
    chunks = [unwrap_model(chunk) for chunk in job.model]
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    models = {name: chunk.state_dict_for_save_checkpoint() for name, chunk in zip(names, chunks, strict=True)}
    args = arguments(job.args, mpu)
    whole = {**models, "args": args, "iteration": 2, "checkpoint_version": 3.0}
    whole |= {"optimizer": job.optimizer.state_dict(), "opt_param_scheduler": job.scheduler.state_dict()}
    if mpu.get_expert_data_parallel_rank() == 0:
        directory.mkdir(parents=True)
        torch.save(whole, directory / "model_optim_rng.pt")
    torch.distributed.barrier()
    if job.args.distributed_optimizer:
        gather(job.optimizer).save_parameter_state(str(directory / "distrib_optim.pt"))
    Path(path, "latest_checkpointed_iteration.txt").write_text("2")
    return pieces(state)


def gather(optimizer: Any) -> Any:
    """The optimizer, with the group over which the ``torch`` format gathers its state."""
    for leaf in optimizer.chained_optimizers:
        leaf.data_parallel_group_gloo = leaf.data_parallel_group
    return optimizer


def arguments(args: Any, mpu: Any) -> Any:
    """The arguments that Megatron's own command line would have saved, by its names, with an enumeration."""
    from megatron.core.transformer.enums import AttnBackend

    return argparse.Namespace(
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        expert_model_parallel_size=args.ep,
        untie_embeddings_and_output_weights=args.untie,
        num_attention_heads=args.heads,
        num_query_groups=args.kv_groups,
        swiglu=args.swiglu,
        attention_backend=AttnBackend.auto,
    )


LEGACY = {
    "gpt": (2, ("--tp", "2", "--no-distributed-optimizer"), "gpt"),
    "gpt-pp2-distributed-optimizer": (4, ("--pp", "2"), "gpt"),
    "llama-vpp2": (
        2,
        ("--pp", "2", "--vpp", "2", "--layers", "4", "--swiglu", "--untie", "--kv-groups", "2"),
        "llama",
    ),
    "mixtral-ep2": (2, ("--ep", "2", "--num-experts", "4", "--swiglu"), "mixtral"),
}


@pytest.mark.parametrize("name", by_default(LEGACY, ["gpt-pp2-distributed-optimizer"]))
def test_legacy_checkpoints_are_read_with_a_specification(name: str, tmp_path: Path) -> None:
    world_size, argv, spec = LEGACY[name]
    live = consolidated(run_ranks(saved_legacy, world_size, argv, str(tmp_path)))
    source = MegatronLegacyReader(tmp_path, Spec.load(spec))
    convert(source, UniversalWriter(tmp_path / "universal"), Options())
    assert_equal(read_all(UniversalReader(tmp_path / "universal")), live)
    assert source.catalog.layout["tp"] == (2 if "--tp" in argv else 1)
    (next(tmp_path.glob("iter_*/mp_rank_*")) / "model_optim_rng.pt").unlink()
    with pytest.raises(ConvertError, match=r"(is|are) missing|has no mp_rank"):
        MegatronLegacyReader(tmp_path, Spec.load(spec))
