"""ftckpt for the ``Trainer`` of torchtitan, with data, tensor, context and expert parallelism.

::

    config, rest = ftckpt.Config.from_flags(sys.argv[1:])
    ftckpt.torch.init_process_group(config, "nccl")
    trainer = ConfigManager().parse_args(rest).build()
    ftckpt.torchtitan.attach(trainer, config)
    trainer.train()

``train`` continues at the restored step: model, optimizer, schedulers, RNG, the data loader's position, counters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ftckpt.torch
from ftckpt.config import Config
from ftckpt.errors import ConfigError, UnsupportedError
from ftckpt.frameworks.entry import Patches
from ftckpt.frameworks.launcher import is_off


def attach(trainer: Any, config: Config | None) -> None:
    """Has ``trainer.train`` restore the newest snapshot, and take snapshots where its checkpoint manager saves.

    Call it once, before ``train``, on all ranks. If ftckpt is off, only logs that.

    Raises:
        UnsupportedError: pipeline parallelism, or parameter groups of several optimizers.
        ConfigError: no config.
    """
    if config is None:
        raise ConfigError("attach: config= is missing, such as that of Config.from_flags()")
    if is_off(config):
        return
    if len(trainer.model_parts) != 1:
        raise UnsupportedError("parallelism.pipeline_parallel_degree: ftckpt does not restore pipelines; set it to 1")
    if (number := len(trainer.optimizers)) != 1:
        raise UnsupportedError(
            f"optimizer.param_groups: {number} optimizers, and ftckpt restores one; name one in all"
        )
    _follow(trainer, config)


class _LoaderPosition:
    """The position of a data loader, of the ``StatefulDataLoader`` from which torchtitan's derives: torchtitan's is
    pickled, and ftckpt reads no pickles."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        bases = [base for base in type(loader).__mro__ if base.__name__ == "StatefulDataLoader"]
        self._kind: Any = bases[0] if bases else type(loader)

    def state_dict(self) -> Any:
        return self._kind.state_dict(self._loader)

    def load_state_dict(self, saved: Any) -> None:
        self._kind.load_state_dict(self._loader, saved)


def _follow(trainer: Any, config: Config) -> None:
    checkpointer: Any = None

    def load(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        nonlocal checkpointer
        is_loaded = original(*args, **named)
        objects = {"trainer": trainer, "data": _LoaderPosition(trainer.dataloader)}
        (model,), (optimizer,) = trainer.model_parts, trainer.optimizers
        checkpointer = ftckpt.torch.attach(model, optimizer, trainer.lr_schedulers, objects, config)
        checkpointer.restore(newer_than=trainer.step or -1)
        return is_loaded

    def save(original: Callable[..., Any], step: int, *args: Any, **named: Any) -> Any:
        checkpointer.pause()
        is_saved = original(step, *args, **named)
        checkpointer.step(step)
        return is_saved

    def train(original: Callable[[], Any]) -> Any:
        result = original()
        checkpointer.close()
        return result

    patches = Patches()
    patches.wrap(trainer.checkpointer, "load", load)
    patches.wrap(trainer.checkpointer, "save", save)
    patches.wrap(trainer, "train", train)
