"""Run-time hooks into Megatron-LM's own train loop (``megatron.training``), for scripts such as ``pretrain_gpt.py``.

Five functions, each looked up through a module at run time, so that replacing the name is enough. A wrapper calls
what a line of a patched Megatron-LM calls in the same place (patched.py); a module that has these lines is left
alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from ftckpt.errors import UnsupportedError
from ftckpt.megatron import patched
from ftckpt.megatron.hooks import KNOWN_VERSIONS

_originals: dict[tuple[str, str], Callable[..., Any]] = {}


def available() -> bool:
    """Whether Megatron-LM's train loop can be imported (it is not in the wheel)."""
    if importlib.util.find_spec("megatron") is None:
        return False
    return importlib.util.find_spec("megatron.training") is not None


def install() -> None:
    """Hook the train loop where it is not patched; ``remove`` undoes it.

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
        setattr(_module(module), name, original)
    _originals.clear()


def patched_modules() -> list[str]:
    """Modules of the train loop that have lines which call ftckpt."""
    return patched.patched_among(f"megatron.training.{name}" for name in ("arguments", "initialize", "training"))


def _module(name: str) -> Any:
    return importlib.import_module(f"megatron.training.{name}")


def _hook(module: str, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    home = _module(module)
    if (module, name) in _originals or patched.is_patched(home):
        return
    original = getattr(home, name, None)
    if not callable(original):
        raise UnsupportedError(
            f"this Megatron-LM has no megatron.training.{module}.{name}; known are the releases "
            f"{', '.join(KNOWN_VERSIONS)}"
        )
    _originals[module, name] = original
    setattr(home, name, wrapper(original))


def _with_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(parser: Any) -> Any:
        return patched.add_flags(original(parser))

    return wrapped


def _with_restore(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = original(*args, **kwargs)
        patched.restore(model, optimizer, scheduler)
        return model, optimizer, scheduler

    return wrapped


def _with_rng(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        patched.set_rng()
        return original(*args, **kwargs)

    return wrapped


def _with_log_sums(original: Callable[..., Any]) -> Callable[..., Any]:
    knows_first = "is_first_iteration" in inspect.signature(original).parameters

    @functools.wraps(original)
    def wrapped(loss_dict: Any, total_loss_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        first = patched.log_sums(loss_dict, total_loss_dict, kwargs.get("is_first_iteration", False))
        if knows_first:
            kwargs["is_first_iteration"] = first
        return original(loss_dict, total_loss_dict, *args, **kwargs)

    return wrapped


def _with_boundary(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    names = list(inspect.signature(patched.boundary).parameters)
    missing = [name for name in names if name not in signature.parameters]
    if missing:
        raise UnsupportedError(f"checkpoint_and_decide_exit of this Megatron-LM has no argument {missing[0]}")

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        patched.boundary(*(bound[name] for name in names))
        return original(*args, **kwargs)

    return wrapped
