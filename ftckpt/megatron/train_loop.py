"""Run-time hooks for the train loop of Megatron-LM (``megatron.training``), and the end of its job.

The loop looks up each of these functions in its module at run time, so wrapping the module's attribute is enough:

| function | action |
|---|---|
| ``add_megatron_arguments`` | after it: adds the ftckpt flags; writes the chosen layout to the command line |
| ``setup_model_and_optimizer`` | after it: attaches and restores, before any data loader is built |
| ``train`` | before it: sets RNG again, because building data loaders drew random numbers |
| ``training_log`` | before it: saves or restores the loss sums for the next log line |
| ``checkpoint_and_decide_exit`` | before it: the step boundary; all counters have advanced |
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import ftckpt.megatron
from ftckpt.config import add_flags
from ftckpt.frameworks.launcher import log_once, world_size
from ftckpt.megatron.charts import Charts
from ftckpt.megatron.counters import Counters
from ftckpt.megatron.hooks import wrap_once
from ftckpt.megatron.job import integration, require_layout

_BOUNDARY = ("iteration", "num_floating_point_operations_so_far")
"""Arguments of ``checkpoint_and_decide_exit`` that the loop has in local variables."""

_counters: Counters | None = None
_charts: Charts | None = None


def install() -> None:
    """Wraps the train loop unless it is missing: the wheel of megatron-core has none.

    Raises:
        UnsupportedError: a function to wrap is missing or has other arguments.
    """
    if importlib.util.find_spec("megatron.training") is None:
        return
    for module, function, around, arguments in (
        ("arguments", "add_megatron_arguments", _add_flags, ()),
        ("training", "setup_model_and_optimizer", _restore, ()),
        ("training", "train", _set_rng, ()),
        ("training", "training_log", _log_sums, ()),
        ("training", "checkpoint_and_decide_exit", _boundary, _BOUNDARY),
    ):
        wrap_once(importlib.import_module(f"megatron.training.{module}"), function, around, arguments)


def close() -> None:
    """Closes the checkpointer at the end of a successful job and removes its snapshots."""
    if integration.checkpointer is not None:
        integration.checkpointer.close()
    elif integration.config.enabled and not integration.was_used:
        log_once(
            "--ftckpt was given but nothing was attached, so no snapshot was taken: a script with its own train loop "
            "must call ftckpt.megatron.attach, see launch/train_gpt.py"
        )


def _add_flags(original: Callable[..., Any], parser: Any) -> Any:
    """The runner has removed the flags from the command line: they become defaults, and ``--help`` shows them."""
    config = integration.config
    if config.layouts:  # before Megatron parses the command line
        from ftckpt.megatron.layouts import rewrite

        sys.argv[1:], choice = rewrite(sys.argv[1:], config.layouts, world_size())
        require_layout(choice)
    parser = add_flags(original(parser))
    names = {one.name: "ftckpt" if one.name == "enabled" else f"ftckpt_{one.name}" for one in fields(config)}
    parser.set_defaults(**{destination: getattr(config, name) for name, destination in names.items()})
    return parser


def _restore(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model, optimizer, scheduler = original(*args, **kwargs)
    # Without an optimizer (``--skip-train``) there is nothing to protect.
    if integration.config.enabled and optimizer is not None:
        training: Any = importlib.import_module("megatron.training")
        restore(training.get_args(), model, optimizer, scheduler)
    return model, optimizer, scheduler


def restore(args: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Attaches, restores, and sets the loop's counters. Collective; a checkpoint from storage is loaded already."""
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


def _set_rng(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if integration.state is not None:
        integration.state.set_rng()
    return original(*args, **kwargs)


def _log_sums(
    original: Callable[..., Any], loss_dict: Any, total_loss_dict: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    if _counters is not None and integration.checkpointer is not None:
        is_first = kwargs.get("is_first_iteration", False)
        is_first = _counters.follow_log(loss_dict, total_loss_dict, is_first)
        if "is_first_iteration" in inspect.signature(original).parameters:  # 0.15 has none
            kwargs["is_first_iteration"] = is_first
    return original(loss_dict, total_loss_dict, *args, **kwargs)


def _boundary(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if integration.checkpointer is not None and _counters is not None:
        # Bound by name: releases differ in the arguments between these.
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        # Megatron's own arguments have the initial values of these two.
        _counters.current = {name: given[name] for name in _BOUNDARY}
        integration.checkpointer.step(given["iteration"])
        if _charts is not None:
            _charts.draw(integration.checkpointer, given["iteration"])
    return original(*args, **kwargs)
