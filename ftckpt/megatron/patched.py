"""What the lines of a patched Megatron-LM call (patches/); the run-time hooks call the same functions.

``LINES`` names them. Each returns at once unless ``--ftckpt`` was given. Megatron imports this module before
itself, so nothing of Megatron and no torch is imported until a function has work to do.

An error of ftckpt ends the process: one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import ftckpt.megatron
from ftckpt import config as schema
from ftckpt.config import Config
from ftckpt.elastic.runner import log_to_stderr
from ftckpt.errors import FtckptError, UnsupportedError

if TYPE_CHECKING:
    from ftckpt.checkpointer import Checkpointer
    from ftckpt.megatron.counters import Counters

LINES = ("add_flags", "start", "restore", "set_rng", "log_sums", "boundary", "listen", "fence", "close")
ALIAS = "ftckpt"
"""The name under which a patched module imports this one."""
CORE = ("megatron.core.pipeline_parallel.schedules", "megatron.core.optimizer.optimizer")
"""The modules of megatron.core that have lines."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_counters: Counters | None = None


def is_patched(module: ModuleType) -> bool:
    """Whether a module of Megatron has our lines."""
    return getattr(module, ALIAS, None) is sys.modules[__name__]


def patched_among(names: Iterable[str]) -> list[str]:
    """Those of the modules, by name, that have our lines. Imports them."""
    return [name for name in names if is_patched(importlib.import_module(name))]


def _ends_in_one_line(function: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except FtckptError as error:
            print(f"ftckpt: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from error

    return wrapped


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """In ``add_megatron_arguments``: the ftckpt flags join Megatron's parser, its ``--help`` too.

    Flags that the runner took off the command line go in as defaults. Where they list layouts, the sizes of the one
    that fits are put on the command line, which Megatron reads next.
    """
    config = ftckpt.megatron.configuration()
    _choose_layout(config)
    parser = schema.add_flags(parser)
    parser.set_defaults(**{_destination(s.name): getattr(config, s.name) for s in fields(config)})
    return parser


@_ends_in_one_line
def _choose_layout(config: Config) -> None:
    if not config.enabled and any(word.startswith("--ftckpt-layouts") for word in sys.argv[1:]):
        config, _ = Config.from_flags(sys.argv[1:])
    if config.layouts:
        from ftckpt.megatron.layouts import rewrite

        sys.argv[1:], choice = rewrite(sys.argv[1:], config.layouts, ftckpt.megatron.world_size())
        ftckpt.megatron.hold_to(choice)


@_ends_in_one_line
def start(args: argparse.Namespace) -> None:
    """In ``initialize_megatron``, before ``init_process_group``: what the parsed flags say is in force from here."""
    if not hasattr(args, "ftckpt"):
        return  # arguments of another parser
    config = Config()
    values = {s.name: getattr(args, _destination(s.name), getattr(config, s.name)) for s in fields(config)}
    config, _ = Config.from_flags(Config(**values).flags())  # finds settings without --ftckpt
    if config != ftckpt.megatron.configuration():
        switch_on(config)


def switch_on(config: Config) -> None:
    """Put a configuration in force and keep this attempt's rendezvous apart from earlier ones.

    Raises:
        LaunchError: torchrun's store is shared among attempts and cannot be divided.
    """
    ftckpt.megatron.configure(config)
    if not config.enabled:
        return
    log = log_to_stderr()
    from ftckpt.elastic.rendezvous import isolate_attempts

    rendezvous = isolate_attempts()
    if os.environ.get("RANK", "0") == "0":
        log.info("ftckpt: rendezvous: %s", rendezvous)


@_ends_in_one_line
def restore(model: Any, optimizer: Any, scheduler: Any) -> None:
    """At the end of ``setup_model_and_optimizer``: everything is built and a checkpoint on storage is loaded,
    but no data is. Attach, restore, and tell the loop where it stands. Collective.

    Without an optimizer (``--skip-train``) there is nothing to protect.
    """
    training: Any = importlib.import_module("megatron.training")
    args = training.get_args()
    if not ftckpt.megatron.enabled():
        if getattr(args, "ftckpt", False):
            raise UnsupportedError("--ftckpt was parsed and not switched on: initialize_megatron has no ftckpt line")
        return
    if optimizer is None:
        return
    _require_lines_in_core()
    from ftckpt.megatron.counters import Counters

    global _counters
    _counters = Counters(args)
    checkpointer = ftckpt.megatron.attach(model, optimizer, scheduler, {"counters": _counters})
    if checkpointer is not None:
        checkpointer.restore(newer_than=int(getattr(args, "iteration", 0) or 0))


def set_rng() -> None:
    """At the start of ``train``: building data loaders drew numbers since ``restore`` set RNG."""
    if _active() is not None:
        sys.modules["ftckpt.megatron.hooks"].set_rng()


def log_sums(loss_dict: Mapping[str, Any], total_loss_dict: dict[str, Any], is_first_iteration: bool = False) -> bool:
    """At the start of ``training_log``: sums that wait for the next log line are counters too.

    Returns whether this iteration begins a log; a restored one does not.
    """
    if _counters is None or _active() is None:
        return is_first_iteration
    return _counters.follow_log(loss_dict, total_loss_dict, is_first_iteration)


@_ends_in_one_line
def boundary(iteration: int, num_floating_point_operations_so_far: float) -> None:
    """At the start of ``checkpoint_and_decide_exit``: all counters of the iteration have advanced."""
    checkpointer = _active()
    if checkpointer is not None and _counters is not None:
        _counters.now = {
            "iteration": iteration,
            "num_floating_point_operations_so_far": num_floating_point_operations_so_far,
        }
        checkpointer.step(iteration)


def listen(config: Any, num_microbatches: int, forward_only: bool) -> Any:
    """In each schedule: the configuration it shall use, a copy that tells where the schedule is."""
    checkpointer = _active()
    if checkpointer is None or forward_only:
        return config
    phases: Any = importlib.import_module("ftckpt.megatron.phases")
    config = copy.copy(config)
    phases.listen(checkpointer, config, num_microbatches)
    return config


@_ends_in_one_line
def fence() -> None:
    """In each ``step_with_ready_grads``: what follows writes stepped state."""
    checkpointer = _active()
    if checkpointer is not None:
        checkpointer.fence()


@_ends_in_one_line
def close(exit_code: int | str | None = 0) -> None:
    """Where the job ends: if it ended well its snapshots are not needed any more."""
    checkpointer = _active()
    if checkpointer is not None and exit_code in (None, 0):
        checkpointer.close()


def _active() -> Checkpointer | None:
    hooks: Any = sys.modules.get("ftckpt.megatron.hooks")  # loaded by whoever attaches
    return hooks.active() if hooks is not None else None


def _destination(setting: str) -> str:
    return "ftckpt" if setting == "enabled" else f"ftckpt_{setting}"


def _require_lines_in_core() -> None:
    """Without lines there the optimizer would not be fenced, unless the runner has set its hooks."""
    from ftckpt.megatron import hooks

    bare = [module for module in map(importlib.import_module, CORE) if not is_patched(module)]
    if bare and not hooks.installed():
        raise UnsupportedError(
            f"{bare[0].__file__} has no ftckpt lines, though the train loop has: put the patched checkout before "
            "any other megatron-core on PYTHONPATH, or use the runner, -m ftckpt.megatron"
        )
