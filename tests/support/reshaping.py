"""Megatron jobs in any layout whose state is a known function of key and place: every element can be compared."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ftckpt.config import Config
from ftckpt.frameworks.tensors import flat, fragments
from ftckpt.model import objects
from ftckpt.model.fragment import Fragment
from tests.support.elements import positions
from tests.support.jobs import TINY

ITERATION = 3
STEP = 5.0
CONSUMED = 7 * 8
EPSILON = 2.0**-20
VOCABULARY = 257
NOT_CARRIED = ("local/",)


@dataclass(frozen=True)
class Model:
    """``argv`` are arguments of launch/train_gpt.py; ``mla`` and ``grouped`` what that script has no words for.

    ``trains``: whether its forward runs on a CPU.
    """

    name: str
    argv: tuple[str, ...]
    mla: bool = False
    grouped: bool = False
    trains: bool = True


MODELS = {
    model.name: model
    for model in (
        Model("gpt-tied", ("--layers", "4", "--dropout", "0")),
        Model(
            "llama-gqa-untied",
            ("--layers", "4", "--swiglu", "--kv-groups", "2", "--untie", "--sequence-parallel", "--dropout", "0"),
        ),
        Model("moe-sequential", ("--num-experts", "4", "--router-bias", "--swiglu")),
        Model("moe-grouped", ("--num-experts", "4", "--swiglu"), grouped=True, trains=False),
        Model("mla", ("--layers", "2", "--swiglu"), mla=True, trains=False),
        Model("gpt-fp32", ("--precision", "fp32")),
    )
}


@dataclass(frozen=True)
class Layout:
    """``tp2pp2dp2`` and, after a colon, ``z``: without the distributed optimizer."""

    text: str

    @property
    def sizes(self) -> dict[str, int]:
        found = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", self.text.partition(":")[0])}
        return {axis: found.get(axis, 1) for axis in ("tp", "pp", "vpp", "cp", "ep", "dp")} | (
            {"etp": found["etp"]} if "etp" in found else {}
        )

    @property
    def distributed_optimizer(self) -> bool:
        return "z" not in self.text.partition(":")[2]

    @property
    def world_size(self) -> int:
        sizes = self.sizes
        return sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"]

    @property
    def padded_vocabulary(self) -> int:
        multiple = 8 * self.sizes["tp"]
        return -(-VOCABULARY // multiple) * multiple


@dataclass(frozen=True)
class Check:
    """What a target found: ``problems`` in words, and how much it compared.

    ``generators``: of each random generator, a digest of its state as the job seeded it, and after the restart.
    """

    problems: list[str]
    start: int | None
    elements: int
    generators: dict[str, tuple[int, int]]
    loss: float | None = None


def build(layout: Layout, model: Model, seed: int, argv: Sequence[str] = ()) -> Any:
    """The job of launch/train_gpt.py in a layout that script cannot name; torch.distributed must be ready."""
    import train_gpt
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    sizes = layout.sizes
    words = [f"--{axis}={sizes[axis]}" for axis in ("tp", "pp", "vpp", "ep")]
    optimizer = [] if layout.distributed_optimizer else ["--no-distributed-optimizer"]
    args = train_gpt.parse_args([*TINY, *model.argv, *words, *optimizer, "--iterations", "9", *argv])
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        virtual_pipeline_model_parallel_size=sizes["vpp"] if sizes["vpp"] > 1 else None,
        context_parallel_size=sizes["cp"],
        expert_model_parallel_size=sizes["ep"],
        expert_tensor_parallel_size=sizes.get("etp"),
        create_gloo_process_groups=False,
    )
    seed += 100 * mpu.get_pipeline_model_parallel_rank()
    for seeded in (random.seed, np.random.seed, torch.manual_seed, model_parallel_cuda_manual_seed):
        seeded(seed)
    config = _config(train_gpt, args, model, sizes)
    train_gpt.block_spec = lambda args, config, stage: _spec(train_gpt, model, config, stage)
    chunks = train_gpt.build_model(args, config)
    optimizer_ = train_gpt.build_optimizer(args, chunks)
    scheduler = train_gpt.build_scheduler(args, optimizer_)
    config.grad_scale_func = optimizer_.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    num_micro = args.global_batch // (args.micro_batch * sizes["dp"])
    data = train_gpt.TextData(args.seq, args.seed)
    return train_gpt.Job(args, config, chunks, optimizer_, scheduler, data, num_micro)


def _config(script: Any, args: Any, model: Model, sizes: dict[str, int]) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = script.transformer_config(args)
    changes: dict[str, Any] = {"context_parallel_size": sizes["cp"]}
    if "etp" in sizes:
        changes["expert_tensor_parallel_size"] = sizes["etp"]
    if model.grouped:
        changes |= {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True}
    if not model.mla:
        return replace(config, **changes)

    values = {f.name: getattr(config, f.name) for f in fields(config) if f.init}
    small = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8}
    return MLATransformerConfig(**{**values, **changes, **small, "multi_latent_attention": True})


def _spec(script: Any, model: Model, config: Any, stage: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe import experts
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    if model.mla:
        from megatron.core.transformer import multi_latent_attention

        multi_latent_attention.TELinear = type("TELinear", (), {})  # compared with, and None without the engine
    if model.grouped:  # what its forward needs cannot be installed here; nothing of it is called
        experts.gg.assert_grouped_gemm_is_available = lambda: None
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=model.grouped,
        moe_use_legacy_grouped_gemm=model.grouped,
        multi_latent_attention=model.mla,
        qk_layernorm=model.mla,
    )
    layer.submodules.input_layernorm = script.LayerNorm
    layer.submodules.pre_mlp_layernorm = script.LayerNorm
    attention = layer.submodules.self_attention.submodules
    if model.mla:
        attention.q_layernorm = attention.kv_layernorm = script.LayerNorm
    if config.context_parallel_size > 1 or model.mla:  # Megatron's own wants Transformer Engine; it has no state

        class NoAttention(torch.nn.Module):
            def __init__(self, **_kwargs: Any) -> None:
                super().__init__()

        attention.core_attention = NoAttention
    layers = get_num_layers_to_build(config, vp_stage=stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=script.LayerNorm)


def expected(fragment: Fragment) -> npt.NDArray[np.float32]:
    """What the elements of a fragment are: numbers in [2**-4, 2**-3) that key and place alone decide."""
    role, _, key = fragment.key.partition("/")
    if role == "step":
        return np.full(fragment.numel, STEP, np.float32)
    role = "master" if role == "weight" else role  # weights are casts of masters
    seed = np.uint64(int.from_bytes(f"{role}/{key}".encode()[-48:], "little") % (1 << 61))
    words = (positions(fragment).astype(np.uint64) + seed) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    mantissa = (words >> np.uint64(41)).astype(np.uint32)
    return (mantissa | np.uint32(123 << 23)).view(np.float32)


def fill(described: Any) -> None:
    """Give every element its expected value."""
    pieces = [*described.stepped, *described.volatile]
    for piece in pieces:
        if piece.tensor.is_floating_point() and not piece.fragment.key.startswith(NOT_CARRIED):
            piece.tensor.copy_(torch.from_numpy(expected(piece.fragment)))


def wrong(described: Any, rows: int) -> tuple[list[str], int]:
    """Pieces with other elements than expected, bit for bit, and the number compared. Rows of a vocabulary beyond
    ``rows`` were in no snapshot."""
    problems, compared = [], 0
    for piece in [*described.stepped, *described.volatile]:
        fragment = piece.fragment
        if not piece.tensor.is_floating_point() or fragment.key.startswith(NOT_CARRIED):
            continue
        wanted = torch.from_numpy(expected(fragment)).to(piece.tensor.dtype)
        same = (piece.tensor == wanted).numpy()
        if fragment.key in described.padded or fragment.key.partition("/")[2] in described.padded:
            width = int(np.prod(fragment.global_shape[1:], dtype=np.int64))
            same = same | (positions(fragment) >= rows * width)
        compared += len(same)
        if not same.all():
            problems.append(f"{fragment.name}: {int((~same).sum())} of {len(same)} elements differ")
    return problems, compared


def parameters_wrong(job: Any, rows: int) -> list[str]:
    """Whole parameters of the model, those that other ranks own and gathered among them, against what they are."""
    from megatron.core.utils import unwrap_model

    from ftckpt.megatron.geometry import place_tensors

    problems = []
    places = place_tensors([unwrap_model(chunk) for chunk in job.model]).parameters
    for parameter, placed in places.items():
        for fragment, view in fragments(placed, "weight", flat(parameter), 0):
            wanted = torch.from_numpy(expected(fragment)).to(view.dtype)
            same = (view == wanted).numpy()
            if "word_embeddings" in fragment.key or "output_layer" in fragment.key:
                same = same | (positions(fragment) >= rows * fragment.global_shape[1])
            if not same.all():
                problems.append(f"parameter {fragment.name}: {int((~same).sum())} of {len(same)} differ")
    return problems


def attach(job: Any, settings: dict[str, Any], nodes: Sequence[str], rank: int) -> Any:
    import ftckpt.megatron

    config = Config(enabled=True, node=nodes[rank % len(nodes)], **{"protect": "none", "interval": 1, **settings})
    objects = {"data": job.data, "progress": job.progress}
    job.checkpointer = ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, objects, config=config)
    return job.checkpointer


def epsilon(group: dict[str, Any]) -> float:
    """A hyperparameter that no scheduler sets, other for each kind of parameters."""
    return EPSILON * (1 + float(group["wd_mult"]))


def leave(rank: int, world_size: int, source: Layout, model: Model, settings: dict[str, Any]) -> str:
    """Leave a snapshot of the known state in ``source``'s layout; returns nothing but problems."""
    from ftckpt.megatron.state import MegatronState

    job = build(source, model, seed=1234)
    fill(MegatronState(job.model, job.optimizer, job.scheduler, {}).describe())
    checkpointer = attach(job, settings, ["node"], rank)
    assert checkpointer.restore() is None
    for group in job.optimizer.param_groups:
        group["eps"] = epsilon(group)
    job.scheduler.num_steps = 24
    job.data.consumed_samples = job.progress.consumed_samples = CONSUMED
    job.iteration = ITERATION
    checkpointer.step(ITERATION)
    checkpointer.close(remove=False)
    return ""


Case = tuple[Layout, dict[str, Any]]


def arrive(rank: int, world_size: int, source: Layout, model: Model, cases: Sequence[Case]) -> list[Check]:
    """Restore in each of several layouts of one size, one after the other, and compare everything."""
    return [_arrive(rank, source, model, case) for case in cases]


def _arrive(rank: int, source: Layout, model: Model, case: Case) -> Check:
    from megatron.core.tensor_parallel import random as megatron_random

    import ftckpt.megatron
    from ftckpt.megatron.state import MegatronState, derive_rng, save_rng

    layout, settings = case
    megatron_random.get_cuda_rng_tracker().reset()
    job = build(layout, model, seed=4321)
    job.scheduler.num_steps = 8  # of a script that has advanced it
    seeded = save_rng()
    checkpointer = attach(job, settings, ["node", "other", "other"], rank)
    start = checkpointer.restore()
    generators = save_rng()
    rows = min(source.padded_vocabulary, layout.padded_vocabulary)
    described = MegatronState(job.model, job.optimizer, job.scheduler, {}).describe()
    problems, compared = wrong(described, rows)
    problems += parameters_wrong(job, rows)
    problems += _wrong_objects(job)
    if digests(generators) != digests(derive_rng(seeded, ITERATION)):
        problems.append("generators are not those that follow from the seeds and the iteration")
    loss = _train(job, checkpointer) if model.trains and layout.sizes["cp"] == 1 else None
    checkpointer.close()
    ftckpt.megatron.remove()
    before, after = digests(seeded), digests(generators)
    return Check(problems, start, compared, {name: (before[name], after[name]) for name in before}, loss)


def digests(generators: dict[str, Any]) -> dict[str, int]:
    """By the names of generators, of the state of each but torch's own: the stand-in for a device draws from that."""
    flat = {**generators, **generators["tracker"]}
    del flat["torch"], flat["tracker"]
    return {name: xxhash.xxh3_64_intdigest(objects.encode({"": state})) for name, state in flat.items()}


def _train(job: Any, checkpointer: Any) -> float | None:
    """One iteration more, with a snapshot: hooks, optimizer and data must go together in the new layout."""
    import train_gpt

    loss: float | None = train_gpt.train_step(job)["loss"]
    checkpointer.step(job.iteration)
    return loss


def _wrong_objects(job: Any) -> list[str]:
    found = {
        "scheduler": job.scheduler.num_steps,
        "data": job.data.consumed_samples,
        "progress": (job.progress.iteration, job.progress.consumed_samples),
        "eps": [group["eps"] for group in job.optimizer.param_groups],
    }
    wanted: dict[str, Any] = {"scheduler": 24, "data": CONSUMED, "progress": (ITERATION, CONSUMED)}
    wanted["eps"] = [epsilon(group) for group in job.optimizer.param_groups]
    return [f"{name} is {found[name]}, not {wanted[name]}" for name in found if found[name] != wanted[name]]
