"""ftckpt for Megatron-core: ``attach`` in your own script, or one of these commands for an unmodified one.

ftckpt run ... SCRIPT ARGS... --ftckpt                     the launcher, which hooks Megatron at run time
torchrun ... -m ftckpt.megatron SCRIPT ARGS... --ftckpt    the runner, which does the same under another launcher

Input: model chunks, optimizer, scheduler and objects of a Megatron rank. Output: a checkpointer that follows its
schedules. Importing this module loads neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftckpt.config import Config
from ftckpt.frameworks.launcher import world_size
from ftckpt.megatron.job import integration, require_layout
from ftckpt.model.layouts import JobSizes, Layouts, choose

if TYPE_CHECKING:
    from ftckpt.session.checkpointer import Checkpointer


def configure(config: Config) -> None:
    """Sets the default configuration of ``attach``, taken from the flags."""
    integration.config = config


def active() -> Checkpointer | None:
    """The checkpointer of this process's training job, or None."""
    return integration.checkpointer


def remove() -> None:
    """Restores Megatron's functions and removes all optimizer hooks; snapshots stay in memory."""
    integration.remove()


def choose_layout(
    job: JobSizes, layouts: Layouts | None = None, ranks: int | None = None
) -> Mapping[str, int] | None:
    """The layout in which to build the model: sizes by axis, including ``dp``; None if no layouts are listed.

    Called before building the model, by scripts that do not train through ``megatron.training``, which gets the sizes
    on its command line.

    Args:
        job: the sizes that decide whether a layout fits; all layouts have its global batch.
        layouts: names in order of preference, or a function from the number of ranks to one; default:
            ``--ftckpt-layouts``.
        ranks: the number of ranks; default: ``WORLD_SIZE``.

    Raises:
        LayoutError: no layout fits; the message gives the reason for each.
    """
    layouts = integration.config.layouts if layouts is None else layouts
    if not layouts:
        return None
    return require_layout(choose(layouts, world_size() if ranks is None else ranks, job)).sizes


def attach(
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    objects: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> Checkpointer | None:
    """Creates a checkpointer for this rank's training state, hooked into the schedules and the optimizer.

    Collective. Call it after model, optimizer, scheduler and all ``objects`` are built and any
    checkpoint on storage is loaded. Then call ``restore`` once, ``step`` at the end of each iteration and
    ``close`` after the last. Returns None if ftckpt is off.

    Args:
        model: the rank's chunks as in the train loop (wrapped in DDP).
        optimizer: the result of ``get_megatron_optimizer``.
        scheduler: an OptimizerParamScheduler, or anything with ``state_dict`` and ``load_state_dict``.
        objects: other stateful objects, by name: a data loader, counters.
        config: default: the flags.

    Raises:
        UnsupportedError: a version, an optimizer or state is not supported.
        ConfigError: no job name can be found.
        LayoutError: layouts are listed, but none was chosen or the job was built in another one.
    """
    config = config or integration.config
    if not config.enabled:
        return None
    from ftckpt.megatron import hooks

    return hooks.attach(config, model, optimizer, scheduler, objects or {})
