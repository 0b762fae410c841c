"""Off in children: a process that a training process forks trains nothing.

A child has copies of all objects of its parent and maps the same shared memory, but has none of its threads. Hooks of
its copy of an optimizer would wait for a copier that is not there, and invalidate slots of the parent.
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
"""Whether a process that trains has forked this one, which does not train itself."""
has_forked = False
"""Whether this process has forked a child, which may live, and has all descriptors that were open then."""
_switches: list[Callable[[], object]] = []
_trainers: list[weakref.WeakMethod[Callable[[], object]]] = []
_has_trained = False
"""Unlike a server that workers are forked from: these are to train."""


def off_in_children(switch: Callable[[], object]) -> None:
    """Have ``switch`` called in each child."""
    _switches.append(switch)


def trains(switch: Callable[[], object]) -> None:
    """This process trains from now on: ``switch``, a method of what it trains with, is called in each child."""
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
    with ExitStack() as stack:  # all of them, whichever raises
        for switch in [*trainers, *_switches]:
            stack.callback(switch)


def _note_child() -> None:
    global has_forked
    has_forked = True


os.register_at_fork(after_in_child=_switch_off, after_in_parent=_note_child)


def end_with_parent(parent: int = 0) -> None:
    """Have the kernel kill this process when its parent ends, which was ``parent``, where that is known."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:  # it has ended before that
        os._exit(1)
