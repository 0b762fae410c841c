"""What a DeepSpeed rank says of its state is true, is all of it, and brings training back to the bit."""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ftckpt.capture.assignment import as_bytes, assign, rule_holds
from ftckpt.config import Config
from ftckpt.errors import CaptureError, MismatchError, UnsupportedError
from ftckpt.frameworks import entry
from ftckpt.model.objects import decode, encode
from ftckpt.model.replicas import WHOLE_SHARE
from tests.support import ds_jobs
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
    "zero3-sub-groups": Shape(3, config=BF16 | zero(3, sub_group_size=500)),
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
BEFORE, AFTER = 3, 2
"""Iterations before the boundary that is saved, and after it."""


@dataclass(frozen=True)
class Life:
    """One rank's training without a break, and what it saved in the middle.

    ``first`` are the stepped pieces before training; ``pieces`` those at the boundary, with bytes, or None where
    they are derived; ``told`` is what DeepSpeed itself says of parameters then.
    """

    first: list[Elements]
    built: dict[str, np.ndarray[Any, Any]]
    at_boundary: list[Elements]
    told: list[tuple[str, Any, np.ndarray[Any, Any]]]
    pieces: list[tuple[str, bytes | None]]
    objects: bytes
    rows: list[dict[str, Any]]
    end: dict[str, str]


def build(shape: Shape) -> tuple[Any, Any]:
    """A job and its state."""
    job = ds_jobs.build(shape, TINY)
    from ftckpt.deepspeed.state import DeepSpeedState

    return job, DeepSpeedState(job.engine, {"data": job.data})


def steps(job: Any, number: int) -> list[dict[str, Any]]:
    import train_deepspeed

    return [train_deepspeed.train_step(job) for _ in range(number)]


def live(rank: int, world_size: int, shape: Shape) -> Life:
    job, state = build(shape)
    described = state.describe()
    first = held(described.stepped)
    built = as_built(job) if rank == 0 else {}
    rows = steps(job, BEFORE)
    pieces: list[tuple[str, bytes | None]] = []
    for piece in (*described.stepped, *described.volatile):
        data = None if rule_holds(piece) else as_bytes(piece.tensor).numpy().tobytes()
        pieces.append((piece.fragment.name, data))
    objects = encode(state.save_objects())
    at_boundary, told = held(described.stepped), told_by_deepspeed(job)
    rows += steps(job, AFTER)
    return Life(first, built, at_boundary, told, pieces, objects, rows, end_of(job, described))


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


def told_by_deepspeed(job: Any) -> list[tuple[str, Any, np.ndarray[Any, Any]]]:
    """Each parameter's master and first moment as DeepSpeed gathers them: key with role, box, elements."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from ftckpt.deepspeed.geometry import place_parameters

    found: list[tuple[str, Any, np.ndarray[Any, Any]]] = []
    if not job.engine.zero_optimization_stage() or job.engine.optimizer_name() == "adagrad":
        return found
    for parameter, (placed,) in place_parameters(job.engine).items():
        if not parameter.requires_grad:
            continue
        values = {"master": safe_get_full_fp32_param(parameter)}
        if job.engine.skipped_steps < job.engine.global_steps:  # DeepSpeed knows of moments after a step
            values["exp_avg"] = safe_get_full_optimizer_state(parameter, "exp_avg")
        for role, value in values.items():
            found.append((f"{role}/{placed.key}", placed.box, value.detach().double().numpy().reshape(-1).copy()))
    return found


def end_of(job: Any, described: Any) -> dict[str, str]:
    """Hashes of all that a rank has: pieces, the weights that it computes with, RNG, counters, learning rates."""
    import train_deepspeed

    from ftckpt.deepspeed import optimizers

    engine = job.engine
    tensors = {piece.fragment.name: piece.tensor for piece in (*described.stepped, *described.volatile)}
    for name, parameter in engine.module.named_parameters():
        if not hasattr(parameter, "ds_tensor") or parameter.ds_persist:
            tensors[f"model.{name}"] = parameter
    found = {name: train_deepspeed.sha256(tensor) for name, tensor in tensors.items()}
    found["rng"] = train_deepspeed.sha256(torch.get_rng_state())
    groups = optimizers.inner(engine.optimizer).param_groups
    found["groups"] = repr([{k: v for k, v in group.items() if k != "params"} for group in groups])
    found["counters"] = repr((engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps))
    found["scheduler"] = repr(engine.lr_scheduler and engine.lr_scheduler.state_dict())
    return found


@functools.cache
def lives(name: str) -> list[Life]:
    """One per rank."""
    shape = ALL[name]
    return [result.value for result in run_ranks(live, shape.ranks, shape, stand_in=False)]


DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def together(found: list[list[Elements]]) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors that the fragments of all ranks make up, as numbers."""
    joined = wholes(pair for of_rank in found for pair in of_rank)
    return {
        key: torch.from_numpy(data).view(DTYPES[dtype]).double().numpy().reshape(shape)
        for key, (dtype, shape, data) in joined.items()
    }


def slices(box: Any) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offset, box.shape, strict=True))


@pytest.mark.parametrize("name", by_default(ALL, QUICK))
def test_fragments_of_all_ranks_make_up_the_model(name: str) -> None:
    """What a single process builds, under the same names for every layout; after training, what DeepSpeed says."""
    found = lives(name)
    tensors = together([life.first for life in found])
    built = found[0].built
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
    tensors = together([life.at_boundary for life in found])
    told = [entry for life in found for entry in life.told]
    assert bool(told) == bool(ALL[name].config.get("zero_optimization") and "adagrad" not in name)
    for key, box, values in told if "round-robin" not in name else ():  # DeepSpeed itself mistakes their order
        tensor = tensors[key] if key in tensors else tensors[key.replace("master/", "weight/")]
        assert np.array_equal(tensor[slices(box)].reshape(-1), values), key


def resume(rank: int, world_size: int, shape: Shape, saved: list[tuple[Any, bytes]]) -> Any:
    """Bring a new job to what was saved and train on."""
    job, state = build(shape)
    described = state.describe()
    spoil(job, described)
    data_of = dict(saved[rank][0])
    for piece in (*described.stepped, *described.volatile):
        data = data_of[piece.fragment.name]
        if data is not None:
            piece.tensor.view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    for piece in described.stepped:
        if data_of[piece.fragment.name] is None:
            assert piece.derived_from is not None
            piece.tensor.copy_(piece.derived_from)
    state.load_objects(decode(saved[rank][1]))
    state.finish_load()
    torch.rand(rank + 1)  # making a loader's iterator draws a number
    state.set_rng()
    rows = steps(job, AFTER)
    state.save_objects()  # nothing was replaced
    return rows, end_of(job, described)


def spoil(job: Any, described: Any) -> None:
    """Whatever is not loaded or gathered shows."""
    with torch.no_grad():
        for parameter in job.engine.module.parameters():
            parameter.fill_(float("nan"))
        for piece in described.stepped:
            piece.tensor.fill_(float("nan"))


@pytest.mark.parametrize("name", by_default(ALL, QUICK))
def test_training_goes_on_from_what_was_saved_to_the_bit(name: str) -> None:
    found, shape = lives(name), ALL[name]
    saved = [(life.pieces, life.objects) for life in found]
    results = run_ranks(resume, shape.ranks, shape, saved, stand_in=False)
    if name in ("fp16", "zero1-fp16", "zero3-fp16", "pp2-fp16"):
        assert len({row["loss_scale"] for row in found[0].rows}) > 1, "a scaler that never changed shows nothing"
    for life, result in zip(found, results, strict=True):
        rows, end = result.value
        assert rows == life.rows[BEFORE:]
        assert all(np.isfinite(row["loss"]) for row in rows)
        wrong = [key for key, value in life.end.items() if end[key] != value]
        assert not wrong, wrong[:5]


def plain(rank: int, world_size: int, shape: Shape) -> list[dict[str, Any]]:
    """The same training, of which nobody has described the state."""
    return steps(build(shape)[0], BEFORE + AFTER)


@pytest.mark.parametrize("name", ["fp32-sgd", "zero3-sub-groups"])
def test_state_made_ahead_of_the_first_step_is_what_that_step_makes(name: str) -> None:
    shape = ALL[name]
    for life, result in zip(lives(name), run_ranks(plain, shape.ranks, shape, stand_in=False), strict=True):
        assert life.rows == result.value


def captured(rank: int, world_size: int, shape: Shape) -> dict[str, Any]:
    """What a rank copies, of the pieces that it holds."""

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
    """What is said of parameters whose place is not known."""
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
def test_compiled_optimizers_go_on_to_the_bit(name: str) -> None:
    shape = COMPILED[name]
    options: dict[str, Any] = {"stand_in": False, "timeout_secs": 600.0, "pg_timeout_secs": 600.0}
    whole = [result.value for result in run_ranks(live, shape.ranks, shape, **options)]
    saved = [(life.pieces, life.objects) for life in whole]
    together([life.at_boundary for life in whole])
    for life, made in zip(whole, run_ranks(plain, shape.ranks, shape, **options), strict=True):
        assert life.rows == made.value
    for life, result in zip(whole, run_ranks(resume, shape.ranks, shape, saved, **options), strict=True):
        assert result.value == (life.rows[BEFORE:], life.end)


def small_state(rank: int, world_size: int, shape: Shape) -> None:
    """What the model above does not make use of comes back as well."""
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
