"""ftckpt for the ``Trainer`` of Hugging Face transformers, and its subclasses: DDP, FSDP2, or one rank.

::

    config, rest = ftckpt.Config.from_flags(sys.argv[1:])
    ...
    trainer = Trainer(model=model, args=training_args, train_dataset=dataset)
    ftckpt.transformers.attach(trainer, config)
    trainer.train()

``train`` continues at the restored step: model, optimizer, scheduler, RNG, position in the data, the counters of
``trainer.state`` and the state of callbacks.
"""

from __future__ import annotations

from typing import Any

from ftckpt.config import Config
from ftckpt.errors import ConfigError
from ftckpt.frameworks.launcher import is_off


def attach(trainer: Any, config: Config | None) -> None:
    """Has ``trainer.train`` restore the newest snapshot, and take snapshots after its steps.

    Call it once, before ``train``, on all ranks. If ftckpt is off, only logs that.

    Raises:
        UnsupportedError: DeepSpeed, or a release of transformers whose training loop is another one.
        ConfigError: no config, no process group, or the trainer is attached already.
    """
    if config is None:
        raise ConfigError("attach: config= is missing, such as that of Config.from_flags()")
    if not is_off(config):
        from ftckpt.transformers.callback import FtckptCallback

        FtckptCallback.add_to(trainer, config)
