"""Run-time hooks for an unpatched Megatron: they call the same callbacks as a patched one, at the same points.

In megatron.core the three schedule functions and the optimizer's step are wrapped. A permanent listener in
``finalize_model_grads_func``, which schedules call after the last backward, is not possible: train loops overwrite
the field and scripts may leave it None; ``config.timers`` may be shared with other code. So each run of a schedule
wraps the current values of these fields and restores them afterwards.

In Megatron-LM's train loop (``megatron.training``) five functions are wrapped. The loop looks them up in their module
at run time, so wrapping the module's attribute is enough.

A patched module (patches/) is not wrapped. In both cases functions that evaluate, save and load are wrapped while a
checkpointer is attached, to exclude their time from the cost of snapshots.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

import megatron.core
from megatron.core.optimizer import optimizer as optimizer_module
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from ftckpt.frameworks import versions
from ftckpt.frameworks.hooks import Hook
from ftckpt.frameworks.launcher import log_once
from ftckpt.megatron import callbacks, door, phases
from ftckpt.megatron.optimizers import leaf_optimizers
from ftckpt.megatron.state import MegatronState
from ftckpt.session.checkpointer import Checkpointer

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
_PAUSES = (
    "evaluate_and_print_results",
    "evaluate",
    "save_checkpoint_and_time",
    "save_checkpoint",
    "maybe_finalize_async_save",
    "load_checkpoint",
)
"""Functions of ``megatron.training.training`` during which training pauses; a release may lack some."""
_OF_SCHEDULES = ("model", "num_microbatches", "forward_only")
"""Arguments of schedules that are read by name."""
_BOUNDARY = tuple(inspect.signature(callbacks.boundary).parameters)
"""Arguments of ``checkpoint_and_decide_exit`` that are passed to the callback."""


def check(model: Any, optimizer: Any) -> None:
    """Checks that a model and an optimizer of megatron.core have the fields and functions that the hooks need.

    Raises:
        UnsupportedError: this release lacks one.
    """
    config = get_model_config(model[0] if isinstance(model, list) else model)
    versions.require(_release(), config, {}, {"finalize_model_grads_func": object, "timers": object})
    versions.require(_release(), optimizer, {"step_with_ready_grads": ()})


def install() -> None:
    """Wraps the schedule functions unless they are patched; idempotent.

    Raises:
        UnsupportedError: this release of megatron.core does not have them.
    """
    versions.require(_release(), schedules, dict.fromkeys(_SCHEDULES, _OF_SCHEDULES))
    door.is_installed = True
    for name in _SCHEDULES:
        _wrap_once(schedules, name, _run_schedule)


def install_in_train_loop() -> None:
    """Wraps the train loop unless it is patched or missing: the wheel of megatron-core has none.

    Raises:
        UnsupportedError: a function to wrap is missing or has other arguments.
    """
    names = list(callbacks.CORE)
    if importlib.util.find_spec("megatron.training") is not None:
        names += [f"megatron.training.{module}" for module in ("arguments", "initialize", "training")]
        for module, function, around in (
            ("arguments", "add_megatron_arguments", _add_flags),
            ("training", "setup_model_and_optimizer", _restore),
            ("training", "train", _set_rng),
            ("training", "training_log", _log_sums),
            ("training", "checkpoint_and_decide_exit", _boundary),
        ):
            _wrap_once(importlib.import_module(f"megatron.training.{module}"), function, around)
    if patched := [name for name in names if callbacks.is_patched(importlib.import_module(name))]:
        log_once("no run-time hooks in patched modules: %s", ", ".join(patched))


def follow(checkpointer: Checkpointer, optimizer: Any, state: MegatronState) -> None:
    """Reports the schedules to this checkpointer, and fences it before each optimizer step.

    There are two independent fences: around ``step_with_ready_grads`` of the outer optimizer, after the gradient norm
    is reduced and immediately before the first write to optimizer-updated state; and torch's hook before each step of
    the inner optimizers, for scripts that step these directly.
    """
    door.leave()  # detaches an earlier job of this process
    door.checkpointer, door.state = checkpointer, state

    def fence_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        checkpointer.fence()
        return original(*args, **kwargs)

    def pause_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Each iteration polls whether a background save has finished (blocking=False), which is not a pause.
        if kwargs.get("blocking") is not False:
            checkpointer.pause()
        return original(*args, **kwargs)

    if not callbacks.is_patched(optimizer_module):
        door.hooks.wrap(optimizer, "step_with_ready_grads", fence_first)
    training = sys.modules.get("megatron.training.training")
    for name in _PAUSES:
        if callable(getattr(training, name, None)):
            door.hooks.wrap(training, name, pause_first)
    for leaf in leaf_optimizers(optimizer):
        if leaf.optimizer is not None:
            hook = Hook(leaf.optimizer, lambda *_: checkpointer.fence())
            handle = leaf.optimizer.register_step_pre_hook(hook)
            door.hooks.undo.append(handle.remove)


def _wrap_once(module: Any, name: str, around: Callable[..., Any]) -> None:
    if callbacks.is_patched(module) or door.patches.has(module, name):
        return
    # At start, because an error at the first boundary would be late.
    versions.require(_release(), module, {name: _BOUNDARY if around is _boundary else ()})
    door.patches.wrap(module, name, around)


def _release() -> str:
    return f"megatron-core {megatron.core.__version__}"


def _run_schedule(original: Callable[..., Any], **kwargs: Any) -> Any:
    checkpointer = callbacks.follower(kwargs.get("forward_only", False))
    if checkpointer is None:
        return original(**kwargs)
    model = kwargs["model"]
    config = get_model_config(model[0] if isinstance(model, list) else model)
    # Read at each run, because a train loop may set them between two iterations.
    before = config.finalize_model_grads_func, config.timers
    try:
        phases.follow(checkpointer, config, kwargs["num_microbatches"])
        return original(**kwargs)
    finally:
        config.finalize_model_grads_func, config.timers = before


def _add_flags(original: Callable[..., Any], parser: Any) -> Any:
    return callbacks.add_flags(original(parser))


def _restore(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model, optimizer, scheduler = original(*args, **kwargs)
    callbacks.restore(model, optimizer, scheduler)
    return model, optimizer, scheduler


def _set_rng(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    callbacks.set_rng()
    return original(*args, **kwargs)


def _log_sums(
    original: Callable[..., Any], loss_dict: Any, total_loss_dict: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    first = callbacks.log_sums(loss_dict, total_loss_dict, kwargs.get("is_first_iteration", False))
    if "is_first_iteration" in inspect.signature(original).parameters:  # 0.15 has none
        kwargs["is_first_iteration"] = first
    return original(loss_dict, total_loss_dict, *args, **kwargs)


def _boundary(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Bound by name: releases differ in the arguments between these.
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    callbacks.boundary(*(given[name] for name in _BOUNDARY))
    return original(*args, **kwargs)
