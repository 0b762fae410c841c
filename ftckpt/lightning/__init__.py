"""ftckpt for the ``Trainer`` of lightning: DDP, FSDP2 (``ModelParallelStrategy``), or one rank.

::

    config, rest = ftckpt.Config.from_flags(sys.argv[1:])
    ftckpt.torch.init_process_group(config, "nccl")
    ...
    ftckpt.lightning.attach(trainer, config)
    trainer.fit(model, loader)

``fit`` continues at the restored step: model, optimizer, schedulers, precision, RNG, position in the data, counters,
the state of callbacks and of the data module.
"""

from __future__ import annotations

from typing import Any

from ftckpt.config import Config
from ftckpt.errors import ConfigError
from ftckpt.frameworks.launcher import is_off


def attach(trainer: Any, config: Config | None) -> None:
    """Has ``trainer.fit`` restore the newest snapshot, and take snapshots after its steps.

    Call it once, before ``fit``, on all ranks. If ftckpt is off, only logs that.

    Raises:
        UnsupportedError: a strategy or an option of the trainer that ftckpt does not restore, or a release of
            lightning whose loops are others. ``fit`` raises it for the model, its optimizers, callbacks and monitors.
        ConfigError: no config, no ``lightning.Trainer``, or the trainer is attached already.
    """
    if config is None:
        raise ConfigError("attach: config= is missing, such as that of Config.from_flags()")
    if not is_off(config):
        from ftckpt.lightning.callback import SnapshotCallback

        SnapshotCallback.add_to(trainer, config)
