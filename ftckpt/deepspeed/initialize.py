"""The door of ``deepspeed.initialize``: where the JSON switches ftckpt on, the engine it returns is followed.

``deepspeed.initialize`` is replaced as soon as both ftckpt.deepspeed and deepspeed are imported, whichever comes
first; importing ftckpt.deepspeed does not import deepspeed. What replaces it does nothing at all where ftckpt is
not switched on. ``deepspeed.init_distributed`` is replaced too, by what keeps the attempts of torchrun apart: at that
time nobody knows the JSON. So are functions of Megatron-DeepSpeed's train loop, where a script imports it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ftckpt.deepspeed import section
from ftckpt.errors import ConfigError
from ftckpt.frameworks import doors
from ftckpt.frameworks.imports import ImportWatch
from ftckpt.frameworks.launcher import follow_uncaught, leave_if_over

if TYPE_CHECKING:
    from ftckpt.deepspeed.session import EngineSession

door = doors.Door()
objects: dict[str, Any] = {}
"""The script's own, by name."""
session: EngineSession | None = None
"""Of the engine that is followed, or was last."""
_runner = False
_is_attached_later = False
_others: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Engines with an optimizer that are not followed, though nothing says that they are not to be saved, and the steps
that they had taken when another one was."""


def _replace_in_deepspeed(deepspeed: Any) -> None:
    for name, around in (("initialize", _initialize), ("init_distributed", _init_distributed)):
        if not door.patches.has(deepspeed, name):
            door.patches.wrap(deepspeed, name, around)


def _replace_in_megatron(training: Any) -> None:
    from ftckpt.deepspeed import megatron_deepspeed

    megatron_deepspeed.install(training)


_REPLACED: dict[str, Callable[[Any], None]] = {
    "deepspeed": _replace_in_deepspeed,
    "megatron.training": _replace_in_megatron,
}
"""By name of a module what puts ftckpt before its functions; a second call does nothing."""
_watch = ImportWatch(_REPLACED)


def install() -> None:
    """Wrap ``deepspeed.initialize`` and the train loop of Megatron-DeepSpeed, now or when they are imported, and when
    they are reloaded; a second call does nothing."""
    _watch.install()


def begin_iteration() -> None:
    """See ``ftckpt.deepspeed.begin_iteration``."""
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


def remove() -> None:
    """Put ``deepspeed.initialize`` back, take all hooks off the engine and forget registered objects.

    Snapshots stay where they are.
    """
    _watch.remove()
    try:
        leave()
    finally:  # a checkpointer that cannot be closed must not leave ``deepspeed.initialize`` replaced
        objects.clear()
        _others.clear()
        section.configure({})
        door.remove()


def leave_the_end_to_the_runner() -> None:
    """From here on ``engine.destroy`` removes no snapshots: the runner sees how the script ends."""
    global _runner
    _runner = True


@contextmanager
def attached_later() -> Iterator[None]:
    """No engine that is made inside is followed: the caller does so when all that belongs to it is there."""
    global _is_attached_later
    before, _is_attached_later = _is_attached_later, True
    try:
        yield
    finally:
        _is_attached_later = before


def require_one_engine(engine: Any) -> None:
    """Nothing is followed yet, and from here on nothing but ``engine`` trains: see ``check_others``.

    Raises:
        ConfigError: an engine is followed.
    """
    if door.checkpointer is not None:
        raise _second_engine()
    for other in list(_others):
        if other is engine:
            del _others[other]
        else:
            _others[other] = int(other.global_steps)


def check_others() -> None:
    """Raises ConfigError where an engine that is not followed has trained since another one is."""
    if any(int(other.global_steps) != steps for other, steps in _others.items()):
        raise _second_engine()


def _second_engine() -> ConfigError:
    return ConfigError(
        "ftckpt saves one engine, and another one trains in this process, which a restart would begin anew: where "
        'that is right, put "ftckpt": {"enabled": false} into the configuration of the other; where training with '
        "the first has ended, call ftckpt.deepspeed.close() before it; else switch ftckpt off"
    )


def has_runner() -> bool:
    """Whether a runner started the script."""
    return _runner


def _init_distributed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    import torch.distributed as dist

    from ftckpt.frameworks.rendezvous import isolate_attempts

    # A script that has started torch.distributed itself meets in a store that is in use: too late to divide it.
    if not dist.is_initialized():
        follow_uncaught()
        leave_if_over()  # where ftckpt was on in an earlier attempt it is so in this one
        isolate_attempts()
    return original(*args, **kwargs)


def _initialize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _is_attached_later:
        return original(*args, **kwargs)
    given = section.find(original, args, kwargs)
    config = section.merged(given)
    if not config.enabled:
        made = original(*args, **kwargs)
        if not section.leaves_out(given) and getattr(made[0], "basic_optimizer", None) is not None:
            if door.checkpointer is not None:
                raise _second_engine()
            _others[made[0]] = 0
        return made
    doors.prepare_storage(config)
    from ftckpt.deepspeed.session import follow

    return follow(original, args, kwargs, config)
