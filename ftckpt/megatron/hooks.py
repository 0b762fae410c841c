"""Run-time hooks for megatron.core: they follow its schedules and fence its optimizer.

In megatron.core the three schedule functions and the optimizer's step are wrapped. A permanent listener in
``finalize_model_grads_func``, which schedules call after the last backward, is not possible: train loops overwrite
the field and scripts may leave it None; ``config.timers`` may be shared with other code. So each run of a schedule
wraps the current values of these fields and restores them afterwards.

Functions that evaluate, save and load are wrapped while a checkpointer is attached, to exclude their time from the
cost of snapshots.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import megatron.core
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from ftckpt.config import Config
from ftckpt.frameworks import entry, versions
from ftckpt.frameworks.hooks import Hook
from ftckpt.megatron import geometry, phases
from ftckpt.megatron.job import check_layout, follower, integration
from ftckpt.megatron.optimizers import is_distributed, leaf_optimizers
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
_OF_SCHEDULES = ("model", "forward_only")
"""Arguments of schedules that are read by name."""


def attach(
    config: Config, model: Sequence[Any], optimizer: Any, scheduler: Any, objects: Mapping[str, Any]
) -> Checkpointer:
    """Creates and hooks the checkpointer of ``ftckpt.megatron.attach``. Collective."""
    check(model, optimizer)
    untested = versions.admit("megatron-core", megatron.core.__version__, config)
    install()
    start = entry.start(
        config, lambda: (geometry.coordinates(), geometry.layout_sizes(is_distributed(optimizer))), untested=untested
    )
    if config.layouts:
        check_layout(start.topology.layout)
    state = start.build(lambda: MegatronState(model, optimizer, scheduler, objects))
    checkpointer = start.checkpointer(state)
    follow(checkpointer, optimizer, state)
    return checkpointer


def check(model: Any, optimizer: Any) -> None:
    """Checks that a model and an optimizer of megatron.core have the fields and functions that the hooks need.

    Raises:
        UnsupportedError: this release lacks one.
    """
    config = get_model_config(model[0] if isinstance(model, list) else model)
    versions.require(_release(), config, {}, {"finalize_model_grads_func": object, "timers": object})
    versions.require(_release(), optimizer, {"step_with_ready_grads": ()})


def install() -> None:
    """Wraps the schedule functions; idempotent.

    Raises:
        UnsupportedError: this release of megatron.core does not have them.
    """
    versions.require(_release(), schedules, dict.fromkeys(_SCHEDULES, _OF_SCHEDULES))
    for name in _SCHEDULES:
        wrap_once(schedules, name, _run_schedule)


def follow(checkpointer: Checkpointer, optimizer: Any, state: MegatronState) -> None:
    """Reports the schedules to this checkpointer, and fences it before each optimizer step.

    There are two independent fences: around ``step_with_ready_grads`` of the outer optimizer, after the gradient norm
    is reduced and immediately before the first write to optimizer-updated state; and torch's hook before each step of
    the inner optimizers, for scripts that step these directly.
    """
    integration.leave()  # detaches an earlier job of this process
    integration.checkpointer, integration.state = checkpointer, state

    def fence_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        checkpointer.fence()
        return original(*args, **kwargs)

    def pause_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Each iteration polls whether a background save has finished (blocking=False), which is not a pause.
        if kwargs.get("blocking") is not False:
            checkpointer.pause()
        return original(*args, **kwargs)

    integration.hooks.wrap(optimizer, "step_with_ready_grads", fence_first)
    training = sys.modules.get("megatron.training.training")
    for name in _PAUSES:
        if callable(getattr(training, name, None)):
            integration.hooks.wrap(training, name, pause_first)
    for leaf in leaf_optimizers(optimizer):
        if leaf.optimizer is not None:
            hook = Hook(leaf.optimizer, lambda *_: checkpointer.fence())
            handle = leaf.optimizer.register_step_pre_hook(hook)
            integration.hooks.undo.append(handle.remove)


def wrap_once(module: Any, name: str, around: Callable[..., Any], arguments: Sequence[str] = ()) -> None:
    """Wraps a function of Megatron unless it is wrapped; ``arguments`` are those that ``around`` reads.

    Raises:
        UnsupportedError: the function is missing or has other arguments: at the first boundary it would be late.
    """
    if not integration.patches.has(module, name):
        versions.require(_release(), module, {name: arguments})
        integration.patches.wrap(module, name, around)


def _release() -> str:
    return f"megatron-core {megatron.core.__version__}"


def _run_schedule(original: Callable[..., Any], **kwargs: Any) -> Any:
    checkpointer = follower(kwargs.get("forward_only", False))
    if checkpointer is None:
        return original(**kwargs)
    model = kwargs["model"]
    config = get_model_config(model[0] if isinstance(model, list) else model)
    # Read at each run, because a train loop may set them between two iterations.
    before = config.finalize_model_grads_func, config.timers
    try:
        phases.follow(checkpointer, config)
        return original(**kwargs)
    finally:
        config.finalize_model_grads_func, config.timers = before
