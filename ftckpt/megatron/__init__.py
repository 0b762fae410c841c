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
from ftckpt.elastic.layouts import Choice, Job, Layouts, choose
from ftckpt.elastic.runner import log_to_stderr
from ftckpt.errors import LayoutError
from ftckpt.layout.names import layout_name

if TYPE_CHECKING:
    from ftckpt.checkpointer import Checkpointer

_config = Config()
_choice: Choice | None = None


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


def choose_layout(job: Job, layouts: Layouts | None = None, ranks: int | None = None) -> Mapping[str, int] | None:
    """The layout to build in: sizes by axis, ``dp`` among them; None where none is listed, and all stays as it is.

    For a script that builds its model itself, and calls this before: one that trains through ``megatron.training``
    finds the sizes on its command line.

    Args:
        job: what decides whether a layout fits; its global batch is that of every layout.
        layouts: names, the most wanted first, or a function that gives one for a number of ranks; default:
            ``--ftckpt-layouts``.
        ranks: how many there are; default: ``WORLD_SIZE``.

    Raises:
        LayoutError: no layout fits; the text says of each why not.
    """
    layouts = _config.layouts if layouts is None else layouts
    if not layouts:
        return None
    return hold_to(choose(layouts, world_size() if ranks is None else ranks, job)).sizes


def hold_to(choice: Choice) -> Choice:
    """Tell of a choice; ``attach`` refuses a job that was built in another layout."""
    global _choice
    if choice != _choice and os.environ.get("RANK", "0") == "0":
        log_to_stderr().info("ftckpt: %s", choice)
    _choice = choice
    return choice


def world_size() -> int:
    """The number of ranks that the launcher has started; 1 where none has."""
    return int(os.environ.get("WORLD_SIZE") or 1)


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
        LayoutError: layouts are listed, and the job was built in another than the one that was chosen.
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
    if config.layouts:
        _check_layout(topology.layout)
    checkpointer = Checkpointer(config, state, topology, group=group)
    hooks.activate(checkpointer, optimizer, state)
    return checkpointer


def _check_layout(layout: Mapping[str, Any]) -> None:
    if _choice is None:
        raise LayoutError(
            "layouts are listed and nothing chose one: call ftckpt.megatron.choose_layout before building"
        )
    if any(layout[axis] != size for axis, size in _choice.sizes.items()):
        raise LayoutError(f"{_choice.name} was chosen, and the job was built as {layout_name(layout)}")
