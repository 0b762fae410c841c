"""Scalars for Megatron-LM's charts, written with the writers that it has opened."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ftckpt.frameworks import charts
from ftckpt.session.checkpointer import Checkpointer

_VARIABLES = "megatron.training.global_vars"


class Charts:
    """Writes scalars to TensorBoard and W&B on the rank that has the writers, as often as Megatron writes its own."""

    def __init__(self, args: Any) -> None:
        self._interval = int(getattr(args, "tensorboard_log_interval", 1) or 1)
        self._goes_on = True

    def draw(self, checkpointer: Checkpointer, iteration: int) -> None:
        """Called at the boundary of ``iteration``."""
        if not self._goes_on or iteration % self._interval:
            return
        variables = sys.modules.get(_VARIABLES)
        board, wandb = (
            getattr(variables, name, lambda: None)() for name in ("get_tensorboard_writer", "get_wandb_writer")
        )
        if board is None and wandb is None:
            return

        def write(scalars: Mapping[str, float]) -> None:
            if board is not None:
                for name, value in scalars.items():
                    board.add_scalar(name, value, iteration)
            if wandb is not None:
                wandb.log(dict(scalars), iteration)

        self._goes_on = charts.draw(checkpointer, write)
