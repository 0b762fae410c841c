"""Run-time hooks for the train loop of an unpatched Megatron-LM (``megatron.training``), which call the callbacks.

Five functions are wrapped. The loop looks them up in their module
at run time, so wrapping the module's attribute is enough.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from ftckpt.frameworks.launcher import log_once
from ftckpt.megatron import callbacks
from ftckpt.megatron.hooks import wrap_once
from ftckpt.megatron.job import CORE, is_patched

_BOUNDARY = tuple(inspect.signature(callbacks.boundary).parameters)
"""Arguments of ``checkpoint_and_decide_exit`` that are passed to the callback."""


def install() -> None:
    """Wraps the train loop unless it is patched or missing: the wheel of megatron-core has none.

    Raises:
        UnsupportedError: a function to wrap is missing or has other arguments.
    """
    names = list(CORE)
    if importlib.util.find_spec("megatron.training") is not None:
        names += [f"megatron.training.{module}" for module in ("arguments", "initialize", "training")]
        for module, function, around, arguments in (
            ("arguments", "add_megatron_arguments", _add_flags, ()),
            ("training", "setup_model_and_optimizer", _restore, ()),
            ("training", "train", _set_rng, ()),
            ("training", "training_log", _log_sums, ()),
            ("training", "checkpoint_and_decide_exit", _boundary, _BOUNDARY),
        ):
            wrap_once(importlib.import_module(f"megatron.training.{module}"), function, around, arguments)
    if patched := [name for name in names if is_patched(importlib.import_module(name))]:
        log_once("no run-time hooks in patched modules: %s", ", ".join(patched))


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
