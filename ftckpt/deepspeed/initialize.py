"""The wrapper of ``deepspeed.initialize``, which follows the returned engine if the JSON switches ftckpt on.

``deepspeed.initialize`` is wrapped as soon as both ftckpt.deepspeed and deepspeed are imported, in any order;
importing ftckpt.deepspeed does not import deepspeed. The wrapper has no effect while ftckpt is off.
``deepspeed.init_distributed`` is wrapped as well, to isolate the attempts of torchrun: the JSON is not known then. So
are functions of Megatron-DeepSpeed's train loop, if a script imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftckpt.deepspeed import active_engine, section
from ftckpt.deepspeed.active_engine import integration
from ftckpt.frameworks import entry
from ftckpt.frameworks.imports import ImportWatch
from ftckpt.frameworks.launcher import follow_uncaught, leave_if_over


def _replace_in_deepspeed(deepspeed: Any) -> None:
    for name, around in (("initialize", _initialize), ("init_distributed", _init_distributed)):
        if not integration.patches.has(deepspeed, name):
            integration.patches.wrap(deepspeed, name, around)


def _replace_in_megatron(training: Any) -> None:
    from ftckpt.deepspeed import megatron_deepspeed

    megatron_deepspeed.install(training)


_REPLACED: dict[str, Callable[[Any], None]] = {
    "deepspeed": _replace_in_deepspeed,
    "megatron.training": _replace_in_megatron,
}
"""Module name → function that wraps functions of the module; idempotent."""
_watch = ImportWatch(_REPLACED)


def install() -> None:
    """Wraps ``deepspeed.initialize`` and the train loop of Megatron-DeepSpeed, now or when they are imported, and
    again when they are reloaded; idempotent."""
    _watch.install()


def remove() -> None:
    """Unwraps ``deepspeed.initialize``, removes all hooks of the engine, and clears registered objects.

    Snapshots stay in memory.
    """
    _watch.remove()
    try:
        active_engine.leave()
    finally:  # an error in closing the checkpointer must not leave ``deepspeed.initialize`` wrapped
        active_engine.objects.clear()
        active_engine.others.clear()
        section.configure({})
        integration.remove()


def _init_distributed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    import torch.distributed as dist

    from ftckpt.frameworks.rendezvous import isolate_attempts

    # If the script has started torch.distributed itself, the store is in use: too late to divide it.
    if not dist.is_initialized():
        follow_uncaught()
        leave_if_over()  # if ftckpt was on in an earlier attempt, it is on in this one
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
            if integration.checkpointer is not None:
                raise active_engine.second_engine()
            active_engine.others[made[0]] = 0
        return made
    entry.prepare_storage(config)
    from ftckpt.deepspeed.session import follow

    return follow(original, args, kwargs, config)
