"""ftckpt for plain torch: a model as it is, under DDP, or under FSDP2 (``fully_shard``).

::

    ftckpt.plain.init_process_group(config, "nccl")
    checkpointer = ftckpt.plain.attach(model, optimizer, scheduler, {"data": data}, config)
    start = checkpointer.restore() or 0
    ...
        checkpointer.step(iteration)
    checkpointer.close()

``config`` is ``ftckpt.Config(enabled=True, ...)``, or what ``Config.from_flags(sys.argv[1:])`` makes of the script's
flags.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftckpt.config import Config
from ftckpt.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ftckpt.checkpointer import Checkpointer
    from ftckpt.live.stateful import Stateful


def init_process_group(config: Config, *args: Any, **options: Any) -> None:
    """``torch.distributed.init_process_group(*args, **options)``, blind to the addresses of earlier attempts.

    torchrun keeps one store for all attempts of a job: see ``ftckpt.elastic.rendezvous``. Where ftckpt is off
    this is torch's own call and nothing else.

    Raises:
        LaunchError: torchrun's store is shared among attempts and cannot be divided; the text has the remedy.
    """
    import torch.distributed as dist

    if config.enabled:
        from ftckpt.elastic.rendezvous import isolate_attempts

        isolate_attempts()
    dist.init_process_group(*args, **options)


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Stateful | None = None,
    objects: Mapping[str, Stateful] | None = None,
    config: Config | None = None,
) -> Checkpointer | None:
    """A checkpointer for this rank's training state, fenced before each step of the optimizer.

    Collective. Call it when all that it is given is built and any checkpoint on storage is loaded. Then call
    ``restore`` once, as the last thing before training, ``step`` at the end of each iteration, when optimizer,
    scheduler and counters have advanced and no batch is drawn, and ``close`` after the last. Returns None where
    ftckpt is not switched on.

    Parameters are written by the optimizer's step alone. What else writes them while training goes on (averaged
    weights swapped in for an evaluation) must call ``fence`` of the checkpointer first.

    Args:
        model: as it is trained: wrapped in DDP, sharded by ``fully_shard``, or neither.
        optimizer: torch's Adam, AdamW or SGD over parameters of ``model``.
        scheduler: of the learning rate, if there is one.
        objects: what else must come back, by name: a data loader, counters, a GradScaler.
        config: None is the default configuration, which is off.

    Raises:
        UnsupportedError: FSDP1, or state that ftckpt cannot map.
        ConfigError: no job name can be found, torch.distributed is not initialised, an object has no state, or there
            are layouts.
    """
    config = config or Config()
    if not config.enabled:
        return None
    if config.layouts:
        raise ConfigError("layouts: a job in plain torch restarts in the layout that it had; leave them out")
    import torch.distributed as dist

    from ftckpt.checkpointer import Checkpointer
    from ftckpt.comm import Group
    from ftckpt.elastic.identity import job_name, node_name
    from ftckpt.plain.hooks import follow
    from ftckpt.plain.state import TorchState
    from ftckpt.plain.topology import gather_topology

    if not dist.is_initialized():
        raise ConfigError("torch.distributed: call ftckpt.plain.init_process_group first, with a single rank too")
    config = replace(config, job=job_name(config.job, os.environ), node=node_name(config.node, os.environ))
    state = TorchState(model, optimizer, scheduler, objects or {})
    group = Group(config.start_timeout_secs)
    topology = gather_topology(group, config.node, state.model)
    checkpointer = Checkpointer(config, state, topology, group=group)
    follow(checkpointer, model, optimizer, state)
    return checkpointer
