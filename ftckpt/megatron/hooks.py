"""Where ftckpt touches a running Megatron-core: it listens to the schedules and fences the optimizer.

The schedules call ``config.finalize_model_grads_func`` after the last backward. What follows, until weights
change, is the tail: gradients are reduced, their norm is agreed, and the stages that are done wait for those that
are not. The field itself is no place for a hook: train loops overwrite it and scripts may leave it None, and
``config.timers`` may be shared with other code. So the three schedule functions are wrapped, and each run puts
its listeners around whatever the fields hold then.

A patched Megatron-core (patches/) has lines that do this; what is patched is not wrapped.

The fence stands immediately before the first write to stepped state: ``step_with_ready_grads`` of the optimizer,
and once more, as a guard that holds alone, before each step of the optimizers of torch inside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import megatron.core
from megatron.core.optimizer import optimizer as optimizer_module
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from ftckpt.checkpointer import Checkpointer
from ftckpt.errors import UnsupportedError
from ftckpt.megatron import patched, phases
from ftckpt.megatron.optimizers import leaf_optimizers
from ftckpt.megatron.state import MegatronState

KNOWN_VERSIONS = ("0.15.3", "0.16.0", "0.16.1", "0.19.0", "0.19.1")
_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)

_originals: dict[str, Callable[..., Any]] = {}
_active: Checkpointer | None = None
_state: MegatronState | None = None
_guards: list[Callable[[], None]] = []
"""Each takes one fence away."""
_installed = False


def install() -> None:
    """Wrap the schedule functions, where they are not patched; a second call does nothing. ``remove`` undoes it.

    Raises:
        UnsupportedError: this version of megatron.core is not known.
    """
    global _installed
    version = megatron.core.__version__.partition("+")[0]  # what follows names a commit of whatever it lies in
    if version not in KNOWN_VERSIONS:
        raise UnsupportedError(
            f"megatron-core {version} is not known to ftckpt; known are {', '.join(KNOWN_VERSIONS)}: install one of "
            "these, or a newer ftckpt"
        )
    missing = [name for name in _SCHEDULES if not callable(getattr(schedules, name, None))]
    if missing:
        raise UnsupportedError(f"megatron-core {version} has no {missing[0]} in its schedules: a changed build?")
    _installed = True
    for name in _SCHEDULES:
        if name not in _originals and not patched.is_patched(schedules):
            _originals[name] = getattr(schedules, name)
            setattr(schedules, name, _followed(_originals[name]))


def installed() -> bool:
    """Whether ``install`` was called, so that nothing goes without a hook or a line."""
    return _installed


def patched_modules() -> list[str]:
    """Modules of megatron.core that have lines which call ftckpt."""
    return patched.patched_among(patched.CORE)


def remove() -> None:
    """Put the schedule functions and the optimizer's step back and forget the active checkpointer."""
    global _active, _state, _installed
    _installed = False
    for name, original in _originals.items():
        setattr(schedules, name, original)
    _originals.clear()
    _unguard()
    _active = _state = None


def activate(checkpointer: Checkpointer, optimizer: Any, state: MegatronState) -> None:
    """Follow the schedules for this checkpointer, and fence it before each optimizer step."""
    global _active, _state
    _unguard()
    _active, _state = checkpointer, state
    if not patched.is_patched(optimizer_module):
        _guards.append(_guard_step(checkpointer, optimizer))
    for leaf in leaf_optimizers(optimizer):
        if leaf.optimizer is not None:
            handle = leaf.optimizer.register_step_pre_hook(lambda *args: checkpointer.fence())
            _guards.append(handle.remove)


def active() -> Checkpointer | None:
    """The checkpointer of this process's training job."""
    return _active


def set_rng() -> None:
    """Set RNG to what was restored, if anything was."""
    if _state is not None:
        _state.set_rng()


def _guard_step(checkpointer: Checkpointer, optimizer: Any) -> Callable[[], None]:
    """Fence the optimizer's first write; returns what undoes it."""
    step = optimizer.step_with_ready_grads

    @functools.wraps(step)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        checkpointer.fence()
        return step(*args, **kwargs)

    optimizer.step_with_ready_grads = guarded

    def undo() -> None:
        del optimizer.step_with_ready_grads  # the instance's attribute; the class's method shows again

    return undo


def _unguard() -> None:
    while _guards:
        _guards.pop()()


def _followed(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def run(**kwargs: Any) -> Any:
        checkpointer = _active
        if checkpointer is None or kwargs.get("forward_only", False):
            return schedule(**kwargs)
        model = kwargs["model"]
        config = get_model_config(model[0] if isinstance(model, list) else model)
        before = config.finalize_model_grads_func, config.timers
        try:
            phases.listen(checkpointer, config, kwargs["num_microbatches"])
            return schedule(**kwargs)
        finally:
            config.finalize_model_grads_func, config.timers = before

    return run
