"""Where ftckpt touches a plain torch job: hooks of torch's own, on the model and on its optimizer.

The fence stands before the first write to stepped state: torch calls an optimizer's pre-hooks inside ``step``. The
guard behind it is in the state: parameters that have changed in an iteration in which no hook was called are an
error at the boundary, from the first iteration on, before a snapshot could tear.

Forward and backward are seen by hooks on the outermost module. What comes after a forward is the loss and the
backward, until the next forward or the fence. Gaps inside them, in which a rank waits for gradients or parameters of
others, are not seen; so copies run between iterations and beside forwards and backwards, as measured.
"""

from __future__ import annotations

from typing import Any

import torch

from ftckpt.frameworks.entry import Patches
from ftckpt.frameworks.hooks import Hook, ModuleHook
from ftckpt.session.checkpointer import Checkpointer
from ftckpt.torch.state import PlainState


def follow(
    patches: Patches,
    checkpointer: Checkpointer,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: PlainState,
) -> None:
    """Follow training with ``model`` for this checkpointer, and fence it before each step of ``optimizer``.

    A module in evaluation mode, or one that runs without gradients, is not training.
    """

    def before_step(*_: Any) -> None:
        checkpointer.fence()  # first: an error in it must not look like a fence that was there
        state.is_fenced = True

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

    handles: list[Any] = [
        optimizer.register_step_pre_hook(Hook(optimizer, before_step)),
        model.register_forward_pre_hook(ModuleHook(model, before_forward)),
        model.register_forward_hook(ModuleHook(model, after_forward)),
    ]
    patches.undo.extend(handle.remove for handle in handles)
