"""Callbacks from Megatron, called by a patched Megatron-LM (patches/) or by run-time hooks (hooks.py).

All return at once without ``--ftckpt``. Megatron imports this module before itself, so functions import Megatron and
torch only when they need them.

An error of ftckpt ends the process with one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import ftckpt.megatron
from ftckpt.config import Config
from ftckpt.config import add_flags as add_flags_to
from ftckpt.errors import FtckptError, UnsupportedError
from ftckpt.frameworks import entry, launcher
from ftckpt.megatron.job import CORE, follower, integration, is_patched, require_layout

if TYPE_CHECKING:
    from ftckpt.megatron.charts import Charts
    from ftckpt.megatron.counters import Counters

_P = ParamSpec("_P")
_R = TypeVar("_R")
_counters: Counters | None = None
_charts: Charts | None = None


def _ends_in_one_line(function: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except FtckptError as error:
            raise SystemExit(launcher.refuse(error)) from error

    return wrapped


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Called in ``add_megatron_arguments``: adds the ftckpt flags to Megatron's parser and its ``--help``.

    Flags that the runner removed from the command line become defaults. If they list layouts, the sizes of the one
    that fits are written to the command line, which Megatron parses next.
    """
    config = integration.config
    _choose_layout(config)  # before Megatron parses the command line that this rewrites
    parser = add_flags_to(parser)
    # The runner has removed the flags from the command line, so Megatron cannot parse them.
    parser.set_defaults(**{_destination(s.name): getattr(config, s.name) for s in fields(config)})
    return parser


@_ends_in_one_line
def _choose_layout(config: Config) -> None:
    if not config.enabled and any(word.startswith("--ftckpt-layouts") for word in sys.argv[1:]):
        config, _ = Config.from_flags(sys.argv[1:])
    if config.layouts:
        from ftckpt.megatron.layouts import rewrite

        sys.argv[1:], choice = rewrite(sys.argv[1:], config.layouts, launcher.world_size())
        require_layout(choice)


@_ends_in_one_line
def start(args: argparse.Namespace) -> None:
    """Called in ``initialize_megatron``, before ``init_process_group``: applies the parsed flags."""
    if not hasattr(args, "ftckpt"):
        return  # of another parser
    config = Config()
    values = {s.name: getattr(args, _destination(s.name), getattr(config, s.name)) for s in fields(config)}
    config, _ = Config.from_flags(Config.of_flags(values).flags())  # finds settings without --ftckpt
    if config.enabled:
        launcher.leave_if_over()
    # The runner has already applied it.
    if config != integration.config:
        switch_on(config)


def switch_on(config: Config) -> None:
    """Applies a configuration and isolates this attempt's rendezvous from earlier ones.

    Raises:
        LaunchError: attempts share torchrun's store and it cannot be divided.
    """
    integration.config = config
    if config.enabled:
        from ftckpt.frameworks.rendezvous import isolate

        entry.prepare_storage(config)
        isolate()


@_ends_in_one_line
def restore(model: Any, optimizer: Any, scheduler: Any) -> None:
    """Called at the end of ``setup_model_and_optimizer``: attaches, restores, and sets the loop's counters.

    Collective. A checkpoint from storage is loaded, but no data loader is built yet. Without an optimizer
    (``--skip-train``) there is nothing to protect.
    """
    training: Any = importlib.import_module("megatron.training")
    args = training.get_args()
    if not integration.config.enabled:
        if getattr(args, "ftckpt", False):
            raise UnsupportedError(
                "--ftckpt was parsed but not applied, because initialize_megatron has no ftckpt line: patch "
                "Megatron-LM with patches/apply.sh, or use the runner, -m ftckpt.megatron"
            )
        return
    if optimizer is None:
        return
    _require_lines_in_core()
    from ftckpt.megatron.charts import Charts
    from ftckpt.megatron.counters import Counters

    global _charts, _counters
    _counters, _charts = Counters(args), Charts(args)
    checkpointer = ftckpt.megatron.attach(model, optimizer, scheduler, {"counters": _counters})
    if checkpointer is not None:
        loaded = int(getattr(args, "iteration", 0) or 0)
        # Not equal with --finetune, which counts from 0 regardless of the checkpoint.
        named = bool(loaded) and getattr(args, "ckpt_step", None) == loaded
        # Non-persistent checkpoints may be on the nodes themselves and be lost with one.
        lasting = named or getattr(args, "non_persistent_ckpt_type", None) is None
        checkpointer.restore(newer_than=loaded, rollback=named, lasting=lasting)


def set_rng() -> None:
    """Called at the start of ``train``: sets RNG again, because building data loaders drew random numbers."""
    if integration.state is not None:
        integration.state.set_rng()


def log_sums(loss_dict: Mapping[str, Any], total_loss_dict: dict[str, Any], is_first_iteration: bool = False) -> bool:
    """Called at the start of ``training_log``: saves or restores the loss sums for the next log line.

    Returns whether this iteration starts new sums; after a restore it does not.
    """
    if _counters is None or integration.checkpointer is None:
        return is_first_iteration
    return _counters.follow_log(loss_dict, total_loss_dict, is_first_iteration)


@_ends_in_one_line
def boundary(iteration: int, num_floating_point_operations_so_far: float) -> None:
    """Called at the start of ``checkpoint_and_decide_exit``: the step boundary; all counters have advanced."""
    if integration.checkpointer is not None and _counters is not None:
        # The loop has these two in local variables; Megatron's arguments have their initial values.
        _counters.current = {
            "iteration": iteration,
            "num_floating_point_operations_so_far": num_floating_point_operations_so_far,
        }
        integration.checkpointer.step(iteration)
        if _charts is not None:
            _charts.draw(integration.checkpointer, iteration)


def listen(config: Any, forward_only: bool) -> Any:
    """Called in each schedule: returns the configuration to use, a copy with listeners for phases."""
    checkpointer = follower(forward_only)
    if checkpointer is None:
        return config
    phases: Any = importlib.import_module("ftckpt.megatron.phases")
    # A copy: the patch is one line at the start of a schedule, which cannot remove the listeners at its end.
    config = copy.copy(config)
    phases.follow(checkpointer, config)
    return config


@_ends_in_one_line
def fence() -> None:
    """Called in each ``step_with_ready_grads``, before it writes optimizer-updated state."""
    if integration.checkpointer is not None:
        integration.checkpointer.fence()


@_ends_in_one_line
def close(exit_code: int | str | None = 0) -> None:
    """Closes the checkpointer at the end of a successful job and removes its snapshots."""
    # Any other code is a failure or an interruption: snapshots stay for the next attempt.
    if exit_code not in (None, 0):
        return
    if integration.checkpointer is not None:
        integration.checkpointer.close()
    elif integration.config.enabled and not integration.was_used:
        launcher.log_once(
            "--ftckpt was given but nothing was attached, so no snapshot was taken: a script with its own train loop "
            "must call ftckpt.megatron.attach, see launch/train_gpt.py"
        )


def _destination(setting: str) -> str:
    return "ftckpt" if setting == "enabled" else f"ftckpt_{setting}"


def _require_lines_in_core() -> None:
    """Raises UnsupportedError if megatron.core is neither patched nor hooked: the optimizer would not be fenced."""
    if integration.is_installed:
        return
    bare = [module for module in map(importlib.import_module, CORE) if not is_patched(module)]
    if bare:
        raise UnsupportedError(
            f"{bare[0].__file__} is not patched, but the train loop is: put the patched checkout before any other "
            "megatron-core on PYTHONPATH, or use the runner, -m ftckpt.megatron"
        )
