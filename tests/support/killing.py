"""A process of a test that SIGKILL ends at a step that can be chosen, and system calls that fail."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import pathlib
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from ftckpt.memory.record import Stores


def replace_call(name: str, call: Callable[..., Any], setting: Callable[[Any, str, Any], None]) -> None:
    """``os.NAME`` becomes ``call``, for pathlib too, which binds its functions at import in Python 3.10."""
    accessor = getattr(pathlib, "_normal_accessor", None)
    if getattr(accessor, name, None) is getattr(os, name):
        setting(accessor, name, call)
    setting(os, name, call)


def killed_at(step: int, action: Callable[[], None]) -> bool:
    """Run ``action`` in a child that is killed before its ``step``-th store or file-system call; False: it ended.

    Steps are counted over all threads.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed by itself"
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    try:
        count, guard = itertools.count(), threading.Lock()

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def killing(*args: Any, **options: Any) -> Any:
                with guard:
                    if next(count) == step:
                        os.kill(os.getpid(), signal.SIGKILL)
                        time.sleep(30)  # the kill comes when the call returns, at the latest
                    return call(*args, **options)

            return killing

        for name in ("open", "unlink", "rename", "mkdir", "rmdir", "posix_fallocate"):
            replace_call(name, counted(getattr(os, name)), setattr)
        Stores.store = counted(Stores.store)  # type: ignore[method-assign]
        action()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a child must not come back into the test
        traceback.print_exc()
    finally:
        os._exit(1)


def wrap(place: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace a function, such as ``module:Class.method``, by ``wrapper`` of it; returns what puts it back."""
    module, _, dotted = place.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = dotted.split(".")
    for class_name in classes:
        owner = getattr(owner, class_name)
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrapper(original)))
    return lambda: setattr(owner, name, original)


def at_calls(reached: Callable[..., None], after: bool = False) -> Callable[..., Callable[..., Any]]:
    """A wrapper that calls ``reached`` with the positional arguments, before each call or after it."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if not after:
                reached(*args)
            result = original(*args, **options)
            if after:
                reached(*args)
            return result

        return wrapped

    return wrapper


def die_at(place: str, nth: int = 1, *, after: bool = False) -> None:
    """From now on SIGKILL ends this process at the ``nth`` call of a function, such as ``module:Class.method``."""
    calls = itertools.count(1)

    def reached(*_: Any) -> None:
        if next(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)  # the kill comes when the call returns, at the latest

    wrap(place, at_calls(reached, after))


def fails_with(error: int) -> Callable[..., NoReturn]:
    """A replacement for a system call that fails with this error."""

    def fail(*args: object, **_: object) -> NoReturn:
        raise OSError(error, os.strerror(error), *(str(one) for one in args[:1] if isinstance(one, os.PathLike)))

    return fail
