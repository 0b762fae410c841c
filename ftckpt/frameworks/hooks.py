"""Hooks of torch's kind that belong to one object of the script: no copy, pickle or compiler takes part in them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


class Hook:
    """Calls ``function`` for ``owner`` alone, and never as a part of what a compiler traces.

    torch copies and pickles hooks with the object that has them. A copy gets a function that does nothing instead,
    which can be unpickled where ftckpt is not installed.
    """

    def __init__(self, owner: Any, function: Callable[..., None]) -> None:
        self._owner = weakref.ref(owner)
        self._function: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    def __call__(self, owner: Any, *args: Any) -> None:
        if owner is self._owner():  # a shallow copy shares the table of hooks
            self._function(owner, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class ModuleHook(Hook):
    """A hook on a module, which is absent in a graph that is compiled from it: such a forward is not seen."""

    def __call__(self, owner: Any, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            super().__call__(owner, *args)
