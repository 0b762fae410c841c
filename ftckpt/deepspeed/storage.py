"""``load_checkpoint`` in combination with snapshots: its arguments, and a required load if snapshots were lost."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ftckpt.deepspeed.active_engine import integration, steps_of
from ftckpt.errors import LostError
from ftckpt.frameworks.launcher import log_once

_LATEST = ("latest", "latest_universal")
"""Files in which DeepSpeed names the newest checkpoint of a directory."""


def is_whole(load: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``load_checkpoint`` replaces weights, optimizer and schedule."""
    given = _given(load, args, kwargs)
    return bool(
        given["load_optimizer_states"] and given["load_lr_scheduler_states"] and not given["load_module_only"]
    )


def is_named(load: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``load_checkpoint`` names a checkpoint other than the directory's newest: a rollback.

    False if the script names the newest one itself, or if the newest one is unknown.
    """
    given = _given(load, args, kwargs)
    if given["tag"] is None:
        return False
    newest = []
    for name in _LATEST:
        try:
            newest.append((Path(given["load_dir"]) / name).read_text().strip())
        except OSError:
            continue
    return bool(newest) and str(given["tag"]) not in newest


class AwaitedLoad:
    """Blocks training of ``engine`` after snapshots were lost, until ``load_checkpoint`` has loaded a checkpoint.

    Then ``begin`` is called with whether the user has named the checkpoint.

    Raises:
        LostError: by the engine, if it is trained before that.
    """

    def __init__(self, engine: Any, lost: LostError, begin: Callable[[bool], object]) -> None:
        self._engine = engine
        self._lost = lost
        self._begin = begin
        integration.leave()
        integration.hooks.wrap(engine, "load_checkpoint", self._load)
        for name in ("forward", "step", "train_batch"):
            if hasattr(engine, name):
                integration.hooks.wrap(engine, name, self._refuse)
        log_once("%s. Training starts once load_checkpoint has loaded one", lost)

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if result[0] is not None and steps_of(self._engine) > 0:
            integration.leave()
            self._begin(is_whole(original, args, kwargs) and is_named(original, args, kwargs))
        return result

    def _refuse(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._engine.module.training and torch.is_grad_enabled():
            raise self._lost
        return original(*args, **kwargs)  # an evaluation


def _given(load: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    call = inspect.signature(load).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments
