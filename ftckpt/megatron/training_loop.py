"""Hooks into Megatron-LM's own train loop (``megatron.training``), for scripts such as ``pretrain_gpt.py``.

Five places, each looked up through a module at run time, so that replacing the name is enough:

* ``arguments.add_megatron_arguments``: the ftckpt flags join Megatron's parser (its ``--help`` too);
* ``training.setup_model_and_optimizer``: everything is built and a checkpoint on storage is loaded, but no
  data is: attach, restore, and tell the loop where it stands;
* ``training.train``: the last thing before the first batch: set RNG, since building data loaders drew from it;
* ``training.training_log``: sums that wait for the next log line are counters too, and a restarted process
  does not begin a log;
* ``training.checkpoint_and_decide_exit``: the boundary; all counters of the iteration have advanced.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch

import ftckpt.megatron
from ftckpt.config import add_flags
from ftckpt.errors import UnsupportedError
from ftckpt.megatron import hooks

_COUNTERS = (
    "iteration",
    "consumed_train_samples",
    "consumed_valid_samples",
    "skipped_train_samples",
    "num_floating_point_operations_so_far",
)
_BOUNDARY_ARGUMENTS = ("iteration", "num_floating_point_operations_so_far")

_originals: dict[tuple[str, str], Callable[..., Any]] = {}
_counters: Counters | None = None


class Counters:
    """The train loop's position: Megatron reads it from its global arguments at start, and keeps two of the
    counters in local variables afterwards (``now``)."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self.now: dict[str, Any] = {}
        self.log_sums: dict[str, Any] = {}
        self.restored_sums: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The counters as they stand."""
        found = {name: getattr(self._args, name) for name in _COUNTERS if hasattr(self._args, name)}
        return {"counters": {**found, **self.now}, "log_sums": dict(self.log_sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the loop start there."""
        for name, value in state["counters"].items():
            setattr(self._args, name, value)
        self.restored_sums = state["log_sums"]


def available() -> bool:
    """Whether Megatron-LM's train loop can be imported (it is not in the wheel)."""
    if importlib.util.find_spec("megatron") is None:
        return False
    return importlib.util.find_spec("megatron.training") is not None


def install() -> None:
    """Hook the train loop; ``remove`` undoes it.

    Raises:
        UnsupportedError: a name to hook is missing or takes other arguments.
    """
    for module, name, wrapper in (
        ("arguments", "add_megatron_arguments", _with_flags),
        ("training", "setup_model_and_optimizer", _with_restore),
        ("training", "train", _with_rng),
        ("training", "training_log", _with_log_sums),
        ("training", "checkpoint_and_decide_exit", _with_boundary),
    ):
        _hook(module, name, wrapper)


def remove() -> None:
    """Put the original functions back."""
    for (module, name), original in _originals.items():
        setattr(importlib.import_module(f"megatron.training.{module}"), name, original)
    _originals.clear()


def _hook(module: str, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    if (module, name) in _originals:
        return
    home = importlib.import_module(f"megatron.training.{module}")
    original = getattr(home, name, None)
    if not callable(original):
        raise UnsupportedError(
            f"this Megatron-LM has no megatron.training.{module}.{name}; core_v0.16.1 is the release that is known"
        )
    _originals[module, name] = original
    setattr(home, name, wrapper(original))


def _with_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(parser: Any) -> Any:
        # The runner took the flags off the command line: their values go in as defaults.
        config = ftckpt.megatron.configuration()
        values = {f"ftckpt_{setting.name}": getattr(config, setting.name) for setting in fields(config)}
        values["ftckpt"] = values.pop("ftckpt_enabled")
        parser = add_flags(original(parser))
        parser.set_defaults(**values)
        return parser

    return wrapped


def _with_restore(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = original(*args, **kwargs)
        from megatron.training import get_args

        global _counters
        _counters = Counters(get_args())
        checkpointer = ftckpt.megatron.attach(model, optimizer, scheduler, {"counters": _counters})
        if checkpointer is not None:
            checkpointer.restore(newer_than=int(getattr(get_args(), "iteration", 0) or 0))
        return model, optimizer, scheduler

    return wrapped


def _with_rng(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        hooks.set_rng()
        return original(*args, **kwargs)

    return wrapped


def _with_log_sums(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(loss_dict: Any, total_loss_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if _counters is not None:
            _counters.log_sums = total_loss_dict
            if _counters.restored_sums is not None:
                total_loss_dict.update({k: _as(loss_dict, v) for k, v in _counters.restored_sums.items()})
                _counters.restored_sums = None
                kwargs["is_first_iteration"] = False
        return original(loss_dict, total_loss_dict, *args, **kwargs)

    return wrapped


def _as(losses: Mapping[str, Any], saved: Any) -> Any:
    """A saved sum on the device of this iteration's losses."""
    if isinstance(saved, torch.Tensor):
        return next((saved.to(loss.device) for loss in losses.values()), saved)
    return saved


def _with_boundary(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    missing = [name for name in _BOUNDARY_ARGUMENTS if name not in signature.parameters]
    if missing:
        raise UnsupportedError(f"checkpoint_and_decide_exit of this Megatron-LM has no argument {missing[0]}")

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        checkpointer = hooks.active()
        if checkpointer is not None and _counters is not None:
            bound = signature.bind(*args, **kwargs).arguments
            _counters.now = {name: bound[name] for name in _BOUNDARY_ARGUMENTS}
            checkpointer.step(bound["iteration"])
        return original(*args, **kwargs)

    return wrapped
