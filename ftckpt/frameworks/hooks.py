"""torch hooks bound to one object of the script: copies, pickles and compiled graphs of it do not call them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


class Hook:
    """Calls ``function`` for ``owner`` only, and never as part of a compiled graph; returns its result.

    torch copies and pickles hooks with their object. A copy gets a function without effect instead, which can be
    unpickled without ftckpt.
    """

    def __init__(self, owner: Any, function: Callable[..., Any]) -> None:
        self._owner = weakref.ref(owner)
        self._function: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    def __call__(self, owner: Any, *args: Any) -> Any:
        # A shallow copy shares the table of hooks.
        return self._function(owner, *args) if owner is self._owner() else None

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class ModuleHook(Hook):
    """A hook on a module; graphs compiled from the module do not contain it, so such a forward is not observed."""

    def __call__(self, owner: Any, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            super().__call__(owner, *args)
