"""Callbacks after the import of a module."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportWatch(importlib.abc.MetaPathFinder):
    """Calls ``hooks[name]`` with the module of that name each time it has been executed.

    Later finders of ``sys.meta_path`` locate the module.
    """

    def __init__(self, hooks: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._hooks = hooks

    def install(self) -> None:
        """Calls the hooks of modules that are already imported, and watches later imports; may be called again."""
        for name, hook in self._hooks.items():
            if name in sys.modules:
                hook(sys.modules[name])
        if self not in sys.meta_path:
            # First of all finders: an earlier one would hide the module from this one.
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stops watching."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._hooks:
            return None
        spec = find_behind(self, fullname, path, target)
        if spec is not None:
            execute_with(spec, self._execute)
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        parent, _, name = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)  # the import does it next, but the hook may need it now
        self._hooks[module.__name__](module)


def find_behind(
    finder: importlib.abc.MetaPathFinder, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """The spec of the module ``name`` from the finders after ``finder``."""
    finders = list(sys.meta_path)
    for other in finders[finders.index(finder) + 1 if finder in finders else 0 :]:
        spec = other.find_spec(name, path, target) if hasattr(other, "find_spec") else None
        if spec is not None:
            return spec
    return None


def execute_with(spec: ModuleSpec, around: Callable[[Callable[[ModuleType], None], ModuleType], None]) -> None:
    """Makes ``around(execute, module)`` execute the module of ``spec``; has no effect on built-in modules."""
    loader = spec.loader
    if loader is None or isinstance(loader, type):
        return
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)  # uncovers the class's method
        around(execute, module)

    loader.exec_module = exec_module  # type: ignore[method-assign]
