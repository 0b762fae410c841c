"""Snapshots of a ``Trainer`` of Hugging Face transformers after each of its steps, and its restart from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import transformers
from transformers.trainer_callback import ExportableState, TrainerCallback

import ftckpt.torch
from ftckpt.config import Config
from ftckpt.errors import ConfigError, UnsupportedError
from ftckpt.frameworks.torch_state import load_generators, save_generators

if TYPE_CHECKING:
    from ftckpt.session.checkpointer import Checkpointer

_COUNTERS = (
    "global_step",
    "epoch",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
_METHODS = ("_run_epoch", "_load_rng_state", "_maybe_log_save_evaluate")
"""Methods of ``Trainer`` that are overridden on the instance: no callback sees their arguments."""
_RESTORED = "the snapshot that ftckpt restored"
"""Given to methods of ``Trainer`` in place of a checkpoint's path."""


class TrainerProgress:
    """The position of a trainer and the state of its callbacks, without ``log_history``, which grows with the run."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.is_over = False
        """Whether the restored step was the last one, by a callback that stops early."""

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        counters = {name: getattr(state, name) for name in _COUNTERS}
        callbacks = [[type(one).__name__, one.state()["attributes"]] for one in self._callbacks()]
        return {
            "counters": counters,
            "current_flos": self._trainer.current_flos,
            "callbacks": callbacks,
            # At ``max_steps`` it stops by itself, and the next start may have more of them.
            "is_over": self._trainer.control.should_training_stop and state.global_step < state.max_steps,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name, value in saved["counters"].items():
            setattr(self._trainer.state, name, value)
        self._trainer.current_flos = saved["current_flos"]
        self.is_over = saved["is_over"]
        callbacks = self._callbacks()
        for name, attributes in saved["callbacks"]:
            # In order, as several may be of one class.
            callback = next((one for one in callbacks if type(one).__name__ == name), None)
            if callback is not None:
                callbacks.remove(callback)
                for attribute, value in attributes.items():
                    setattr(callback, attribute, value)

    def _callbacks(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]


class FtckptCallback(TrainerCallback):  # type: ignore[misc]
    """Restores when training begins, takes a snapshot after each step, and closes when training ends.

    A step's boundary comes after its logging, evaluation and checkpoint, so that all of them precede the snapshot.
    """

    def __init__(self, trainer: Any, config: Config) -> None:
        self._trainer, self._config = trainer, config
        self._checkpointer: Checkpointer | None = None
        self._progress = TrainerProgress(trainer)
        self._restored_step = 0
        self._generators: dict[str, Any] = {}
        self._last_step = 0
        self._steps_per_epoch = 1
        self._is_epoch_over = False

    @classmethod
    def add_to(cls, trainer: Any, config: Config) -> None:
        """Add the callback to ``trainer``; see ``ftckpt.transformers.attach``."""
        missing = [name for name in _METHODS if not hasattr(trainer, name)]
        if missing:
            raise UnsupportedError(
                f"transformers {transformers.__version__}: its Trainer has no {missing[0]}; install transformers>=5.0"
            )
        if trainer.is_deepspeed_enabled:
            raise UnsupportedError("Trainer with DeepSpeed: not supported; use ftckpt.deepspeed with its engine")
        if any(isinstance(one, cls) for one in trainer.callback_handler.callbacks):
            raise ConfigError("attach: this trainer is attached already")
        callback = cls(trainer, config)
        trainer.add_callback(callback)
        overrides: list[Callable[..., None]] = [callback._epoch, callback._rng, callback._after_step]
        for name, method in zip(_METHODS, overrides, strict=True):
            setattr(trainer, name, partial(method, getattr(trainer, name)))

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attach to the prepared model and optimizer, and restore."""
        if self._checkpointer is not None:
            raise UnsupportedError("train: called twice, and ftckpt follows one training; make another Trainer")
        trainer = self._trainer
        objects: dict[str, Any] = {"trainer": self._progress}
        if trainer.accelerator.scaler is not None:
            objects["scaler"] = trainer.accelerator.scaler
        loaded = state.global_step
        self._checkpointer = ftckpt.torch.attach(
            trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler, objects, self._config
        )
        if self._checkpointer.restore(newer_than=loaded or -1):
            self._restored_step = trainer.state.global_step
            self._generators = save_generators()
            trainer._initial_global_step = trainer._globalstep_last_logged = trainer.state.global_step
            trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        self._last_step = trainer.state.global_step

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """More steps follow."""
        self._is_epoch_over = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Only the epoch's own logging, evaluation and checkpoint follow."""
        self._is_epoch_over = True

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Close, as the job is done."""
        assert self._checkpointer is not None, "on_train_begin comes first"
        self._checkpointer.close()

    def _epoch(self, run: Callable[..., None], **given: Any) -> None:
        """Run the rest of an epoch; those before the restored step are skipped, all if it was the last step."""
        self._steps_per_epoch = given["num_update_steps_per_epoch"]
        first, steps = divmod(self._restored_step, self._steps_per_epoch)
        if self._progress.is_over or self._restored_step >= self._trainer.state.max_steps:
            self._trainer.control.should_training_stop = True
            return
        if given["epoch"] < first:
            return
        if self._restored_step and given["epoch"] == first:
            args = self._trainer.args
            batches = 0 if args.ignore_data_skip else steps * args.gradient_accumulation_steps
            given |= {
                "resume_from_checkpoint": _RESTORED,
                "epochs_trained": first,
                "steps_trained_in_current_epoch": batches,
            }
        run(**given)

    def _rng(self, load: Callable[[str | None], None], checkpoint: str | None) -> None:
        """Set RNG as at the restored boundary: skipping batches has drawn random numbers."""
        if checkpoint is _RESTORED:
            load_generators(self._generators)
        else:
            load(checkpoint)

    def _after_step(self, finish: Callable[..., None], *given: Any, **named: Any) -> None:
        """Log, evaluate and save; then the step's boundary, in the last step of an epoch after those of the epoch."""
        step = self._trainer.state.global_step
        ends_epoch = step % self._steps_per_epoch == 0
        assert self._checkpointer is not None, "on_train_begin comes first"
        control = self._trainer.control
        if control.should_evaluate or control.should_save:
            self._checkpointer.pause()
        finish(*given, **named)
        if step > self._last_step and (self._is_epoch_over or not ends_epoch):
            self._last_step = step
            self._checkpointer.step(step)
