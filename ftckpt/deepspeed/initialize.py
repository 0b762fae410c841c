"""The door of ``deepspeed.initialize``: where the JSON switches ftckpt on, the engine it returns is followed.

``deepspeed.initialize`` is replaced as soon as both ftckpt.deepspeed and deepspeed are imported, whichever comes
first; importing ftckpt.deepspeed does not import deepspeed. What replaces it does nothing at all where ftckpt is
not switched on. ``deepspeed.init_distributed`` is replaced too, by what keeps the attempts of torchrun apart: at that
time nobody knows the JSON.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ftckpt.deepspeed import section

if TYPE_CHECKING:
    from ftckpt.deepspeed.session import Session

_originals: dict[str, Callable[..., Any]] = {}
_session: Session | None = None
_objects: dict[str, Any] = {}
_runner = False


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing; lets ``install`` be called once deepspeed has been imported."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        if fullname != "deepspeed" or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, install)
        return spec


_watch = _Watch()


def _call_after(loader: Any, done: Callable[[], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        done()

    loader.exec_module = exec_module


def install() -> None:
    """Wrap ``deepspeed.initialize``, now or when deepspeed is imported; a second call does nothing."""
    deepspeed: Any = sys.modules.get("deepspeed")
    if deepspeed is None:
        if _watch not in sys.meta_path:
            sys.meta_path.insert(0, _watch)
        return
    _unwatch()
    for name, wrap in (("initialize", _wrapped), ("init_distributed", _isolated)):
        if name not in _originals:
            _originals[name] = getattr(deepspeed, name)
            setattr(deepspeed, name, wrap(_originals[name]))


def remove() -> None:
    """Put ``deepspeed.initialize`` back, take all hooks off the engine and forget registered objects.

    Snapshots stay where they are.
    """
    _unwatch()
    for name, original in _originals.items():
        setattr(sys.modules["deepspeed"], name, original)
    _originals.clear()
    if _session is not None:
        _session.leave()
    forget()
    _objects.clear()
    section.configure({})


def _unwatch() -> None:
    if _watch in sys.meta_path:
        sys.meta_path.remove(_watch)


def registered() -> dict[str, Any]:
    """The script's own objects, by name."""
    return _objects


def leave_the_end_to_the_runner() -> None:
    """Who knows how the script ended removes the snapshots: ``engine.destroy`` does not any more."""
    global _runner
    _runner = True


def has_runner() -> bool:
    """Whether a runner started the script."""
    return _runner


def session() -> Session | None:
    """Of the engine that is followed now."""
    return _session


def remember(session: Session) -> None:
    """This engine is followed now."""
    global _session
    _session = session


def forget() -> None:
    """No engine is followed any more."""
    global _session
    _session = None


def _isolated(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_distributed(*args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        from ftckpt.elastic.rendezvous import isolate_attempts

        if not dist.is_initialized():
            isolate_attempts()
        return original(*args, **kwargs)

    return init_distributed


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        config = section.merged(section.find(original, args, kwargs))
        if not config.enabled:
            return original(*args, **kwargs)
        from ftckpt.deepspeed import session

        return session.follow(original, args, kwargs, config)

    return initialize
