"""Copies and pickles of what ftckpt hooks are as without it, and compilers see none of its hooks."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.pool import run_ranks
from tests.support.resuming import attach, simple

pytestmark = pytest.mark.multiproc

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value))}  # noqa: S301


def results(function: Any, ranks: int, *args: Any) -> list[Any]:
    return [result.value for result in run_ranks(function, ranks, *args, stand_in=False)]


def train(model: Any, optimizer: Any) -> None:
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()


def copied(rank: int, world_size: int, arena: str, how: str) -> dict[str, Any]:
    """Whether training a copy changes what its original does, and what the copies name."""
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    checkpointer, _ = attach(simple(model, optimizer, scheduler=scheduler), arena)
    calls: list[str] = []
    checkpointer.fence = lambda: calls.append("fence")  # type: ignore[method-assign]
    checkpointer.phase = calls.append  # type: ignore[assignment]
    torch.manual_seed(1)
    other_model, other_optimizer, other_scheduler = COPIES[how]((model, optimizer, scheduler))
    train(other_model, other_optimizer)
    other_scheduler.step()
    by_copies = list(calls)
    alone = COPIES[how](optimizer)
    for parameter in alone.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    alone.step()
    by_copies += calls
    train(model, optimizer)
    named = [type(value).__name__ for value in (model, optimizer, scheduler) if b"ftckpt" in pickle.dumps(value)]
    checkpointer.close(remove=True)
    return {"copies": by_copies, "named": named, "original": calls}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_what_is_attached_have_no_part_in_it(how: str, arena_root: Path) -> None:
    (found,) = results(copied, 1, str(arena_root), how)
    assert found == {"copies": [], "named": [], "original": ["forward", "backward", "fence"]}


def compiled(rank: int, world_size: int, arena: str) -> dict[str, Any]:
    """A model that is compiled after it was attached, as one graph; what a compiled step of the optimizer calls."""
    os.environ.pop("TORCHDYNAMO_DISABLE")  # which ranks of tests have
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpointer, _ = attach(simple(model, optimizer), arena)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    whole: Any = torch.compile(model, backend=backend, fullgraph=True)
    for iteration in range(1, 5):
        train(whole, optimizer)
        checkpointer.step(iteration)
    seen: dict[str, Any] = {"graphs": len(graphs), "off": checkpointer.off}
    torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True)(torch.randn(4, 8))
    fences: list[int] = []
    checkpointer.fence = lambda: fences.append(1)  # type: ignore[method-assign]
    step: Any = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        step()
    checkpointer.close(remove=True)
    return {**seen, "fences": len(fences)}


def test_a_compiler_traces_no_hook_and_a_compiled_step_is_fenced(arena_root: Path) -> None:
    assert results(compiled, 1, str(arena_root)) == [{"graphs": 1, "off": False, "fences": 3}]


def engine_copied(rank: int, world_size: int, arena: str, on: bool) -> dict[str, Any]:
    import ftckpt.deepspeed
    from tests.integrations.test_deepspeed_doors import Samples, initialize, section

    engine = initialize(section(arena) if on else None, Samples(), zero_optimization={"stage": 0})
    calls: list[str] = []
    if on:
        checkpointer: Any = ftckpt.deepspeed.initialize.integration.checkpointer
        checkpointer.fence = lambda: calls.append("fence")
    loader = engine.training_dataloader
    drawn = [next(iter(copy_(loader)))[:, 0].tolist() for copy_ in COPIES.values()]
    module, inner = copy.deepcopy(engine.module), COPIES["pickle"](engine.basic_optimizer)
    module(torch.randn(2, 4)).sum().backward()
    for parameter in inner.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    inner.step()
    kind = {type(copy_(loader)) is type(loader).__mro__[on] for copy_ in COPIES.values()}
    first = next(iter(loader))[:, 0].tolist()
    ftckpt.deepspeed.remove()
    return {"drawn": [one == first for one in drawn], "kind": kind, "calls": calls, "steps": engine.global_steps}


@pytest.mark.parametrize("on", [False, True])
def test_copies_of_what_an_engine_has_are_as_without_ftckpt(on: bool, arena_root: Path) -> None:
    pytest.importorskip("deepspeed")
    (found,) = results(engine_copied, 1, str(arena_root), on)
    assert found == {"drawn": [True, True], "kind": {True}, "calls": [], "steps": 0}
