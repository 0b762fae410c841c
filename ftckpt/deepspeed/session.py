"""One engine and its snapshots: made when it is initialized, given up at the end of training."""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ftckpt.checkpointer import Checkpointer
from ftckpt.comm import Group, together
from ftckpt.config import Config
from ftckpt.deepspeed import initialize, support
from ftckpt.deepspeed.data import DataPosition, Epochs
from ftckpt.deepspeed.hooks import Hooks
from ftckpt.deepspeed.pipeline import check_pipeline, follow_pipeline
from ftckpt.deepspeed.state import DeepSpeedState
from ftckpt.deepspeed.topology import gather_topology
from ftckpt.elastic.identity import job_name, node_name
from ftckpt.elastic.rendezvous import check_isolated, isolate_attempts
from ftckpt.errors import ConfigError, UnsupportedError
from ftckpt.live.stateful import Stateful

_DATA = "ftckpt.data"
_OWNS_DATA = "data"
"""The name of the script's object that knows the position of the iterators which the script makes."""


class Session:
    """Snapshots of one engine.

    Collective. Restores at once, but for RNG and the position in the data: these follow right before the first
    batch is drawn.

    Args:
        engine: what ``deepspeed.initialize`` has made.
        objects: the script's own, by name.
        config: ``job`` and ``node`` need not be given.
        begun: epochs that began while the engine was made.

    Raises:
        UnsupportedError: a version, a JSON field or state that ftckpt does not know.
        ConfigError: no job name can be found, or another engine is followed.
        LaunchError: a restarted attempt of torchrun could not meet.
        LostError, MismatchError, MemoryBudgetError, ArenaError: see ``Checkpointer.restore``.
    """

    def __init__(self, engine: Any, objects: Mapping[str, Stateful], config: Config, begun: Epochs) -> None:
        if initialize.session() is not None:
            raise ConfigError(
                'ftckpt follows one engine, and has one: leave the section "ftckpt" out of the configuration of all '
                "others, or call ftckpt.deepspeed.close() when training with the first has ended"
            )
        check_isolated()
        self.engine = engine
        self.config = replace(config, job=job_name(config.job, os.environ), node=node_name(config.node, os.environ))
        self._objects = dict(objects)
        self._begun = begun
        self._group = Group(self.config.start_timeout_secs)
        together(self._group, lambda: _check(engine))
        self._topology = gather_topology(self._group, self.config.node, engine)
        self._fresh = {name: copy.deepcopy(value.state_dict()) for name, value in self._objects.items()}
        self._data = self._new_position()
        self.checkpointer = self._restored()
        self._hooks = Hooks(engine, self.checkpointer, self._begin_training)
        self._follow()
        initialize.remember(self)
        if not self._data.is_known:
            self.checkpointer.events.tell(
                "where in its data training stands is for the script to know: from engine.global_steps, or from an "
                "object that is given to ftckpt.deepspeed.register"
            )

    def close(self) -> None:
        """Training has ended well: snapshots are not needed any more. Collective; a second call does nothing."""
        self._unhook()
        self.checkpointer.close()

    def leave(self) -> None:
        """Follow the engine no longer; snapshots stay for a later start of the job."""
        self._unhook()
        self.checkpointer.close(remove=False)

    def _unhook(self) -> None:
        self._hooks.remove()
        self._data.remove()
        if initialize.session() is self:
            initialize.forget()

    def _new_position(self) -> DataPosition:
        return DataPosition(self.engine, self._begun, owned_by_script=_OWNS_DATA in self._objects)

    def _restored(self) -> Checkpointer:
        """A new checkpointer that has restored what is newer than the engine's state."""
        data = self._data
        state = together(self._group, lambda: DeepSpeedState(self.engine, {**self._objects, _DATA: data}))
        checkpointer = Checkpointer(self.config, state, self._topology, group=self._group)
        data.set_rng, data.tell = state.set_rng, checkpointer.events.tell
        self._from_memory = checkpointer.restore(newer_than=self.engine.global_steps)
        return checkpointer

    def _follow(self) -> None:
        if self.engine.pipeline_parallelism:
            follow_pipeline(self._hooks, self._draw_from)
        else:
            self._hooks.follow_micro_batches()
        self._hooks.fence_optimizer()
        self._hooks.wrap(self.engine, "load_checkpoint", self._load_checkpoint)
        self._hooks.wrap(self.engine, "destroy", self._destroy)
        self._hooks.wrap(self.engine, "compile", _refuse_compile)

    def _begin_training(self) -> None:
        self._data.begin_training()

    def _draw_from(self, given: Any) -> Any:
        return self._data.draw_from(given)

    def _load_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Before training has begun the newer of storage and memory counts; afterwards a load is the user's wish."""
        self.checkpointer.fence()  # what is loaded must not be written below a copy
        result = original(*args, **kwargs)
        loaded = self.engine.global_steps
        if result[0] is None:
            return result
        if self._hooks.trained:
            self._begin_at_storage(loaded)
            return result
        before = self._from_memory
        if before is not None and loaded > before and not _is_whole(original, args, kwargs):
            raise ConfigError(
                f"load_checkpoint: iteration {before} was restored from memory, and loading a part of iteration "
                f"{loaded} from storage would mix the two; load all of it, or remove the snapshots with "
                f"'ftckpt clean {self.config.job}'"
            )
        self._forget_restored()
        self.checkpointer = self._hooks.checkpointer = self._restored()
        self._hooks.begin_again()
        found = self._from_memory
        which = f"storage has {loaded}, which counts" if found is None else f"memory has {found}, which counts"
        self.checkpointer.events.tell(f"load_checkpoint: of storage and memory the newer one is taken: {which}")
        return result

    def _begin_at_storage(self, loaded: int) -> None:
        """Training was taken back, or elsewhere: what is in memory must not come back at the next restart."""
        events = self.checkpointer.events
        events.emit("loaded_in_training", iteration=loaded)
        events.tell(f"iteration {loaded} was loaded from storage while training: snapshots begin anew")
        self.checkpointer.close(remove=True)  # in an error handler too: the user goes back on all ranks
        self.checkpointer = self._hooks.checkpointer = self._restored()

    def _forget_restored(self) -> None:
        """What a load does not overwrite is as before the snapshot was restored, in case that storage counts."""
        self._data.remove()
        self.checkpointer.close(remove=False)
        for name, state in self._fresh.items():
            self._objects[name].load_state_dict(copy.deepcopy(state))
        self._data = self._new_position()

    def _destroy(self, original: Callable[..., Any]) -> Any:
        """The script says that it is done, unless it does so because of an error, or the engine is collected.

        Under the runner the end of the script says that.
        """
        collected = sys._getframe(2).f_code is getattr(type(self.engine).__del__, "__code__", None)
        if not collected and sys.exc_info()[0] is None and not initialize.has_runner():
            self.close()
        return original()


def _check(engine: Any) -> None:
    support.check(engine)
    if engine.pipeline_parallelism:
        check_pipeline(engine)


def _refuse_compile(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError("engine.compile() is not supported by ftckpt; do not call it")


def _is_whole(load: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``load_checkpoint`` replaces weights, optimizer and schedule."""
    call = inspect.signature(load).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    return bool(
        given["load_optimizer_states"] and given["load_lr_scheduler_states"] and not given["load_module_only"]
    )


def follow(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], config: Config) -> Any:
    """Call ``deepspeed.initialize`` and follow the engine that it makes; returns what it returns.

    Raises:
        UnsupportedError, ConfigError and others: see Session.
    """
    support.check_version()
    if not dist.is_initialized():
        isolate_attempts()
    begun = Epochs()
    with begun.watched():
        made = original(*args, **kwargs)
    Session(made[0], initialize.registered(), config, begun)
    return made
