"""Switches ftckpt off in children of a training process.

A child has copies of its parent's objects and maps the same shared memory, but has none of its threads. The hooks of
its copy of an optimizer would wait for a missing copier thread, and invalidate slots of the parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import weakref
from collections.abc import Callable
from contextlib import ExitStack

_PR_SET_PDEATHSIG = 1

is_child = False
"""Whether a training process has forked this one, which does not train itself."""
has_forked = False
"""Whether this process has forked a child, which may still live and hold all descriptors that were open then."""
_switches: list[Callable[[], object]] = []
_trainers: list[weakref.WeakMethod[Callable[[], object]]] = []
_has_trained = False
"""Whether this process trains; False in a server that forks workers, because these must not be switched off."""


def off_in_children(switch: Callable[[], object]) -> None:
    """Registers ``switch`` to be called in each child of a training process."""
    _switches.append(switch)


def trains(switch: Callable[[], object]) -> None:
    """Marks this process as training, and registers ``switch``, a bound method, to be called in each child."""
    global is_child, _has_trained
    is_child, _has_trained = False, True
    _trainers[:] = [one for one in _trainers if one() is not None]
    _trainers.append(weakref.WeakMethod(switch))


def _switch_off() -> None:
    global has_forked, is_child, _has_trained
    has_forked = False
    if not _has_trained:
        return
    is_child, _has_trained = True, False
    trainers = [switch for one in _trainers if (switch := one()) is not None]
    _trainers.clear()
    with ExitStack() as stack:  # calls all of them, even if one raises
        for switch in [*trainers, *_switches]:
            stack.callback(switch)


def _note_child() -> None:
    global has_forked
    has_forked = True


os.register_at_fork(after_in_child=_switch_off, after_in_parent=_note_child)


def end_with_parent(parent: int = 0) -> None:
    """Makes the kernel kill this process when its parent ends; ``parent`` is the expected parent, if known."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:  # the parent ended before the call
        os._exit(1)
