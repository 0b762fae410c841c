"""Torch hooks on the model and its optimizer that fence snapshots and report training phases.

The fence runs before the first write to optimizer-updated state: torch calls an optimizer's pre-hooks inside
``step``. If ``step`` is given a closure, which runs forward and backward first, the fence follows the closure.
``PlainState`` checks it: parameters written in an iteration without a hook call are an error at the step boundary.

Hooks on the outermost module mark forward and backward. The time after a forward counts as backward until the next
forward or the fence. Waits for other ranks inside these phases are not visible, so copies run between iterations
and concurrently with forwards and backwards, as measured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from ftckpt.config import Config
from ftckpt.errors import CaptureError
from ftckpt.frameworks import entry
from ftckpt.frameworks.entry import Patches
from ftckpt.frameworks.hooks import Hook, ModuleHook
from ftckpt.frameworks.torch_state import Stateful
from ftckpt.session.checkpointer import Checkpointer
from ftckpt.torch.geometry import place_rank, unwrap
from ftckpt.torch.state import PlainState


def attach(  # noqa: PLR0917 - those of ``ftckpt.torch.attach``
    patches: Patches,
    config: Config,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Stateful | None,
    objects: Mapping[str, Stateful],
) -> Checkpointer:
    """Creates and hooks the checkpointer of ``ftckpt.torch.attach``. Collective."""
    start = entry.start(config, lambda: place_rank(unwrap(model)))
    state = start.build(lambda: PlainState(model, optimizer, scheduler, objects))
    checkpointer = start.checkpointer(state)
    follow(patches, checkpointer, model, optimizer, state)
    return checkpointer


def follow(
    patches: Patches,
    checkpointer: Checkpointer,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: PlainState,
) -> None:
    """Reports phases of ``model`` to the checkpointer and fences it before each step of ``optimizer``.

    A forward in evaluation mode or without gradients does not count as training.
    """

    def before_forward(module: torch.nn.Module, *_: Any) -> None:
        if module.training and torch.is_grad_enabled():
            state.has_run = True
            state.late_changes.begin()
            checkpointer.phase("forward")
        else:
            checkpointer.pause()

    def after_forward(module: torch.nn.Module, *_: Any) -> None:
        if module.training and torch.is_grad_enabled():
            checkpointer.phase("backward")

    def after_step(*_: Any) -> None:
        # The next boundary reports an error: training continues.
        with suppress(CaptureError):
            state.optimizer_state.settle()

    handles: list[Any] = [
        optimizer.register_step_post_hook(Hook(optimizer, after_step)),
        optimizer.register_step_pre_hook(Hook(optimizer, _fence_of_step(checkpointer, state))),
        model.register_forward_pre_hook(ModuleHook(model, before_forward)),
        model.register_forward_hook(ModuleHook(model, after_forward)),
    ]
    patches.undo.extend(handle.remove for handle in handles)


def _fence_of_step(checkpointer: Checkpointer, state: PlainState) -> Callable[..., tuple[Any, Any] | None]:
    """The hook before a step: the fence, or a closure that ends with it."""

    def fence() -> None:
        checkpointer.fence()  # first: a failed fence must not count as a fence
        state.is_fenced = True

    def before_step(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any] | None:
        if callable(closure := named.get("closure")):
            return args, {**named, "closure": _followed_by(closure, fence)}
        if at := _place_of_closure(args):
            return (*args[:at], _followed_by(args[at], fence), *args[at + 1 :]), named
        fence()
        return None

    return before_step


def _place_of_closure(args: tuple[Any, ...]) -> int:
    """The index of the closure among the arguments of a step, which begin with the optimizer; 0 without one."""
    names = list(inspect.signature(type(args[0]).step).parameters)
    # A class that calls its parent's step may give it fewer arguments.
    places = [names.index("closure")] if "closure" in names else []
    return next((at for at in (*places, *range(1, len(args))) if at < len(args) and callable(args[at])), 0)


def _followed_by(closure: Callable[[], Any], fence: Callable[[], None]) -> Callable[[], Any]:
    def fenced() -> Any:
        result = closure()
        fence()
        return result

    return fenced
