"""Process-wide state of the integration: the followed engine and the script's objects."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ftckpt.errors import ConfigError
from ftckpt.frameworks import entry

integration = entry.Integration()
objects: dict[str, Any] = {}
"""The script's registered objects, by name."""
session: Any = None
"""The ``EngineSession`` of the engine that is followed, or was last."""
is_ended_by_runner = False
"""Whether a runner started the script, and decides by its exit whether snapshots are removed."""
is_attached_later = False
"""Whether the caller of ``deepspeed.initialize`` attaches the engine itself, once everything it needs exists."""
others: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Engines with an optimizer that are neither followed nor excluded by their JSON, with their number of steps when
another engine was attached."""


def steps_of(engine: Any) -> int:
    """The engine's number of steps; does not count as a read by the script (see ``script``)."""
    return int(vars(engine)["global_steps"])


def begin_iteration() -> None:
    """Marks the start of an iteration; for scripts that change state outside of engine calls. Call it first in each.

    The snapshot of the previous iteration is taken here instead of in ``engine.step``, so it includes later changes
    of the script (averaged weights, counters). After a restart RNG is set here instead of in ``engine(batch)``, so
    that the script draws the same noise before it. Has no effect if no engine is followed.
    """
    if session is not None and integration.checkpointer is not None:
        session.begin_iteration()


def close() -> None:
    """Ends a successful training and removes its snapshots. Collective; a second call has no effect."""
    _end(remove=True)


def leave() -> None:
    """Stops following the engine; snapshots stay for a later start of the job."""
    _end(remove=False)


def _end(remove: bool) -> None:
    checkpointer = integration.checkpointer
    if checkpointer is not None:
        if remove and session is not None:
            session.end()
        try:
            integration.leave()
        finally:
            checkpointer.close(remove=remove)


@contextmanager
def attached_later() -> Iterator[None]:
    """A context in which new engines are not followed: the caller attaches them once everything they need exists."""
    global is_attached_later
    before, is_attached_later = is_attached_later, True
    try:
        yield
    finally:
        is_attached_later = before


def require_one_engine(engine: Any) -> None:
    """Checks that no engine is followed yet, and records the steps of engines other than ``engine``: see
    ``check_others``.

    Raises:
        ConfigError: an engine is followed.
    """
    if integration.checkpointer is not None:
        raise second_engine()
    for other in list(others):
        if other is engine:
            del others[other]
        else:
            others[other] = steps_of(other)


def check_others() -> None:
    """Raises ConfigError if an engine that is not followed has trained since another one was attached."""
    if any(steps_of(other) != steps for other, steps in others.items()):
        raise second_engine()


def second_engine() -> ConfigError:
    """The error if two engines train."""
    return ConfigError(
        "ftckpt saves one engine per process, but another one trains as well and would restart from scratch: if that "
        'is intended, put "ftckpt": {"enabled": false} into the configuration of the other; if training of the first '
        "has ended, call ftckpt.deepspeed.close() before it; otherwise switch ftckpt off"
    )
