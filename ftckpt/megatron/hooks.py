"""Where ftckpt touches a running Megatron-core: one fence in the schedules, one around the optimizer.

The schedules call ``config.finalize_model_grads_func`` after the last backward and before the optimizer. The
field itself is no place for a hook: train loops overwrite it and scripts may leave it None. So the three
schedule functions are wrapped, and each run puts the fence before whatever the field holds then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import megatron.core
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from ftckpt.checkpointer import Checkpointer
from ftckpt.errors import UnsupportedError
from ftckpt.megatron.state import MegatronState

KNOWN_VERSIONS = ("0.16.0", "0.16.1")
_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)

_originals: dict[str, Callable[..., Any]] = {}
_active: Checkpointer | None = None
_state: MegatronState | None = None
_guarded: Any = None


def install() -> None:
    """Wrap the schedule functions; a second call does nothing. ``remove`` undoes it.

    Raises:
        UnsupportedError: this version of megatron.core is not known.
    """
    version = megatron.core.__version__
    if version not in KNOWN_VERSIONS:
        raise UnsupportedError(
            f"megatron-core {version} is not known to ftckpt; known are {', '.join(KNOWN_VERSIONS)}: install one of "
            "these, or a newer ftckpt"
        )
    missing = [name for name in _SCHEDULES if not callable(getattr(schedules, name, None))]
    if missing:
        raise UnsupportedError(f"megatron-core {version} has no {missing[0]} in its schedules: a changed build?")
    for name in _SCHEDULES:
        if name not in _originals:
            _originals[name] = getattr(schedules, name)
            setattr(schedules, name, _fenced(_originals[name]))


def remove() -> None:
    """Put the schedule functions and the optimizer's step back and forget the active checkpointer."""
    global _active, _state, _guarded
    for name, original in _originals.items():
        setattr(schedules, name, original)
    _originals.clear()
    if _guarded is not None:
        del _guarded.step  # the instance's attribute; the class's method shows again
    _active = _state = _guarded = None


def activate(checkpointer: Checkpointer, optimizer: Any, state: MegatronState) -> None:
    """Fence this checkpointer before each optimizer step, by the schedules and around ``optimizer.step``."""
    global _active, _state, _guarded
    if _guarded is not None:
        del _guarded.step
    _active, _state, _guarded = checkpointer, state, optimizer
    step = optimizer.step

    @functools.wraps(step)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        checkpointer.fence()
        return step(*args, **kwargs)

    optimizer.step = guarded


def active() -> Checkpointer | None:
    """The checkpointer of this process's training job."""
    return _active


def set_rng() -> None:
    """Set RNG to what was restored, if anything was."""
    if _state is not None:
        _state.set_rng()


def _fenced(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def run(**kwargs: Any) -> Any:
        checkpointer = _active
        if checkpointer is None or kwargs.get("forward_only", False):
            return schedule(**kwargs)
        model = kwargs["model"]
        config = get_model_config(model[0] if isinstance(model, list) else model)
        finalize = config.finalize_model_grads_func

        def fence_and_finalize(*args: Any, **more: Any) -> Any:
            checkpointer.fence()
            return finalize(*args, **more) if finalize is not None else None

        config.finalize_model_grads_func = fence_and_finalize
        try:
            return schedule(**kwargs)
        finally:
            config.finalize_model_grads_func = finalize

    return run
