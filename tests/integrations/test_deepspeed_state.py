"""A DeepSpeed rank's description of its state is right and complete, and restores training bit by bit."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from ftckpt.capture.assignment import assign
from ftckpt.config import Config
from ftckpt.errors import CaptureError, MismatchError, UnsupportedError
from ftckpt.frameworks import entry
from ftckpt.model.objects import decode, encode
from ftckpt.model.replicas import WHOLE_SHARE
from tests.support import ds_jobs, jobs
from tests.support.ds_jobs import BF16, SHAPES, Shape, fp16, zero
from tests.support.elements import Elements, held, wholes
from tests.support.errors import message_of
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.multiproc

TINY = ["--layers", "2", "--hidden", "16", "--heads", "2", "--seq", "16", "--iterations", "99"]
FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
CPU = {"device": "cpu"}
MORE = {
    "bf16-pp2-dp2": Shape(4, ["--pp", "2"], BF16),
    "fp16-static": Shape(2, config={"fp16": {"enabled": True, "loss_scale": 128.0}}),
    "zero1-freeze": Shape(2, ["--freeze"], BF16 | zero(1)),
    "zero1-aligned": Shape(3, config=BF16 | zero(1, parameter_alignment=True)),
    "zero1-adagrad": Shape(2, config=zero(1) | {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}}),
    "zero1-tp2": Shape(4, ["--tp", "2"], BF16 | zero(1)),
    "zero2-round-robin": Shape(2, config=BF16 | zero(2, round_robin_gradients=True)),
    "zero2-own-steps": Shape(2, config=BF16 | zero(2) | {"managed_gradient_accumulation": False}),
    "zero3-fp16": Shape(2, config=fp16(19) | zero(3)),
    # Three leave padding in the shards, whose bytes mean nothing.
    "zero3-sub-groups": Shape(4, config=BF16 | zero(3, sub_group_size=500)),
    "zero3-offload": Shape(2, config=BF16 | zero(3, offload_optimizer=CPU, offload_param=CPU)),
    "pp2-dp2-fp32-accumulation": Shape(4, ["--pp", "2", "--tie"], BF16 | zero(1) | FP32_ACCUMULATION),
    "moe-ep2-zero1": Shape(4, ["--num-experts", "4", "--ep", "2"], zero(1)),
    "moe-ep2-fp32-accumulation": Shape(4, ["--num-experts", "4", "--ep", "2"], BF16 | zero(1) | FP32_ACCUMULATION),
}
ALL = SHAPES | MORE
QUICK = (
    "fp32-sgd",
    "zero1-fp16",
    "zero2-round-robin",
    "zero3-sub-groups",
    "zero3-tp2",
    "bf16-pp2-dp2",
    "pp2-tp2-dp2",
    "moe-ep2-zero2",
)
"""At least one of each kind of optimizer, partition and axis."""


def build(shape: Shape) -> tuple[Any, Any]:
    """A job and its state."""
    job = ds_jobs.build(shape, TINY)
    from ftckpt.deepspeed.state import DeepSpeedState

    return job, DeepSpeedState(job.engine, {"data": job.data})


def steps(job: Any, number: int) -> list[dict[str, Any]]:
    import train_deepspeed

    return [train_deepspeed.train_step(job) for _ in range(number)]


def first(rank: int, world_size: int, shape: Shape) -> tuple[list[Elements], dict[str, np.ndarray[Any, Any]]]:
    """The stepped pieces before training, and what the model is as it is built."""
    job, state = build(shape)
    return held(state.describe().stepped), as_built(job) if rank == 0 else {}


def as_built(job: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The weights that the model has as it is built, undivided, in the precision in which it trains."""
    import deepspeed_model
    import train_deepspeed

    args = job.args
    shape = deepspeed_model.Shape(
        train_deepspeed.NUM_TOKENS, args.seq, args.hidden, args.heads, args.layers, args.dropout, args.num_experts
    )
    if job.is_pipeline:
        weights = {}
        for index, layer in enumerate(deepspeed_model.pipeline_layers(shape, args.tie)):
            prefix = f"tied_modules.{layer.key}" if hasattr(layer, "key") else str(index)
            weights.update({f"{prefix}.{name}": weight for name, weight in layer.build().named_parameters()})
    else:
        weights = dict(deepspeed_model.LanguageModel(shape, args.tie).named_parameters())
    dtype = job.engine.get_data_types()[0]
    return {name: weight.detach().to(dtype).double().numpy() for name, weight in weights.items()}


DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def together(found: list[list[Elements]]) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors that the fragments of all ranks make up, as numbers."""
    joined = wholes(pair for of_rank in found for pair in of_rank)
    return {
        key: torch.from_numpy(data).view(DTYPES[dtype]).double().numpy().reshape(shape)
        for key, (dtype, shape, data) in joined.items()
    }


@pytest.mark.parametrize("name", by_default(ALL, QUICK))
def test_fragments_of_all_ranks_make_up_the_model(name: str) -> None:
    """Element by element what a single process builds, under the same names for every layout."""
    found = [result.value for result in run_ranks(first, ALL[name].ranks, ALL[name], stand_in=False)]
    tensors, built = together([pieces for pieces, _ in found]), found[0][1]
    assert {key for key in tensors if key.startswith("weight/")} == {f"weight/{key}" for key in built}
    for key, weight in built.items():
        assert np.array_equal(tensors[f"weight/{key}"], weight), key
        if f"master/{key}" in tensors:
            # Without ZeRO DeepSpeed makes an optimizer's state by a step with zero gradients, which decays masters.
            np.testing.assert_allclose(tensors[f"master/{key}"], weight, rtol=0 if "zero" in name else 1e-4)
    roles = {key.partition("/")[0] for key in tensors}
    assert ("master" in roles) == (name not in ("fp32", "fp32-sgd", "pp4"))
    if "sgd" in name:
        assert "momentum_buffer" in roles
    elif "adagrad" in name:
        assert "sum" in roles
    else:
        assert {"exp_avg", "exp_avg_sq", "step"} <= roles


@pytest.mark.parametrize("name", by_default(ALL, [name for name in QUICK if "pp2" not in name]))
def test_training_goes_on_from_what_was_saved_to_the_bit(name: str, settings: dict[str, Any]) -> None:
    assert jobs.goes_on(ds_jobs.outcomes, ds_jobs.Run(ALL[name], 5, settings), 3) in (2, 3)


def captured(rank: int, world_size: int, shape: Shape) -> dict[str, Any]:
    """The pieces that a rank copies."""

    from ftckpt.deepspeed.geometry import coordinates, layout_sizes

    job, state = build(shape)
    described = state.describe()
    start = entry.start(Config(job="job", node="node"), lambda: (coordinates(job.engine), layout_sizes(job.engine)))
    topology = start.topology
    assignment = assign(start.group, start.topology, described, 1 << 20, 1 << 20)
    places = [(p.tensor.data_ptr(), p.fragment.nbytes) for p in described.stepped if p.fragment.numel > 1]
    places.sort()
    return {
        "copied": sum(f.nbytes for f in assignment.manifest.stepped),
        "wholes": {(p.fragment.key, p.fragment.global_shape, p.fragment.item_bytes) for p in described.stepped},
        "overlap": [a for a, b in itertools.pairwise(places) if a[0] + a[1] > b[0]],
        "derived": [piece.fragment.key for piece in assignment.derived],
        "differing": dict(assignment.differing),
        "place": (topology.me.shard, dict(topology.layout)),
    }


def test_every_byte_is_copied_by_one_rank_and_derived_weights_by_none() -> None:
    shape = Shape(8, ["--pp", "2", "--tp", "2"], BF16 | zero(1))
    results = [result.value for result in run_ranks(captured, shape.ranks, shape, stand_in=False)]
    wholes = {whole for value in results for whole in value["wholes"]}
    derived = {key for value in results for key in value["derived"]}
    for value in results:
        assert value["overlap"] == [] and not value["differing"]
        assert value["place"][1] == {"tp": 2, "pp": 2, "dp": 2, "ep": "1", "zero": 1}
    assert len({value["place"][0] for value in results}) == 8
    assert derived == {key for key, _, _ in wholes if key.startswith("weight/")}
    due = sum(np.prod(size, dtype=int) * item_bytes for key, size, item_bytes in wholes if key not in derived)
    # What is next to nothing is copied by each of its holders.
    assert due <= sum(value["copied"] for value in results) <= due + due // WHOLE_SHARE


OFFLOAD = "zero_optimization.offload_optimizer"
ADAM = {"lr": 1e-3, "torch_adam": True}
BY_JSON = {
    f"{OFFLOAD}.device nvme": zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/tmp"}),
    "zero_optimization.offload_param.device nvme": zero(3, offload_param={"device": "nvme", "nvme_path": "/tmp"}),
    f"{OFFLOAD}.super_offload": zero(3, offload_optimizer={"device": "cpu", "super_offload": True}),
    f"{OFFLOAD}.ratio below 1": zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}),
    "zero_optimization.zenflow": zero(2, offload_optimizer=CPU, zenflow={"topk_ratio": 0.1, "update_interval": 2}),
    "zero_optimization.zero_hpz_partition_size": zero(3, zero_hpz_partition_size=2),
    "zero_optimization.zero_quantized_weights": zero(3, zero_quantized_weights=True),
    "or _gradients": zero(3, zero_quantized_gradients=True),
    "fp16.fp16_master_weights_and_grads": zero(2)
    | {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    "bf16.bf16_optimizer_states": zero(2, offload_optimizer=CPU)
    | {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    "tensor_parallel.autotp_size": {"tensor_parallel": {"autotp_size": 2}},
    "expert_parallel (AutoEP)": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    "hybrid_engine": {"hybrid_engine": {"enabled": True}},
    "torch_autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "data_efficiency": {"data_efficiency": {"enabled": True}},
    "compile.deepcompile": {"compile": {"deepcompile": True}},
}
"""Some of these cannot be built without a GPU, a disk or a compiler: an engine is given their configuration."""


def refused_by_json(rank: int, world_size: int, texts: list[str]) -> dict[str, str]:
    from deepspeed.runtime.config import DeepSpeedConfig

    job, _ = build(Shape(1))
    from ftckpt.deepspeed import support

    found = {}
    for text in texts:
        job.engine._config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2, **BY_JSON[text]})
        found[text] = message_of(lambda: support.check(job.engine), UnsupportedError)
    return found


def test_what_is_not_known_is_refused_by_its_json_field_with_what_to_do() -> None:
    (result,) = run_ranks(refused_by_json, 1, list(BY_JSON), stand_in=False)
    assert set(result.value) == set(BY_JSON)
    for text, told in result.value.items():
        assert told.startswith("DeepSpeed's ") and text in told and "; " in told


REFUSED = {
    "sequence_parallel_size": Shape(2, config=zero(1) | {"sequence_parallel_size": 2, "data_parallel_size": 1}),
    "optimizer.type Muon": Shape(2, config=BF16 | zero(1) | {"optimizer": {"type": "Muon", "params": ADAM}}),
    "experts together with a PipelineModule": Shape(2, ["--pp", "2", "--num-experts", "2"], BF16 | zero(1)),
    "the engine has no optimizer": Shape(2, config={"optimizer": "none", "scheduler": "none"}),
    "known are Adam, AdamW, SGD and Adagrad of torch, FusedAdam": Shape(
        2,
        config=zero(1)
        | {"optimizer": {"type": "RMSprop", "params": {"lr": 1e-3}}, "zero_allow_untested_optimizer": True},
    ),
}


def refused(rank: int, world_size: int, shape: Shape) -> str:
    def describe() -> None:
        build(shape)[1].describe()

    return message_of(describe, UnsupportedError)


@pytest.mark.parametrize("text", REFUSED)
def test_engines_that_are_not_known_are_refused(text: str) -> None:
    told = [result.value for result in run_ranks(refused, 2, REFUSED[text], stand_in=False)]
    assert text in told[-1]
    assert text in told[0] or "PipelineModule" in text  # its first stage has no experts


def spoilt_marks(rank: int, world_size: int, shape: Shape) -> list[str]:
    """The refusal of parameters whose place is not known."""
    job, state = build(shape)
    (name, weight), *_ = [(n, p) for n, p in job.engine.module.named_parameters() if n.endswith("query.weight")]
    told = []
    for mark, wrong in (
        ("partition_dim", None),
        ("partition_stride", 2),
        ("requires_grad", True),
        ("allreduce", False),
    ):
        parameter = job.engine.module.get_parameter("1.positions") if mark == "requires_grad" else weight
        before = getattr(parameter, mark, True)
        setattr(parameter, mark, wrong)
        told.append(message_of(state.describe, UnsupportedError))
        setattr(parameter, mark, 1 if mark == "partition_stride" else before)
    state.describe()
    return [text.replace(name, "NAME") for text in told]


def test_a_parameter_whose_place_is_not_known_is_refused_by_name() -> None:
    shape = Shape(2, ["--pp", "1", "--tp", "2", "--freeze"], BF16 | zero(1))
    for result in run_ranks(spoilt_marks, 2, shape, stand_in=False):
        no_dim, stride, unstepped, expert = result.value
        assert no_dim.startswith("parameter NAME") and "set partition_dim" in no_dim
        assert stride.startswith("parameter NAME") and "partition_stride 2" in stride
        assert unstepped.startswith("parameter 1.positions") and "requires_grad_(False)" in unstepped
        assert expert.startswith("parameter NAME") and "deepspeed.moe.layer.MoE" in expert


def replaced(rank: int, world_size: int, shape: Shape, what: str) -> str:
    from ftckpt.deepspeed import optimizers

    job, state = build(shape)
    state.describe()
    steps(job, 1)
    state.save_objects()
    if what == "state":
        inner = optimizers.inner(job.engine.optimizer)
        inner.load_state_dict(copy.deepcopy(inner.state_dict()))
    else:
        parameter = next(job.engine.module.parameters())
        parameter.data = parameter.data.clone()
    return message_of(state.save_objects, CaptureError)


@pytest.mark.parametrize("what", ["state", "weights"])
def test_replaced_tensors_are_noticed_before_dead_memory_is_copied(what: str) -> None:
    for result in run_ranks(replaced, 2, SHAPES["zero1"], what, stand_in=False):
        assert "replaced after training began" in result.value


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.937, 0.99]}}}
COMPILED = {
    "fp16-fused": Shape(2, config=fp16(19) | ADAMW),
    "zero1-fused": Shape(2, config=BF16 | zero(1) | ADAMW),
    "zero3-fused": Shape(2, config=BF16 | zero(3, sub_group_size=500) | ADAMW),
    "zero2-cpu-adam": Shape(2, config=BF16 | zero(2, offload_optimizer=CPU) | ADAMW),
    "zero3-cpu-adam": Shape(
        2, config=BF16 | zero(3, offload_optimizer=CPU, offload_param=CPU, sub_group_size=500) | ADAMW
    ),
}
"""Optimizers that DeepSpeed compiles when they are first used, which takes minutes."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_optimizers_go_on_to_the_bit(name: str, settings: dict[str, Any]) -> None:
    outcomes = functools.partial(ds_jobs.outcomes, timeout_secs=600.0)
    assert jobs.goes_on(outcomes, ds_jobs.Run(COMPILED[name], 5, settings), 3) in (2, 3)


def small_state(rank: int, world_size: int, shape: Shape) -> None:
    """State that the model above does not use is restored as well."""
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    job, state = build(shape)
    state.describe()
    steps(job, 1)
    tracker, offset = get_cuda_rng_tracker(), job.engine.module.micro_offset
    assert offset > 0
    tracker.add("model-parallel-rng", 1234)
    kept = {name: value.clone() for name, value in tracker.get_states().items()}
    saved = decode(encode(state.save_objects()))
    with tracker.fork():
        torch.rand(1)
    steps(job, 1)
    assert job.engine.module.micro_offset > offset
    assert rank or not job.engine.first_output_send
    assert not rank or job.engine.pipe_recv_buf is not None
    state.load_objects(saved)
    state.finish_load()
    state.set_rng()
    assert job.engine.module.micro_offset == offset
    assert job.engine.first_output_send and job.engine.pipe_recv_buf is None  # stages agree on shapes anew
    assert all(torch.equal(value, kept[name]) for name, value in tracker.get_states().items())


def test_named_generators_and_what_seeds_layers_come_back() -> None:
    run_ranks(small_state, 2, Shape(2, ["--pp", "2"]), stand_in=False)


def without_object(rank: int, world_size: int) -> str:
    _, state = build(Shape(1))
    state.describe()
    saved = state.save_objects()
    saved["objects"] = {}
    return message_of(lambda: state.load_objects(saved), MismatchError)


def test_an_object_that_the_snapshot_does_not_have_is_named() -> None:
    (result,) = run_ranks(without_object, 1, stand_in=False)
    assert "'data'" in result.value and "register" in result.value
