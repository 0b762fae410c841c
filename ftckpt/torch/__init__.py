"""ftckpt for plain torch: an unwrapped model, DDP, or FSDP2 (``fully_shard``).

::

    ftckpt.torch.init_process_group(config, "nccl")
    checkpointer = ftckpt.torch.attach(model, optimizer, scheduler, {"data": data}, config)
    start = checkpointer.restore() or 0
    ...
        checkpointer.step(iteration)
    checkpointer.close()

``config`` is ``ftckpt.Config(enabled=True, ...)``, or that of ``config, rest = Config.from_flags(sys.argv[1:])``;
``rest`` are the arguments that are not ftckpt's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from ftckpt.config import Config
from ftckpt.errors import ConfigError, UnsupportedError
from ftckpt.forks import off_in_children
from ftckpt.frameworks import entry
from ftckpt.frameworks.launcher import follow_uncaught, is_off, leave_if_over
from ftckpt.torch.disabled import DisabledCheckpointer

if TYPE_CHECKING:
    import torch

    from ftckpt.frameworks.torch_state import Stateful
    from ftckpt.session.checkpointer import Checkpointer

patches = entry.Patches()
"""Hooks on all attached models and optimizers. The script owns its checkpointers, so that models can be freed."""
off_in_children(patches.remove)
_DELEGATES = ("accelerate.", "lightning.", "lightning_fabric.")
"""Packages whose wrappers of optimizers have no state to save."""
log = logging.getLogger("ftckpt")


def init_process_group(config: Config, *args: Any, **options: Any) -> None:
    """Calls ``torch.distributed.init_process_group(*args, **options)``, isolated from earlier attempts.

    torchrun shares one store among all attempts of a job: see ``ftckpt.frameworks.rendezvous``. If ftckpt is off,
    this only calls torch.

    Raises:
        LaunchError: torchrun's store is shared among attempts and cannot be isolated; the message has the remedy.
    """
    import torch.distributed as dist

    if config.enabled:
        from ftckpt.frameworks.rendezvous import isolate_attempts

        follow_uncaught()
        leave_if_over(config.job)
        entry.prepare_storage(config)
        isolate_attempts()
    dist.init_process_group(*args, **options)


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Stateful | None = None,
    objects: Mapping[str, Stateful] | None = None,
    config: Config | None = None,
) -> Checkpointer:
    """Creates a checkpointer for this rank's training state, fenced before each step of the optimizer.

    Collective. Call it after all arguments are built and any checkpoint on storage is loaded. Then call
    ``restore`` once, directly before training; ``step`` at the end of each iteration, after optimizer, scheduler
    and counters have advanced and before the next batch is drawn; and ``close`` after the last. With ftckpt off,
    which is logged, the result has the same methods, does nothing, and is false in a condition.

    Only the optimizer's step may write parameters. Other code that writes them during training, such as averaged
    weights swapped in for an evaluation, must call ``fence`` first.

    Args:
        model: the model as trained: wrapped in DDP, sharded by ``fully_shard``, or neither; compiled if at all.
        optimizer: any optimizer over parameters of ``model``; one that ftckpt cannot save is refused by name.
        scheduler: the learning rate scheduler, if any.
        objects: other state to restore, by name: a data loader, counters, a GradScaler, a generator.
        config: None leaves ftckpt off.

    Raises:
        UnsupportedError: FSDP1, or state that ftckpt cannot map.
        ConfigError: no job name, no process group, a wrong argument, an object without state, or layouts are set.
        LaunchError: torchrun shares one store among attempts, and torch's own call created the process group.
    """
    if isinstance(objects, Config):
        raise ConfigError("attach: the configuration stands in the place of objects; name it: config=")
    if config is None:
        log.warning("ftckpt is off: attach() was given no config=, such as that of Config.from_flags()")
    if config is None or is_off(config):
        return cast("Checkpointer", DisabledCheckpointer())
    from ftckpt.torch import hooks

    model = getattr(model, "_forward_module", model)  # inside Fabric's wrapper
    _check(config, model, optimizer := _inner(optimizer), objects)
    return hooks.attach(patches, config, model, optimizer, scheduler, objects or {})


def _check(config: Config, model: Any, optimizer: Any, objects: Any) -> None:
    import torch.distributed as dist

    follow_uncaught()

    if config.layouts:
        raise ConfigError(
            "--ftckpt-layouts: a script in plain torch builds its own layout, and restarts in any; leave them out"
        )
    if not dist.is_initialized():
        raise ConfigError("torch.distributed: call ftckpt.torch.init_process_group first, with a single rank too")
    from ftckpt.frameworks.rendezvous import check_isolated

    check_isolated("call ftckpt.torch.init_process_group(config, ...) in place of torch's own")
    _check_kinds(model, optimizer, objects)


def _inner(optimizer: Any) -> Any:
    """The optimizer that steps, unwrapped from optimizers that only delegate to it (accelerate's, Fabric's).

    Raises:
        UnsupportedError: one of them has state of its own.
    """
    from torch.optim import Optimizer

    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        if _is_delegate(optimizer, inner):
            optimizer = inner
            continue
        if "_optimizer_step_pre_hooks" in vars(optimizer) and "state" in vars(optimizer):
            break  # a trial of its steps shows whether all its state is saved
        raise UnsupportedError(
            f"optimizer {type(optimizer).__name__} has state besides that of {type(inner).__name__}, which it "
            "wraps and which alone would be saved: leave it out"
        )
    return optimizer


def _is_delegate(wrapper: Any, inner: Any) -> bool:
    from ftckpt.torch.optimizer_attributes import attributes, is_plain

    if wrapper.state_dict().keys() != inner.state_dict().keys():
        return False
    if wrapper.state is not inner.state or wrapper.param_groups is not inner.param_groups:
        return False
    # A number may count the wrapper's steps. accelerate's has the scaler, which is an object of the script.
    others = [value for value in attributes(wrapper).values() if value is not inner]
    return type(wrapper).__module__.startswith(_DELEGATES) or all(map(is_plain, others))


def _check_kinds(model: Any, optimizer: Any, objects: Any) -> None:
    from torch import nn, optim

    wanted = {
        "model": (model, nn.Module, "a torch.nn.Module"),
        "optimizer": (optimizer, optim.Optimizer, "a torch.optim.Optimizer"),
        "objects": ({} if objects is None else objects, Mapping, "a mapping of names to objects"),
    }
    for name, (given, kind, text) in wanted.items():
        if not isinstance(given, kind):
            raise ConfigError(f"attach: {name} is of type {type(given).__name__}: give {text}")


def remove() -> None:
    """Removes all hooks from models and optimizers; snapshots stay in memory."""
    patches.remove()
