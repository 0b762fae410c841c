"""The engine of this process that is followed, and the script's objects: shared by all that follows it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ftckpt.errors import ConfigError
from ftckpt.frameworks import entry

door = entry.Integration()
objects: dict[str, Any] = {}
"""The script's own, by name."""
session: Any = None
"""The ``EngineSession`` of the engine that is followed, or was last."""
_runner = False
is_attached_later = False
"""Whether the caller of ``deepspeed.initialize`` follows the engine when all that belongs to it is there."""
others: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Engines with an optimizer that are not followed, though nothing says that they are not to be saved, and the steps
that they had taken when another one was."""


def begin_iteration() -> None:
    """An iteration begins: call it first in each, where a script changes state outside of engine calls.

    The snapshot of the iteration before is taken here instead of in ``engine.step``, so that it has what the script
    has changed since (averaged weights, counters). After a restart random numbers are set here instead of in
    ``engine(batch)``, so that noise that the script draws before that is the same. Does nothing where no engine is
    followed.
    """
    if session is not None and door.checkpointer is not None:
        session.begin_iteration()


def close() -> None:
    """Training has ended well: snapshots are not needed any more. Collective; a second call does nothing."""
    _end(remove=True)


def leave() -> None:
    """Follow the engine no longer; snapshots stay for a later start of the job."""
    _end(remove=False)


def _end(remove: bool) -> None:
    checkpointer = door.checkpointer
    if checkpointer is not None:
        if remove and session is not None:
            session.end()
        try:
            door.leave()
        finally:
            checkpointer.close(remove=remove)


def leave_the_end_to_the_runner() -> None:
    """From here on ``engine.destroy`` removes no snapshots: the runner sees how the script ends."""
    global _runner
    _runner = True


@contextmanager
def attached_later() -> Iterator[None]:
    """No engine that is made inside is followed: the caller does so when all that belongs to it is there."""
    global is_attached_later
    before, is_attached_later = is_attached_later, True
    try:
        yield
    finally:
        is_attached_later = before


def require_one_engine(engine: Any) -> None:
    """Nothing is followed yet, and from here on nothing but ``engine`` trains: see ``check_others``.

    Raises:
        ConfigError: an engine is followed.
    """
    if door.checkpointer is not None:
        raise second_engine()
    for other in list(others):
        if other is engine:
            del others[other]
        else:
            others[other] = int(other.global_steps)


def check_others() -> None:
    """Raises ConfigError where an engine that is not followed has trained since another one is."""
    if any(int(other.global_steps) != steps for other, steps in others.items()):
        raise second_engine()


def second_engine() -> ConfigError:
    """The error where two engines train."""
    return ConfigError(
        "ftckpt saves one engine, and another one trains in this process, which a restart would begin anew: where "
        'that is right, put "ftckpt": {"enabled": false} into the configuration of the other; where training with '
        "the first has ended, call ftckpt.deepspeed.close() before it; else switch ftckpt off"
    )


def has_runner() -> bool:
    """Whether a runner started the script."""
    return _runner
