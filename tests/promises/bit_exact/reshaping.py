"""Jobs of each framework in any layout whose state is a known function of key and place, so that every element can be
compared after a restart in another layout."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash
from torch import nn

from ftckpt.config import Config
from ftckpt.frameworks.tensors import flat, fragments
from ftckpt.model import objects
from ftckpt.model.fragment import Fragment
from tests.integrations import adapters
from tests.integrations.megatron_models import known
from tests.support.ds_jobs import BF16, Shape, fp16, zero
from tests.support.elements import positions

ITERATION = 3
STEP = 5.0
CONSUMED = 7 * 8
EPSILON = 2.0**-20
VOCABULARY = 257
NOT_CARRIED = ("local/",)

MEGATRON: dict[str, str] = {
    "gpt-tied": "--layers 4 --dropout 0",
    "llama-gqa-untied": "--layers 4 --swiglu --kv-groups 2 --untie --sequence-parallel --dropout 0",
    "moe-sequential": "--num-experts 4 --router-bias --swiglu",
    "gpt-fp32": "--precision fp32",
}
"""Models of launch/train_gpt.py. A layout is ``gpt-tied/tp2pp2dp2``; ``z`` in the end: without the distributed
optimizer."""
ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
FUSED = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
"""An optimizer that DeepSpeed compiles, which takes minutes: it counts its steps in Python's numbers."""
DEEPSPEED = {
    "fp32-dp2": Shape(2),
    "fp32-dp4": Shape(4),
    "fp32-zero1-dp2": Shape(2, config=zero(1)),
    "fp32-zero3-dp4": Shape(4, config=zero(3, stage3_param_persistence_threshold=100)),
    "fp16-dp2": Shape(2, config=fp16(8)),
    "fp16-zero2-dp3": Shape(3, config=fp16(8) | zero(2)),
    "zero1-dp2": Shape(2, config=BF16 | zero(1)),
    "zero1-dp3": Shape(3, config=BF16 | zero(1)),
    "zero2-dp4": Shape(4, config=BF16 | zero(2)),
    "zero2-offload-dp2": Shape(2, config=BF16 | zero(2, offload_optimizer={"device": "cpu"})),
    "zero3-dp1": Shape(1, config=BF16 | zero(3)),
    "zero3-dp4": Shape(4, config=BF16 | zero(3, stage3_param_persistence_threshold=100)),
    "bf16-optimizer-dp2": Shape(2, config=BF16 | zero(1) | ACCUMULATION),
    "zero3-tp2-dp2": Shape(4, ["--tp", "2"], BF16 | zero(3)),
    "zero1-tp2-dp1": Shape(2, ["--tp", "2"], BF16 | zero(1)),
    "pp2-dp2": Shape(4, ["--pp", "2"], BF16 | zero(1)),
    "pp1-dp2": Shape(2, ["--pp", "1"], BF16 | zero(1)),
    "pp4-dp1": Shape(4, ["--pp", "4"], BF16),
    "pp2-tp2": Shape(4, ["--pp", "2", "--tp", "2"], BF16 | zero(1)),
    "ep2": Shape(2, ["--num-experts", "4", "--ep", "2"], BF16 | zero(1)),
    "ep1": Shape(2, ["--num-experts", "4"], BF16 | zero(2)),
    "ep4": Shape(4, ["--num-experts", "4", "--ep", "4"], BF16),
    "fused-zero1-dp2": Shape(2, config=BF16 | zero(1) | FUSED),
    "cpu-adam-zero3-dp4": Shape(
        4, config=BF16 | zero(3, offload_optimizer={"device": "cpu"}, sub_group_size=500) | FUSED
    ),
}
"""Any other layout is one of plain torch: how the model is divided, and the number of ranks."""


def ranks_of(layout: str) -> int:
    """The number of ranks of a layout."""
    if layout in DEEPSPEED:
        return DEEPSPEED[layout].ranks
    sizes = {axis: int(size) for axis, size in re.findall(r"([a-z]*)(\d+)", layout.rpartition("/")[2])}
    return int(np.prod([size for axis, size in sizes.items() if axis not in ("vpp", "ep")]))


def expected(fragment: Fragment) -> npt.NDArray[np.float32]:
    """The values of a fragment's elements: numbers from 1/16 to 1/8 that key and place alone determine."""
    role, _, key = fragment.key.partition("/")
    if role == "step":
        return np.full(fragment.numel, STEP, np.float32)
    role = "master" if role == "weight" else role  # weights are casts of masters
    return (3 / 32 + known(f"{role}/{key}", positions(fragment)) / 32).astype(np.float32)


def fill(described: Any) -> None:
    """Give every element its expected value."""
    for piece in [*described.stepped, *described.volatile]:
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


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Names and values that are not as wanted."""
    return [f"{name} is {found[name]}, not {wanted[name]}" for name in found if found[name] != wanted[name]]


def job_of(layout: str, settings: dict[str, Any], purpose: str, argv: str = "") -> Any:
    """A job in ``layout``, attached and restored. ``purpose``: to ``leave`` a snapshot of the known state, to
    ``arrive`` from one, or to ``train``."""
    kind = DeepSpeedJob if layout in DEEPSPEED else MegatronJob if "/" in layout else PlainJob
    return kind(layout, {"enabled": True, "protect": "none", **settings}, purpose, argv.split())


class MegatronJob(adapters.MegatronJob):
    """The example job of launch/train_gpt.py."""

    noise = 5e-3
    """Relative; products of bf16 numbers are summed in another order."""

    def __init__(self, layout: str, settings: dict[str, Any], purpose: str, argv: list[str]) -> None:
        import train_gpt

        from ftckpt.megatron.state import save_rng

        if purpose == "train":
            train_gpt.NUM_TOKENS = 288  # no padding in any layout: rows of padding take part in the softmax
            argv += ["--dropout", "0"]
        model, _, sizes = layout.partition("/")
        words = [f"--{axis}={n}" for axis, n in re.findall(r"([a-z]+)(\d+)", sizes) if axis != "dp"]
        words += ["--no-distributed-optimizer"] * sizes.endswith("z")
        words += ["--seed", "4321" if purpose == "arrive" else "1234"]
        super().__init__([*MEGATRON[model].split(), *words, *argv])
        if purpose == "leave":
            fill(self.describe())
        if purpose == "arrive":
            self.job.scheduler.num_steps = 8  # of a script that has advanced it
        self._seeded = save_rng()
        self.attach(Config(interval=1, **settings))
        self.start = self.iteration or None
        self._restored = save_rng()

    @staticmethod
    def rows(layout: str) -> int:
        """The rows of the vocabulary, with its padding."""
        found = re.search(r"tp(\d+)", layout)
        multiple = 8 * (int(found[1]) if found else 1)
        return -(-VOCABULARY // multiple) * multiple

    def describe(self) -> Any:
        return self.state().describe()

    def snapshot(self) -> None:
        """As if it had trained."""
        for group in self.job.optimizer.param_groups:
            group["eps"] = self._epsilon(group)
        self.job.scheduler.num_steps = 24
        self.job.data.consumed_samples = self.job.progress.consumed_samples = CONSUMED
        self.job.iteration = ITERATION
        self.job.checkpointer.step(ITERATION)

    def problems(self, source: str, layout: str) -> tuple[list[str], int]:
        """All that is not as in the snapshot of ``source``, and the number of elements that were compared."""
        from ftckpt.megatron.state import derive_rng

        job, rows = self.job, min(self.rows(source), self.rows(layout))
        problems, compared = wrong(self.describe(), rows)
        problems += self._wrong_parameters(rows)
        groups = job.optimizer.param_groups
        found = {
            "scheduler": job.scheduler.num_steps,
            "data": job.data.consumed_samples,
            "progress": (job.progress.iteration, job.progress.consumed_samples),
            "eps": [group["eps"] for group in groups],
            "generators": _digests(self._restored),
        }
        wanted = {
            "scheduler": 24,
            "data": CONSUMED,
            "progress": (ITERATION, CONSUMED),
            "eps": [self._epsilon(group) for group in groups],
            "generators": _digests(derive_rng(self._seeded, ITERATION)),
        }
        return problems + differing(found, wanted), compared

    def _wrong_parameters(self, rows: int) -> list[str]:
        """Full parameters of the model that differ, among them those that other ranks own and gathered."""
        from megatron.core.utils import unwrap_model

        from ftckpt.megatron.geometry import place_tensors

        problems = []
        places = place_tensors([unwrap_model(chunk) for chunk in self.job.model]).parameters
        for parameter, placed in places.items():
            for fragment, view in fragments(placed, "weight", flat(parameter), 0):
                wanted = torch.from_numpy(expected(fragment)).to(view.dtype)
                same = (view == wanted).numpy()
                if "word_embeddings" in fragment.key or "output_layer" in fragment.key:
                    same = same | (positions(fragment) >= rows * fragment.global_shape[1])
                if not same.all():
                    problems.append(f"parameter {fragment.name}: {int((~same).sum())} of {len(same)} differ")
        return problems

    @staticmethod
    def _epsilon(group: dict[str, Any]) -> float:
        """A hyperparameter that no scheduler sets, other for each kind of parameters."""
        return EPSILON * (1 + float(group["wd_mult"]))

    def train(self) -> float | None:
        """One iteration more, with a snapshot; the loss, of the last stage."""
        return self.train_iteration()[0]

    def close(self, remove: bool) -> None:
        self.job.checkpointer.close(remove=remove)


def _digests(generators: dict[str, Any]) -> dict[str, int]:
    """Digests of generators by name, except torch's own: the stand-in for a device draws from that."""
    states = {**generators, **generators["tracker"]}
    del states["torch"], states["tracker"]
    return {name: xxhash.xxh3_64_intdigest(objects.encode({"": state})) for name, state in states.items()}


class DeepSpeedJob(adapters.DeepSpeedJob):
    """The example job of launch/train_deepspeed.py, restored as soon as it is made."""

    noise = 1e-4
    """Relative; products of fp32 numbers are summed in another order."""

    def __init__(self, layout: str, settings: dict[str, Any], purpose: str, argv: list[str]) -> None:
        shape = DEEPSPEED[layout]
        purposes: dict[str, dict[str, Any]] = {
            "leave": {"gradient_accumulation_steps": 2},
            "arrive": {"gradient_accumulation_steps": 1},
            "train": {"train_batch_size": 8, "gradient_accumulation_steps": "none", "bf16": "none"},
        }
        small = "--layers 4 --hidden 16 --heads 4 --seq 16 --dropout 0"
        config = {**shape.config, **purposes[purpose], "ftckpt": settings}
        super().__init__(Shape(shape.ranks, [*small.split(), *shape.argv, *argv], config))
        self.engine = self.job.engine
        self.start = self.iteration or None
        if purpose == "leave":
            fill(self.describe())

    def describe(self) -> Any:
        return self.state().describe()

    def snapshot(self) -> None:
        """As if it had trained."""
        from ftckpt.deepspeed import optimizers
        from ftckpt.deepspeed.active_engine import integration

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
        integration.checkpointer.step(ITERATION)

    def problems(self, source: str, layout: str) -> tuple[list[str], int]:
        """All that is not as in the snapshot, and the number of elements that were compared."""
        from ftckpt.deepspeed import optimizers

        problems, compared = wrong(self.describe(), 1 << 30)
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
        return problems + differing(found, wanted), compared

    def train(self) -> float | None:
        """One iteration more, with a snapshot."""
        return self.train_iteration()[0]

    def close(self, remove: bool) -> None:
        from ftckpt.deepspeed.active_engine import integration

        if remove:
            self.engine.destroy()
        else:
            integration.checkpointer.close(remove=False)


class PlainJob:
    """A model of a user's own, wrapped as ``layout`` requests."""

    def __init__(self, layout: str, settings: dict[str, Any], purpose: str, argv: list[str]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        from torch.nn.parallel import DistributedDataParallel

        import ftckpt.torch

        torch.manual_seed(3)
        model: Any = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 5), nn.Linear(5, 1))
        self._kind = layout.rstrip("0123456789x")
        sizes = tuple(int(size) for size in re.findall(r"\d+", layout.removeprefix(self._kind)))
        if self._kind == "ddp":
            model = DistributedDataParallel(model)
        elif self._kind in ("fsdp", "hsdp"):
            names = ("replica", "shard")[-len(sizes) :]
            fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
        elif self._kind == "tp":
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=None), "2": RowwiseParallel()})
            fully_shard(model, mesh=mesh["dp"])
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self._scheduler = torch.optim.lr_scheduler.StepLR(self._optimizer, 2)
        if purpose == "leave":  # before anything can take it for a write without a fence
            fill(self.describe())
            for buffer in model.buffers() if self._kind == "ddp" else ():
                buffer.add_(dist.get_rank())  # the first replica's count
        self._checkpointer: Any = ftckpt.torch.attach(model, self._optimizer, self._scheduler, {}, Config(**settings))
        self.start = self._checkpointer.restore()

    def describe(self) -> Any:
        from ftckpt.torch.state import PlainState

        return PlainState(self._model, self._optimizer, None, {}).describe()

    def snapshot(self) -> None:
        """As if it had trained."""
        self._scheduler.last_epoch = ITERATION
        self._optimizer.param_groups[0]["eps"] = EPSILON
        self._checkpointer.fence()
        self._checkpointer.step(ITERATION)

    def problems(self, source: str, layout: str) -> tuple[list[str], int]:
        """All that is not as in the snapshot, and the number of elements that were compared."""
        problems, compared = wrong(self.describe(), 1 << 30)
        found = {"scheduler": self._scheduler.last_epoch, "eps": self._optimizer.param_groups[0]["eps"]}
        return problems + differing(found, {"scheduler": ITERATION, "eps": EPSILON}), compared

    def train(self) -> float:
        """One iteration more, with a snapshot."""
        if self._kind == "tp":  # its batch norm has no parallel form
            return 1.0
        loss = self._model(torch.randn(4, 6)).square().sum()
        loss.backward()
        self._optimizer.step()
        self._scheduler.step()
        self._checkpointer.step(ITERATION + 1)
        return float(loss.detach())

    def close(self, remove: bool) -> None:
        self._checkpointer.close(remove=remove)
