"""Megatron-LM's own saving, taken over: what it would write each ``--save-interval`` iterations SMPs write.

Its train loop comes to a save and finds nothing to do, as long as the snapshot of that very iteration is under way on
all ranks and what was left out before has come. Otherwise, for any other reason to save, and where training ends at a
save that was left out, Megatron saves by itself.
"""

from __future__ import annotations

import importlib
import inspect
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ftckpt.config import Config
from ftckpt.errors import ConfigError, UnsupportedError
from ftckpt.job.checkpointer import Checkpointer
from ftckpt.job.takeover import Takeover
from ftckpt.megatron import door
from ftckpt.persist_setting import MEGATRON

TRACKER = "latest_checkpointed_iteration.txt"
_WRITE, _SAVE, _DECIDE, _TRAIN = "save_checkpoint", "save_checkpoint_and_time", "checkpoint_and_decide_exit", "train"
"""Functions of ``megatron.training.training``."""


def taken_over(config: Config, args: Namespace) -> Config:
    """``config`` with the place and the interval that Megatron's arguments say.

    Raises:
        ConfigError: they say none, or ask for what is written otherwise than Megatron would.
        UnsupportedError: this Megatron-LM has another train loop.
    """
    directory, every = getattr(args, "save", None), getattr(args, "save_interval", None)
    if not directory or not every:
        raise ConfigError("--ftckpt-persist: megatron takes --save over: add --save DIR --save-interval K")
    form = getattr(args, "ckpt_format", "torch_dist")
    for wrong, text in (
        ("://" in directory, f"--save {directory} is no directory"),
        (form != "torch_dist", f"torch_dist is written, and --ckpt-format is {form}"),
        (getattr(args, "save_retain_interval", None), "--save-retain-interval is not followed: leave it away"),
        (
            getattr(args, "no_save_optim", None),
            "--no-save-optim is not followed, the optimizer is written: leave it away",
        ),
        (
            getattr(args, "dataloader_save", None),
            "--dataloader-save is what Megatron's own saving writes: leave it away",
        ),
        (
            config.persist_interval != Config.persist_interval,
            "--save-interval says how often: no --ftckpt-persist-interval",
        ),
        (
            config.interval == "auto",
            "--ftckpt-interval: auto takes snapshots of other iterations than --save-interval",
        ),
        (
            every % config.least_interval,
            f"--ftckpt-interval: {config.interval} does not divide --save-interval {every}",
        ),
    ):
        if wrong:
            raise ConfigError(f"--ftckpt-persist: megatron: {text}")
    training = importlib.import_module("megatron.training.training")
    missing = [name for name in (_WRITE, _SAVE, _DECIDE, _TRAIN) if not callable(getattr(training, name, None))]
    if missing:
        raise UnsupportedError(
            f"--ftckpt-persist: megatron: this Megatron-LM has no {training.__name__}.{missing[0]}"
        )
    directory = os.path.abspath(directory)
    os.makedirs(directory, exist_ok=True)  # as Megatron does with its first checkpoint
    return replace(config, persist=f"{MEGATRON}:{directory}", persist_interval=every)


def take_over(checkpointer: Checkpointer, args: Namespace) -> None:
    """Put ftckpt before Megatron's saving, until it is left."""
    training, saves = importlib.import_module("megatron.training.training"), Saves(checkpointer, args)
    around = {_WRITE: saves.write, _SAVE: saves.save, _DECIDE: saves.decide, _TRAIN: saves.train}
    for name, function in around.items():
        door.hooks.wrap(training, name, function)


class Saves:
    """What this rank knows of Megatron's saves; the same on all ranks."""

    def __init__(self, checkpointer: Checkpointer, args: Namespace) -> None:
        self._checkpointer = checkpointer
        self._every = args.save_interval
        self._tracker = Path(args.save, TRACKER)
        self._is_boundary = False  # saves elsewhere in the loop are for other reasons
        self._left: Callable[[], Any] | None = None  # the last save that was left out
        self._takeover = Takeover("cuda", self._has_come)

    def write(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around what Megatron writes by itself, for whatever reason."""
        result = original(*args, **kwargs)
        iteration, lasts = _read(original, args, kwargs)
        if lasts:
            self._left = None
            self._takeover.saved(self._checkpointer, iteration)
        return result

    def save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Before each save of the train loop, at the same iteration on all ranks."""
        iteration, lasts = _read(original, args, kwargs)
        is_due = self._is_boundary and lasts and iteration % self._every == 0
        if is_due and self._takeover.leaves(self._checkpointer, iteration):
            self._left = partial(original, *args, **kwargs)
            return None
        return original(*args, **kwargs)

    def decide(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around the end of an iteration, at which training may end as well."""
        self._is_boundary, self._left = True, None
        try:
            ends = original(*args, **kwargs)
        finally:
            self._is_boundary = False
        if ends:
            self._make_up()
        return ends

    def train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around all of training."""
        result = original(*args, **kwargs)
        self._make_up()
        return result

    def _make_up(self) -> None:
        """Nothing is trained beside it any more: what is left to be written Megatron writes faster."""
        left, self._left = self._left, None
        if left is not None:
            left()

    def _has_come(self, iteration: int) -> bool:
        """Whether the save that was left at ``iteration`` is what a job would load, or a newer one; or may yet be."""
        if self._checkpointer.persisting is not None:
            return True
        try:
            return iteration <= int(self._tracker.read_text())
        except (OSError, ValueError):
            return False


def _read(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, bool]:
    """Of a call to save: the iteration, and whether it is to last."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    return int(given["iteration"]), not given.get("non_persistent_ckpt")
