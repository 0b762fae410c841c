"""Jobs of plain torch in one process: trained without ftckpt, then with it, left at half, built again and resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

import ftckpt.torch
from ftckpt.config import Config

HALF, LAST = 4, 8


class Parts(NamedTuple):
    """The parts of a job; ``train`` trains one iteration and returns its loss."""

    model: Any
    optimizer: Any
    train: Callable[[int], Any]
    scheduler: Any = None
    objects: Mapping[str, Any] | None = None


Build = Callable[[int], Parts]
"""Builds a job for an attempt: 0 without ftckpt, 1 and 2 with it."""


def rows(parts: Parts, first: int, last: int, boundary: Callable[[int], object]) -> list[Any]:
    """Loss, weights and buffers of each iteration, as bytes."""
    found = []
    for iteration in range(first, last + 1):
        loss = parts.train(iteration)
        tensors = [loss, *parts.model.parameters(), *parts.model.buffers()]
        found.append([_bytes(tensor) for tensor in tensors])
        boundary(iteration)
    return found


def attach(parts: Parts, arena: str) -> tuple[Any, int]:
    """A checkpointer that has restored, and the iteration to resume from."""
    config = Config(enabled=True, job="resuming", node="node", arena=arena, protect="none", interval=1)
    checkpointer = ftckpt.torch.attach(parts.model, parts.optimizer, parts.scheduler, parts.objects, config)
    assert checkpointer is not None
    return checkpointer, checkpointer.restore() or 0


def resumed(build: Build, arena: str) -> tuple[int, bool]:
    """The iteration that the second attempt resumes from, and whether both together have an unbroken run's bits."""
    unbroken = rows(build(0), 1, LAST, lambda iteration: None)
    found: list[Any] = []
    for attempt, last in ((1, HALF), (2, LAST)):
        parts = build(attempt)
        drawn = torch.get_rng_state()
        checkpointer, start = attach(parts, arena)
        if not start:
            torch.set_rng_state(drawn)
        found = found[:start] + rows(parts, start + 1, last, checkpointer.step)
        checkpointer.close(remove=attempt == 2)
    return start, found == unbroken


def simple(model: Any, optimizer: Any = None, width: int = 8, **parts: Any) -> Parts:
    """Parts of a job that trains ``model`` on noise."""
    stepping = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(3)
    np.random.seed(3)  # some optimizers draw from it

    def train(iteration: int) -> torch.Tensor:
        x = torch.randn(4, width)
        loss = (model(x) - x.sin()).pow(2).mean()
        stepping.zero_grad()
        loss.backward()
        stepping.step()
        return loss.detach()

    return Parts(model, stepping, train, **parts)


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return bytes(plain.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
