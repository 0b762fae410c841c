"""One engine and its snapshots, from its initialization to the end of training."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import deepspeed
import torch.distributed as dist

from ftckpt.config import Config
from ftckpt.deepspeed import active_engine, optimizers, support
from ftckpt.deepspeed.active_engine import integration, steps_of
from ftckpt.deepspeed.data import DataPosition, EpochBegins
from ftckpt.deepspeed.geometry import coordinates, layout_sizes
from ftckpt.deepspeed.hooks import EngineHooks, check_engine, check_optimizer
from ftckpt.deepspeed.pipeline import check_pipeline, follow_pipeline
from ftckpt.deepspeed.script import ScriptPosition
from ftckpt.deepspeed.state import DeepSpeedState, counters, set_counters
from ftckpt.deepspeed.storage import AwaitedLoad, is_named, is_whole
from ftckpt.errors import ConfigError, LostError, UnsupportedError
from ftckpt.frameworks import entry, launcher, schedulers, versions
from ftckpt.frameworks.optimizers import load_groups, save_groups
from ftckpt.frameworks.rendezvous import check_isolated, isolate_attempts
from ftckpt.frameworks.torch_state import Stateful
from ftckpt.session.checkpointer import Checkpointer

_DATA, _SCRIPT = "ftckpt.data", "ftckpt.script"
_OWNS_DATA = "data"
"""The name of the script's object that restores the position of its iterators."""


class EngineSession:
    """Restores one engine and takes its snapshots.

    The constructor is collective. It restores everything except RNG and the position in the data: these follow right
    before the first batch is drawn, when it is also checked that the script knows about the restore.

    Args:
        engine: the result of ``deepspeed.initialize``.
        objects: the script's objects, by name.
        config: ``job`` and ``node`` may be unset.
        begins: epoch starts during the engine's construction.
        named: whether the engine was loaded from a checkpoint that the user has named.
        args: the argument ``args`` of ``deepspeed.initialize``.
        check_counted: given if the script counts an iteration after the engine's step; called at the boundary, which
            is deferred until ``take_boundary``, the next batch, a save or a load; raises if it is not counted.

    Raises:
        UnsupportedError: a release, a JSON field or state is not supported.
        ConfigError: no job name can be found, or another engine is followed.
        LaunchError: restarted attempts of torchrun could not rendezvous.
        LostError, MismatchError, MemoryBudgetError, ArenaError: see ``Checkpointer.restore``.
    """

    def __init__(
        self, engine: Any, objects: Mapping[str, Stateful], config: Config, begins: EpochBegins, named: bool = False,
        *, args: Any = None, check_counted: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        active_engine.require_one_engine(engine)
        check_isolated()  # before a collective, in which a restarted attempt would wait for dead processes
        self._engine = engine
        self._objects = dict(objects)
        self._begins = begins
        check_engine(engine)
        untested = versions.admit("DeepSpeed", deepspeed.__version__, config)
        self._start = entry.start(config, lambda: _place(engine), untested=untested)
        self._check_counted = check_counted
        # Taken before anything is restored: see ``_forget_restored``.
        self._fresh = {name: copy.deepcopy(value.state_dict()) for name, value in self._objects.items()}
        self._fresh_scheduler = copy.deepcopy(schedulers.save(engine.lr_scheduler))
        self._fresh_counters = counters(engine)
        self._data = self._new_position()
        self._script = ScriptPosition(engine, args, bool(self._objects))
        # A load replaces ``_data``.
        integration.hooks.undo += [lambda: self._data.remove(), self._script.remove]  # noqa: PLW0108
        try:
            checkpointer, self._from_memory = self._restore(named)
        except BaseException:  # an error leaves the engine without hooks
            integration.leave()
            raise
        self._hooks = EngineHooks(
            integration.hooks, engine, checkpointer, self.begin_batch, check_counted=check_counted
        )
        self._follow()
        active_engine.session = self
        # Last: an engine that could not be hooked must not count as followed.
        integration.checkpointer = checkpointer
        if not self._data.is_known:
            checkpointer.events.announce(
                "the script must restore its position in the data: from engine.global_steps, or by an object passed "
                "to ftckpt.deepspeed.register"
            )

    def take_boundary(self) -> None:
        """Takes the deferred boundary, if any: the script has counted the last iteration."""
        self._hooks.take_boundary()

    def begin_iteration(self) -> None:
        """Marks the start of an iteration; from the first call on, boundaries are deferred until the next one."""
        self._hooks.is_deferred = True
        self.begin_batch()

    def end(self) -> None:
        """Takes the last boundary at the end of a successful training, if it is deferred to the next iteration."""
        if self._hooks.is_deferred and self._check_counted is None:
            self.take_boundary()

    def _new_position(self) -> DataPosition:
        return DataPosition(self._engine, self._begins, owned_by_script=_OWNS_DATA in self._objects)

    def begin_batch(self) -> None:
        """Must be called before a training batch is used, or before it is drawn if drawing it needs restored RNG."""
        self.take_boundary()
        active_engine.check_others()
        self._state.late_changes.begin()
        self._script.begin_iteration()
        self._data.begin_training()

    def _restore(self, named: bool = False, in_training: bool = False) -> tuple[Checkpointer, int | None]:
        """Creates a checkpointer and restores; returns it and the iteration, if newer than the engine's state."""
        data, script, before = self._data, self._script, steps_of(self._engine)
        objects = {**self._objects, _DATA: data, _SCRIPT: script}
        state = self._start.build(lambda: DeepSpeedState(self._engine, objects))
        checkpointer = self._start.checkpointer(state)
        self._state = state
        data.set_rng, data.log = state.set_rng, checkpointer.events.announce
        data.draws = state.late_changes.begin
        script.log = checkpointer.events.announce
        restored = checkpointer.restore(newer_than=before, rollback=named, may_load=True, in_training=in_training)
        # If the script has loaded the same iteration from storage, it knows its position.
        script.restored(restored if restored != before else None)
        return checkpointer, restored

    def _begin_anew(self, named: bool = False, in_training: bool = False) -> None:
        """Replaces the checkpointer by a new one after the script has loaded another state."""
        checkpointer, self._from_memory = self._restore(named, in_training)
        integration.checkpointer = self._hooks.checkpointer = checkpointer

    def _follow(self) -> None:
        self._hooks.fence_optimizer()
        self._hooks.see_pauses()
        if self._engine.pipeline_parallelism:
            follow_pipeline(self._hooks, lambda given: self._data.draw_from(given))  # noqa: PLW0108
        else:
            self._hooks.follow_micro_batches()
        integration.hooks.wrap(self._engine, "load_checkpoint", self._load_checkpoint)
        integration.hooks.wrap(self._engine, "destroy", self._destroy)
        integration.hooks.wrap(self._engine, "save_checkpoint", self._save_checkpoint)
        integration.hooks.wrap(self._engine, "compile", _refuse_compile)

    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.take_boundary()  # before the save, which belongs to that iteration
        return original(*args, **kwargs)

    def _load_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Before training the newer of storage and memory is used, unless users roll back; later the load counts."""
        self.take_boundary()
        self._hooks.checkpointer.fence()  # loading writes to tensors that may be being copied
        self._hooks.checkpointer.pause()
        result = self._load(original, args, kwargs)
        # Addresses, counters and perhaps the lineage have changed, so a new checkpointer is needed in any case.
        loaded = steps_of(self._engine)
        # DeepSpeed returns None if there was no checkpoint.
        if result[0] is None:
            return result
        if self._hooks.has_trained:
            self._begin_at_storage(loaded)
            return result
        before, whole = self._from_memory, is_whole(original, args, kwargs)
        if before is not None and loaded > before and not whole:
            raise ConfigError(
                f"load_checkpoint: iteration {before} was restored from memory, and a partial load of iteration "
                f"{loaded} from storage would mix the two; load all of it, or remove the snapshots with "
                f"'ftckpt clean {self._start.config.job}'"
            )
        self._forget_restored()
        self._begin_anew(named=whole and loaded > 0 and is_named(original, args, kwargs))
        newest = self._from_memory
        if newest is None and before is not None and not whole:
            raise ConfigError(
                f"load_checkpoint: rolled back to iteration {loaded} of storage, but only a part of it was loaded "
                f"over iteration {before} of memory, which is invalidated now: restart, or load all of it"
            )
        which = f"using iteration {loaded} of storage" if newest is None else f"using iteration {newest} of memory"
        self._hooks.checkpointer.events.announce(f"load_checkpoint: {which}")
        return result

    def _load(self, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls ``load_checkpoint`` with the initial state of scheduler and counters: Megatron's scheduler adds
        loaded steps to its own, and a load of the module alone does not set counters."""
        scheduler, inner = self._engine.lr_scheduler, optimizers.inner(self._engine.optimizer)
        # A load during training is left unchanged.
        if self._from_memory is None or self._hooks.has_trained:
            return original(*args, **kwargs)
        restored = copy.deepcopy((schedulers.save(scheduler), save_groups(inner), counters(self._engine)))
        result = (None, None)
        try:
            schedulers.load(scheduler, self._fresh_scheduler)
            set_counters(self._engine, self._fresh_counters)
            result = original(*args, **kwargs)
        finally:
            # Nothing was loaded: reset to the state from memory, including learning rates.
            if result[0] is None:
                schedulers.load(scheduler, restored[0])
                load_groups(inner, restored[1])
                set_counters(self._engine, restored[2])
        return result

    def _begin_at_storage(self, loaded: int) -> None:
        """Starts a new lineage after a load during training: earlier snapshots must never be restored again."""
        left = self._hooks.checkpointer
        events = left.events
        events.announce(f"iteration {loaded} was loaded from storage during training: earlier snapshots are removed")
        # Even within an error handler: the user rolls back on all ranks.
        left.close(remove=True, done=False)
        self._begin_anew(in_training=True)

    def _forget_restored(self) -> None:
        """Resets state that a load does not overwrite to its value before the restore, in case storage is used."""
        self._data.remove()
        self._hooks.checkpointer.close(remove=False)
        for name, state in self._fresh.items():
            self._objects[name].load_state_dict(copy.deepcopy(state))
        self._data = self._new_position()

    def _destroy(self, original: Callable[..., Any]) -> Any:
        """Removes snapshots, unless the engine is destroyed after an error or by the garbage collector.

        Under the runner the script's exit decides instead.
        """
        # This session references the engine, so it is collected only when the interpreter exits.
        if not sys.is_finalizing() and sys.exc_info()[0] is None and not active_engine.is_ended_by_runner:
            active_engine.close()
        return original()


def _place(engine: Any) -> tuple[dict[str, int], dict[str, int | str | bool]]:
    support.check(engine)
    check_optimizer(engine)  # before state is restored and hooks are set: an error leaves the engine unchanged
    if engine.pipeline_parallelism:
        check_pipeline(engine)
    return coordinates(engine), layout_sizes(engine)


def _refuse_compile(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError("engine.compile() is not supported by ftckpt; do not call it")


def follow(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], config: Config) -> Any:
    """Calls ``deepspeed.initialize`` and follows the engine that it creates; returns its result.

    Raises:
        UnsupportedError, ConfigError and others: see EngineSession.
    """
    launcher.go_on()
    if not dist.is_initialized():
        isolate_attempts()
    begins = EpochBegins()
    with begins.recorded():
        made = original(*args, **kwargs)

    def begin(named: bool = False) -> None:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        EngineSession(made[0], active_engine.objects, config, begins, named, args=given.get("args"))

    try:
        begin()
    except LostError as lost:
        if config.on_lost != "storage" or lost.touched:  # a script may load a part, or evaluate before it loads
            raise
        AwaitedLoad(made[0], lost, begin)
    return made
