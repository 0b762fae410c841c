"""Snapshots of lightning's ``Trainer`` after each of its steps, and its restart from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
from lightning.pytorch import callbacks, strategies
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.model_helpers import is_overridden

import ftckpt.torch
from ftckpt.config import Config
from ftckpt.errors import ConfigError, UnsupportedError
from ftckpt.frameworks.entry import Patches
from ftckpt.lightning.progress import FitProgress
from ftckpt.lightning.running import check_monitors

_STRATEGIES = (strategies.SingleDeviceStrategy, strategies.DDPStrategy, strategies.ModelParallelStrategy)
_OTHER_STRATEGIES = (strategies.DeepSpeedStrategy, strategies.SingleDeviceXLAStrategy)
"""Subclasses of those."""
_OTHER_CALLBACKS = (
    callbacks.BaseFinetuning, callbacks.BatchSizeFinder, callbacks.LearningRateFinder,
    callbacks.StochasticWeightAveraging,
)  # fmt: skip
"""Callbacks that replace parameter groups or schedulers, or train before training."""


class SnapshotCallback(lightning.Callback):  # type: ignore[misc]
    """Restores when training begins, takes a snapshot after each step, and closes when training ends.

    A step's boundary comes after its validation, and in the last step of an epoch after the epoch's hooks and
    schedulers. Lightning calls no callback there, so methods of its loops are wrapped.
    """

    def __init__(self, trainer: Any, config: Config) -> None:
        self._trainer, self._config = trainer, config
        self._progress = FitProgress(trainer)
        self._checkpointer: Any = None
        self._last_step = 0

    @classmethod
    def add_to(cls, trainer: Any, config: Config) -> None:
        """Add the callback to ``trainer``; see ``ftckpt.lightning.attach``."""
        if not isinstance(trainer, lightning.Trainer):
            kind = f"{type(trainer).__module__}.{type(trainer).__name__}"
            raise ConfigError(f"attach: trainer is of type {kind}: give a lightning.Trainer")
        if any(isinstance(one, cls) for one in trainer.callbacks):
            raise ConfigError("attach: this trainer is attached already")
        _check_trainer(trainer)
        callback = cls(trainer, config)
        trainer.callbacks.append(callback)
        progress, epochs, steps = callback._progress, trainer.fit_loop, trainer.fit_loop.epoch_loop
        wrap = Patches().wrap
        wrap(epochs, "_load_combined_loader_states", progress.before_iterators)
        wrap(epochs, "on_run_start", callback._begin)
        wrap(steps, "reset", lambda reset: None if progress.is_midway else reset())
        wrap(steps, "on_run_start", progress.start_epoch)
        wrap(steps, "on_advance_end", callback._after_batch)
        wrap(epochs, "on_advance_end", callback._after_epoch)
        wrap(epochs, "on_run_end", callback._end)

    def on_train_batch_start(self, *_: Any) -> None:
        """Report the forward; hooks of the module report it under DDP only."""
        self._checkpointer.phase("forward")

    def on_before_backward(self, *_: Any) -> None:
        """Report the backward."""
        self._checkpointer.phase("backward")

    def on_save_checkpoint(self, *_: Any) -> None:
        """Pause: validations and checkpoints are no cost of snapshots."""
        if self._checkpointer is not None:
            self._checkpointer.pause()

    on_validation_start = on_save_checkpoint

    def _begin(self, start: Callable[[], None]) -> None:
        """Restore, after lightning has set up model and optimizer and called the hooks ``on_train_start``."""
        start()
        if self._checkpointer is not None:
            raise UnsupportedError("fit: called twice, and ftckpt follows one training; make another Trainer")
        trainer = self._trainer
        _check_model(trainer)
        schedulers = [one.scheduler for one in trainer.lr_scheduler_configs]
        objects = {f"scheduler {number}": one for number, one in enumerate(schedulers) if number}
        objects |= {"trainer": self._progress, "precision": trainer.precision_plugin}
        self._checkpointer = ftckpt.torch.attach(
            trainer.strategy.model,
            trainer.optimizers[0],
            schedulers[0] if schedulers else None,
            objects,
            self._config,
        )
        self._checkpointer.restore(newer_than=trainer.global_step or -1)
        self._last_step = trainer.global_step

    def _after_batch(self, finish: Callable[..., None], *given: Any) -> None:
        finish(*given)
        if not self._trainer.fit_loop.epoch_loop.done:
            self._boundary()
            self._progress.before_draw()

    def _after_epoch(self, finish: Callable[[], None]) -> None:
        finish()
        self._boundary()

    def _boundary(self) -> None:
        """Take a snapshot if a step was made; between two, gradients are accumulated."""
        if self._trainer.global_step > self._last_step:
            check_monitors(self._trainer)
            self._last_step = self._trainer.global_step
            self._checkpointer.step(self._last_step)

    def _end(self, finish: Callable[[], None]) -> None:
        finish()
        self._checkpointer.close()


def _check_trainer(trainer: Any) -> None:
    """Raises UnsupportedError for a strategy or an option that ftckpt does not restore."""
    strategy = trainer.strategy
    name, launcher = type(strategy).__name__, strategy.launcher
    if not isinstance(strategy, _STRATEGIES) or isinstance(strategy, _OTHER_STRATEGIES):
        raise UnsupportedError(
            f"Trainer with {name}: not supported; use DDPStrategy, or ModelParallelStrategy with fully_shard (FSDP2)"
        )
    is_external = launcher is None or strategy.cluster_environment.creates_processes_externally
    if isinstance(launcher, _MultiProcessingLauncher) or not is_external:
        raise UnsupportedError("the Trainer starts ranks, and cannot restart them: start the script with ftckpt run")
    if getattr(strategy, "_model_averaging_period", None) is not None:
        raise UnsupportedError(f"{name} with model_averaging_period: not supported; leave it out")
    if trainer.reload_dataloaders_every_n_epochs:
        raise UnsupportedError("Trainer with reload_dataloaders_every_n_epochs: not supported; leave it out")


def _check_model(trainer: Any) -> None:
    """Raises UnsupportedError for a model or callbacks that ftckpt does not restore."""
    if (number := len(trainer.optimizers)) != 1:
        raise UnsupportedError(
            f"configure_optimizers: {number} optimizers, ftckpt restores one; make the others parameter groups of it"
        )
    if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
        raise UnsupportedError("training_step: ftckpt cannot count the batches of dataloader_iter; take a batch")
    for owner in (trainer.lightning_module, trainer.datamodule, *trainer.callbacks):
        name = type(owner).__name__
        if isinstance(owner, _OTHER_CALLBACKS):
            raise UnsupportedError(f"callback {name}: not supported; leave it out")
        for hook in ("on_save_checkpoint", "on_load_checkpoint"):
            if is_overridden(hook, owner) and not isinstance(owner, SnapshotCallback):
                raise UnsupportedError(
                    f"{name}.{hook}: ftckpt does not call it; keep its state in buffers, or in state_dict of a "
                    "callback or data module"
                )
