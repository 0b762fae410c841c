"""The description of a torch model by ftckpt.torch is right, and what it cannot map or guard is refused by name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ftckpt
import ftckpt.torch
from ftckpt.config import Config
from ftckpt.errors import CaptureError, ConfigError
from ftckpt.frameworks import entry
from ftckpt.frameworks.entry import Patches
from ftckpt.memory.launch_record import launcher_run
from ftckpt.session.checkpointer import Checkpointer
from ftckpt.torch.geometry import local, place_rank
from ftckpt.torch.hooks import follow
from ftckpt.torch.state import PlainState
from tests.support.elements import positions
from tests.support.errors import message_of
from tests.support.plain import Recorder
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc


class Odd(nn.Module):
    """Sizes that four ranks, or three, do not divide: one row, two, five."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale + self.frozen.sum()


class Even(nn.Module):
    """Sizes that sharding of other dimensions needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.second = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def mesh_of(*sizes: int, names: tuple[str, ...] = ("dp",)) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def sharded_by_rows(world_size: int) -> nn.Module:
    return fully_shard(Odd(), mesh=mesh_of(world_size))


def sharded_by_columns(world_size: int) -> nn.Module:
    return fully_shard(Even(), mesh=mesh_of(world_size), shard_placement_fn=lambda p: Shard(p.dim() - 1))


def sharded_in_groups(world_size: int) -> nn.Module:
    return fully_shard(Odd(), mesh=mesh_of(2, world_size // 2, names=("replica", "shard")))


def tensor_parallel(world_size: int) -> nn.Module:
    mesh = mesh_of(world_size // 2, 2, names=("dp", "tp"))
    model = parallelize_module(Even(), mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


MODELS: dict[str, tuple[int, Callable[[int], nn.Module]]] = {
    "rows": (4, sharded_by_rows),
    "columns": (2, sharded_by_columns),
    "groups": (4, sharded_in_groups),
    "tensor-parallel": (4, tensor_parallel),
}
LAST: dict[str, dict[str, int]] = {
    "rows": {"dp": 3},
    "columns": {"dp": 1},
    "groups": {"replica": 1, "shard": 1},
    "tensor-parallel": {"dp": 1, "tp": 1},
}
"""Coordinates of the last rank."""


def held(rank: int, world_size: int, name: str) -> tuple[list[Any], dict[str, Any], dict[str, int], dict[str, Any]]:
    """Pieces with their elements after two steps, full tensors, coordinates and layout."""
    torch.manual_seed(3)
    model = MODELS[name][1](world_size)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    state = PlainState(model, optimizer, None, {})
    pieces = state.describe().stepped
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, model.first.in_features)).square().sum().backward()
        optimizer.step()
    found = [(piece.fragment, piece.tensor.numpy().copy()) for piece in pieces]
    whole: dict[str, torch.Tensor] = {}
    for key, parameter in model.named_parameters():
        whole[f"weight/{key}"] = parameter.detach()
        for kind, value in optimizer.state[parameter].items() if parameter.requires_grad else ():
            if value.dim() == parameter.dim():
                whole[f"{kind}/{key}"] = value
    full = {k: (v.full_tensor() if isinstance(v, DTensor) else v).numpy().copy() for k, v in whole.items()}
    topology = entry.start(Config(job="job", node="node"), lambda: place_rank(model)).topology
    return found, full, dict(topology.me.coords), dict(topology.layout)


@pytest.mark.parametrize("name", MODELS)
def test_every_element_is_where_the_fragment_says(name: str) -> None:
    """Against the tensors that torch itself gathers; of every element, on every rank."""
    world_size = MODELS[name][0]
    results = [result.value for result in run_ranks(held, world_size, name, stand_in=False)]
    seen = {key: np.zeros(value.size, bool) for key, value in results[0][1].items()}
    steps = set()
    for found, full, _, _ in results:
        for fragment, elements in found:
            if fragment.key.startswith("step/"):
                steps.add(float(elements[0]))
                continue
            value = full[fragment.key]
            assert fragment.global_shape == value.shape
            at = positions(fragment)
            np.testing.assert_array_equal(value.reshape(-1)[at], elements)
            seen[fragment.key][at] = True
    missing = [key for key, mask in seen.items() if not mask.all()]
    assert not missing
    assert steps == {2.0}
    _, _, coords, layout = results[-1]
    assert coords == LAST[name]
    assert layout == {**{axis: last + 1 for axis, last in coords.items()}, "sharded": True}


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """The refusal of each state that cannot be mapped."""
    said: dict[str, str] = {}
    model, config = Odd(), ftckpt.Config(enabled=True, job="refused", node="n")
    optimizer = torch.optim.Adam(model.first.parameters())
    for name, given in {
        "swapped": (optimizer, model), "no optimizer": (model, None), "listed": (model, optimizer, None, [model]),
    }.items():  # fmt: skip
        said[name] = message_of(lambda given=given: ftckpt.torch.attach(*given, config=config))

    def refused(name: str, model: nn.Module, optimizer: Any = None, **more: Any) -> None:
        optimizer = optimizer or torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
        said[name] = message_of(
            lambda: PlainState(model, optimizer, more.get("scheduler"), more.get("objects", {})).describe()
        )

    refused("nothing", Odd())
    refused("fsdp1", FullyShardedDataParallel(Odd(), device_id=torch.device("cpu"), use_orig_params=True))
    refused("static graph", DistributedDataParallel(Odd(), static_graph=True))
    hooked = Odd()
    next(hooked.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    refused("hook", DistributedDataParallel(hooked))
    refused("stranger", Odd(), torch.optim.Adam([nn.Parameter(torch.ones(7, 3))]))
    refused("unstepped", (model := Odd()), torch.optim.Adam(model.first.parameters()))
    refused("layout", nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    refused("object", Odd(), objects={"data": [1, 2]})
    refused("scheduler", Odd(), scheduler=lambda step: 1.0)
    summand = nn.Module()
    summand.weight = nn.Parameter(DTensor.from_local(torch.ones(4), mesh_of(world_size), [Partial()]))
    refused("summand", summand, torch.optim.SGD(summand.parameters(), lr=0.1))
    return said


REFUSED = {
    "swapped": "attach: model is of type Adam",
    "no optimizer": "attach: optimizer is of type NoneType",
    "listed": "attach: objects is of type list",
    "fsdp1": "fully_shard",
    "stranger": "steps a (7, 3) that is not in the model",
    "unstepped": "scale requires gradients and no saved optimizer steps it",
    "layout": "weight is not contiguous",
    "object": "data is a list without state_dict",
    "scheduler": "scheduler is a function",
    "summand": "weight is P",
}


def test_what_cannot_be_mapped_is_refused_by_name() -> None:
    """DDP has a first iteration of its own for a static graph of three ranks, and under hooks after the backward."""
    said = run_ranks(refusals, 1, stand_in=False)[0].value
    assert said["nothing"] == "" and [name for name, text in REFUSED.items() if text not in said[name]] == [], said
    three = run_ranks(refusals, 3, stand_in=False)[0].value
    assert "static_graph" in three["static graph"]
    assert "step after the backward pass" in three["hook"]
    assert run_ranks(refusals, 2, stand_in=False)[0].value["static graph"] == ""


def followed(rank: int, world_size: int) -> dict[str, Any]:
    """The reports about training, and about steps that bypass the optimizer."""
    model = DistributedDataParallel(Odd())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    state = PlainState(model, optimizer, None, {})
    state.describe()
    recorder = Recorder()
    follow(Patches(), recorder, model, optimizer, state)  # type: ignore[arg-type]

    def save() -> str:
        return message_of(state.save_objects, CaptureError)

    seen: dict[str, Any] = {}
    model(torch.randn(2, 6)).sum().backward()
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    seen["training"] = list(recorder.log)
    seen["after a step"] = save()
    seen["no step"] = save()
    written_by = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 6)).sum().backward()
    written_by.step()
    seen["another optimizer"] = save()
    seen["once more"] = save()
    optimizer.state[model.module.scale]["momentum_buffer"] = torch.zeros(1)
    seen["replaced"] = save()
    return seen


def test_writes_without_a_fence_and_replaced_tensors_are_errors_at_the_boundary() -> None:
    seen = run_ranks(followed, 1, stand_in=False)[0].value
    assert seen["training"] == ["forward", "backward", "forward", "backward", "fence"]
    assert seen["after a step"] == seen["no step"] == ""
    assert "step hooks were not called" in seen["another optimizer"]
    assert seen["once more"] == ""
    assert "optimizer state momentum_buffer of scale was replaced" in seen["replaced"]


def gathered_before(rank: int, world_size: int) -> tuple[float, float]:
    """Outputs of a sharded model that has run before its weights are restored, and of one that has not."""
    outputs = []
    for runs_before in (True, False):
        torch.manual_seed(3)
        model = sharded_by_rows(world_size)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        state = PlainState(model, optimizer, None, {})
        pieces = state.describe().stepped
        with torch.no_grad():
            if runs_before:
                model(torch.ones(1, 6))
            for piece in pieces:
                piece.tensor.fill_(0.5)
            state.finish_load()
            outputs.append(float(model(torch.ones(1, 6)).sum()))
    return outputs[0], outputs[1]


def test_weights_that_were_gathered_before_a_restore_are_gathered_anew() -> None:
    ran, fresh = run_ranks(gathered_before, 2, stand_in=False)[0].value
    assert ran == fresh


def moved_by_a_forward(rank: int, world_size: int) -> list[str]:
    """Tensors that have moved after the first forward of a model whose weights were replaced."""
    model = sharded_by_rows(world_size)
    for module in (model.first, model.second):
        module.weight = nn.Parameter(module.weight.detach().clone())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    pieces = PlainState(model, optimizer, None, {}).describe().stepped
    model(torch.ones(1, 6)).sum().backward()
    now = {local(parameter).data_ptr() for parameter in model.parameters()}
    return [piece.fragment.key for piece in pieces if piece.tensor.data_ptr() not in now]


def test_the_first_forward_moves_no_shard() -> None:
    for result in run_ranks(moved_by_a_forward, 3, stand_in=False):
        assert result.value == []


def without_process_group(rank: int, world_size: int) -> str:
    model = Odd()
    optimizer = torch.optim.Adam(model.parameters())
    for off in (ftckpt.torch.attach(model, optimizer), ftckpt.torch.attach(model, optimizer, config=Config())):
        assert not off and off.off and off.restore(newer_than=3) is None and off.numbers() == {}
        off.step(1)
        off.close(remove=True)
        public = {name for name in vars(Checkpointer) if not name.startswith("_")}
        assert public - {"arena", "capture", "node_dir"} <= set(dir(off))
    return message_of(lambda: ftckpt.torch.attach(model, optimizer, config=Config(enabled=True)), ConfigError)


def test_a_process_group_is_needed() -> None:
    said = run_ranks(without_process_group, 1, stand_in=False, init_process_group=False)[0].value
    assert "call ftckpt.torch.init_process_group first" in said


def attach_again(rank: int, world_size: int, done: str, job: str) -> Any:
    """A script that has created its process group itself, on two nodes, the second of them new."""
    tempfile.tempdir = None
    os.environ["FTCKPT_NODE"] = f"n{rank}"
    if done and rank == 0:
        launcher_run(os.environ).end(0, "finished", job=done)
        launcher_run.__globals__["_runs"].clear()  # of the attempt before
    dist.barrier()
    model = nn.Linear(4, 4)
    try:
        config = Config(enabled=True, job=f"{job}{rank}" if job == "job" else job)
        ftckpt.torch.attach(model, torch.optim.AdamW(model.parameters()), config=config)
    except SystemExit as ended:
        return ended.code
    except ConfigError as error:
        return str(error)
    return "trains"


@pytest.mark.parametrize(
    ("done", "job", "found"),
    [
        ("a", "a", 0),
        ("b", "a", "trains"),
        ("", "a", "trains"),
        ("", "job", "the job is called 'job0' on rank 0 and 'job1' on rank 1"),
    ],
)
def test_no_door_trains_what_is_done(done: str, job: str, found: Any, tmp_path: Path) -> None:
    env = {"FTCKPT_RUN": "x", "TMPDIR": str(tmp_path)}
    results = [result.value for result in run_ranks(attach_again, 2, done, job, env=env)]
    assert all(str(result).startswith(str(found)) for result in results), results


def make_a_group(rank: int, world_size: int, job: str) -> Any:
    """A script without a runner after one whose job has finished, under one launcher run."""
    tempfile.tempdir = None
    launcher_run(os.environ).end(0, "finished", job="one")
    launcher_run.__globals__["_runs"].clear()  # of the attempt before
    try:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        ftckpt.torch.init_process_group(Config(enabled=True, job=job), "gloo", **alone)
    except SystemExit as ended:
        return ended.code
    return "trains"


@pytest.mark.parametrize(("job", "found"), [("one", 0), ("two", "trains")])
def test_a_group_is_made_for_a_job_that_is_not_the_one_that_ended(job: str, found: Any, tmp_path: Path) -> None:
    env = {"FTCKPT_RUN": "x", "TMPDIR": str(tmp_path)}
    assert [result.value for result in run_ranks(make_a_group, 1, job, env=env, init_process_group=False)] == [found]
