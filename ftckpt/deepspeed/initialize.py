"""The door of ``deepspeed.initialize``: where the JSON switches ftckpt on, the engine it returns is followed.

``deepspeed.initialize`` is replaced as soon as both ftckpt.deepspeed and deepspeed are imported, whichever comes
first; importing ftckpt.deepspeed does not import deepspeed. What replaces it does nothing at all where ftckpt is
not switched on. ``deepspeed.init_distributed`` is replaced too, by what keeps the attempts of torchrun apart: at that
time nobody knows the JSON. So are functions of Megatron-DeepSpeed's train loop, where a script imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftckpt.deepspeed import active_engine, section
from ftckpt.deepspeed.active_engine import door
from ftckpt.frameworks import entry
from ftckpt.frameworks.imports import ImportWatch
from ftckpt.frameworks.launcher import follow_uncaught, leave_if_over


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


def remove() -> None:
    """Put ``deepspeed.initialize`` back, take all hooks off the engine and forget registered objects.

    Snapshots stay where they are.
    """
    _watch.remove()
    try:
        active_engine.leave()
    finally:  # a checkpointer that cannot be closed must not leave ``deepspeed.initialize`` replaced
        active_engine.objects.clear()
        active_engine.others.clear()
        section.configure({})
        door.remove()


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
    if active_engine.is_attached_later:
        return original(*args, **kwargs)
    given = section.find(original, args, kwargs)
    config = section.merged(given)
    if not config.enabled:
        made = original(*args, **kwargs)
        if not section.leaves_out(given) and getattr(made[0], "basic_optimizer", None) is not None:
            if door.checkpointer is not None:
                raise active_engine.second_engine()
            active_engine.others[made[0]] = 0
        return made
    entry.prepare_storage(config)
    from ftckpt.deepspeed.session import follow

    return follow(original, args, kwargs, config)
