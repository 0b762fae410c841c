"""ftckpt for Megatron-core: ``attach`` in a script of your own, or one of two doors for a script as it is.

torchrun ... -m ftckpt.megatron SCRIPT ARGS... --ftckpt    the runner, which hooks Megatron at run time
torchrun ... SCRIPT ARGS... --ftckpt                       with a Megatron-LM that patches/apply.sh has patched
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftckpt.config import Config

if TYPE_CHECKING:
    from ftckpt.checkpointer import Checkpointer

_config = Config()


def configure(config: Config) -> None:
    """What ``attach`` uses where it is given no configuration; the flags come in here."""
    global _config
    _config = config


def configuration() -> Config:
    """The configuration in force."""
    return _config


def enabled() -> bool:
    """Whether ftckpt is switched on."""
    return _config.enabled


def attach(
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    objects: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> Checkpointer | None:
    """A checkpointer for this rank's training state, fenced into the schedules and the optimizer.

    Collective. Call it when model, optimizer, scheduler and whatever ``objects`` names are built and any
    checkpoint on storage is loaded. Then call ``restore`` once, ``step`` at the end of each iteration and
    ``close`` after the last. Returns None where ftckpt is not switched on.

    Args:
        model: the rank's chunks as the train loop holds them (wrapped in DDP).
        optimizer: what ``get_megatron_optimizer`` gave.
        scheduler: an OptimizerParamScheduler, or anything with ``state_dict`` and ``load_state_dict``.
        objects: more of the kind, by name: a data loader, counters.
        config: default is what the flags said.

    Raises:
        UnsupportedError: a version, an optimizer or state that ftckpt does not know.
        ConfigError: no job name can be found.
    """
    config = config or _config
    if not config.enabled:
        return None
    from ftckpt.checkpointer import Checkpointer
    from ftckpt.comm import Group
    from ftckpt.elastic.identity import job_name, node_name
    from ftckpt.megatron import hooks
    from ftckpt.megatron.optimizers import leaf_optimizers
    from ftckpt.megatron.state import MegatronState
    from ftckpt.megatron.topology import gather_topology

    hooks.install()
    config = replace(config, job=job_name(config.job, os.environ), node=node_name(config.node, os.environ))
    state = MegatronState(model, optimizer, scheduler, objects or {})
    sharded = any(leaf.config.use_distributed_optimizer for leaf in leaf_optimizers(optimizer))
    group = Group(config.start_timeout_secs)
    topology = gather_topology(group, config.node, sharded)
    checkpointer = Checkpointer(config, state, topology, group=group)
    hooks.activate(checkpointer, optimizer, state)
    return checkpointer
