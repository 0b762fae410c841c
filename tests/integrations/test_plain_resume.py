"""Jobs of plain torch whose state is of an odd kind have the bits of an unbroken run, or are refused by name."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ftckpt.errors import ArenaError, CaptureError, MismatchError, UnsupportedError
from tests.support.errors import message_of
from tests.support.pool import run_ranks
from tests.support.resuming import HALF, Parts, attach, resumed, simple

pytestmark = pytest.mark.multiproc


class Rotated(nn.Module):
    """A complex buffer, as of rotary embeddings, and a complex weight, as of Fourier layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.register_buffer("table", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)
        self.spectrum = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.first(x).view(-1, 4, 2)) * self.table
        return torch.fft.irfft(torch.fft.rfft(torch.view_as_real(pairs).flatten(1)) * self.spectrum, n=8)


class Noisy(nn.Module):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.drops = torch.Generator().manual_seed(1)
        self.jitter = np.random.default_rng(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(x.shape, generator=self.drops) > 0.1
        return self.layer(x) * kept * (1 + self.jitter.random())


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, as accelerate makes them: it has no state and no hooks of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)])


def complex_tensors(attempt: int) -> Parts:
    torch.manual_seed(attempt + 1 if attempt == 2 else 1)
    return simple(Rotated())


def compiled_at(which: int) -> Callable[[int], Parts]:
    def build(attempt: int) -> Parts:
        model = layers()
        if attempt == which:
            for index, block in enumerate(model):
                model[index] = torch.compile(block, backend="eager")  # type: ignore[assignment]
        return simple(model)

    return build


def thawed(attempt: int) -> Parts:
    """The first layer learns from the third iteration on, and the norm of the second evaluates."""
    model = layers()
    model[0].requires_grad_(False)
    parts = simple(model)

    def train(iteration: int) -> Any:
        loss = parts.train(iteration)
        if iteration == 2:
            model[0].requires_grad_(True)
            model[1][1].eval()  # type: ignore[index]
            model[1][0].bias.requires_grad_(False)  # type: ignore[index]
        return loss

    return parts._replace(train=train)


def own_generators(attempt: int) -> Parts:
    torch.manual_seed(1)
    return simple(Noisy())


def given_generators(attempt: int) -> Parts:
    rng, state = np.random.default_rng(1), np.random.RandomState(1)
    given: dict[str, Any] = {"a": torch.Generator(), "b": rng, "c": state, "d": random.Random(1)}
    parts = simple(layers(), objects=given)

    def train(iteration: int) -> Any:
        noise = torch.rand(1, generator=given["a"]) + rng.random() + state.rand() + given["d"].random()
        return parts.train(iteration) + noise

    return parts._replace(train=train)


def wrapped_optimizer(attempt: int) -> Parts:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return simple(model, Wrapper(optimizer), scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))


def made_contiguous(attempt: int) -> Parts:
    model = layers()
    weight = nn.Parameter(torch.randn(8, 8).t())
    weight.data = weight.data.contiguous()
    model[0][0].weight = weight  # type: ignore[index]
    return simple(model)


def compressed(attempt: int) -> Parts:
    """DDP whose gradients PowerSGD compresses, with the state that the refusal of it asks for."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    class Kept(powerSGD_hook.PowerSGDState):
        def state_dict(self) -> dict[str, Any]:
            tables = {name: dict(getattr(self, name)) for name in ("error_dict", "p_memory_dict", "q_memory_dict")}
            return {**tables, "iter": self.iter, "rng": self.rng.get_state()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.rng.set_state(state["rng"])
            for name in ("error_dict", "p_memory_dict", "q_memory_dict", "iter"):
                setattr(self, name, state[name])

    torch.manual_seed(1)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), bucket_cap_mb=0.01
    )
    state = Kept(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return simple(model, width=32)


CASES: dict[str, tuple[Any, int]] = {
    "complex": (complex_tensors, 1),
    "compiled, then not": (compiled_at(1), 1),
    "compiled later": (compiled_at(2), 1),
    "thawed": (thawed, 1),
    "own generators": (own_generators, 1),
    "given generators": (given_generators, 1),
    "wrapped optimizer": (wrapped_optimizer, 1),
    "made contiguous": (made_contiguous, 1),
    "comm hook": (compressed, 2),
}


def resume(rank: int, world_size: int, name: str, arena: str) -> tuple[int, bool]:
    os.environ.pop("TORCHDYNAMO_DISABLE")  # which ranks of tests have
    return resumed(CASES[name][0], arena)


@pytest.mark.parametrize("name", CASES)
def test_a_restart_has_the_bits_of_an_unbroken_run(name: str, arena_root: Path) -> None:
    found = [result.value for result in run_ranks(resume, CASES[name][1], name, str(arena_root), stand_in=False)]
    assert found == [(HALF, True)] * CASES[name][1]


def hooked(rank: int, world_size: int, arena: str) -> list[str]:
    """DDP's communication hooks: with state that cannot be saved, without state, and registered too late."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def ddp() -> Any:
        return DistributedDataParallel(nn.Linear(8, 8))

    model = ddp()
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    stateful = simple(model)
    found = [message_of(lambda: attach(stateful, arena), UnsupportedError)]
    model = ddp()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    parts = simple(model)
    checkpointer, _ = attach(parts, arena)
    parts.train(1)
    checkpointer.training_state.save_objects()
    late = parts.model
    late._comm_hooks.append((None, powerSGD_hook.PowerSGDState(None)))  # torch takes one before the first backward
    found.append(message_of(checkpointer.training_state.save_objects, CaptureError))
    checkpointer.close(remove=True)
    return found


def test_hooks_with_state_are_refused_by_name(arena_root: Path) -> None:
    (found,) = [result.value for result in run_ranks(hooked, 1, str(arena_root), stand_in=False)]
    assert "powerSGD_hook" in found[0] and "PowerSGDState" in found[0] and found[1]


def accumulated(rank: int, world_size: int, arena: str) -> list[int]:
    """Boundaries at which no snapshot was taken, of a script that steps its optimizer every second iteration; one
    iteration has a gradient that a GradScaler skips."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer, _ = attach(simple(model, optimizer), arena)
    failed: list[int] = []
    checkpointer.step(0)
    for iteration in range(1, 7):
        model(torch.full((1, 8), float("inf") if iteration == 5 else 1.0)).sum().backward()
        if iteration % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        try:
            checkpointer.training_state.save_objects()
        except CaptureError as error:
            assert "gradient of weight" in str(error)
            failed.append(iteration)
    checkpointer.close(remove=True)
    return failed


def test_gradients_that_wait_for_the_optimizer_are_seen(arena_root: Path) -> None:
    assert [result.value for result in run_ranks(accumulated, 1, str(arena_root), stand_in=False)] == [[1, 3]]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
}


def left(rank: int, world_size: int, arena: str, kind: str) -> str:
    """Three iterations with an optimizer, or the error that stops it."""
    model = DistributedDataParallel(layers())
    parts = simple(model, OPTIMIZERS[kind](model.parameters()))
    try:
        checkpointer, start = attach(parts, arena)
    except MismatchError as error:
        return str(error)
    for iteration in range(start + 1, start + 4):
        parts.train(iteration)
        checkpointer.step(iteration)
    checkpointer.close(remove=False)
    return f"from {start}"


@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize(("kind", "said"), [("AdamW", "from 3"), ("Adam", "AdamW"), ("SGD", "AdamW")])
def test_a_snapshot_of_another_optimizer_is_refused_in_its_layout_and_in_another(
    ranks: int, kind: str, said: str, arena_root: Path
) -> None:
    run_ranks(left, 2, str(arena_root), "AdamW", stand_in=False)
    for result in run_ranks(left, ranks, str(arena_root), kind, stand_in=False):
        assert said in result.value, result.value


def attached_twice(rank: int, world_size: int, arena: str) -> list[str]:
    """A second attach in one process: before the first is closed, after that, and with a second optimizer."""
    first, _ = attach(simple(layers()), arena)
    found = [message_of(lambda: attach(simple(layers()), arena), ArenaError)]
    first.close()
    attach(simple(layers()), arena)[0].close()
    model = layers()
    of_one_layer = torch.optim.AdamW(model[0].parameters())
    found.append(message_of(lambda: attach(simple(model, of_one_layer), arena), UnsupportedError))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), "lr": 0.5}]
    attach(simple(model, torch.optim.AdamW(groups)), arena)[0].close()
    return found


def test_a_second_attach_is_told_to_close_the_first_and_a_second_optimizer_to_be_a_group(arena_root: Path) -> None:
    (found,) = [result.value for result in run_ranks(attached_twice, 1, str(arena_root), stand_in=False)]
    assert "close() the first" in found[0] and "1.0.weight" in found[1] and "group" in found[1]
