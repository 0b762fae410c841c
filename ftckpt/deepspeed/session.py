"""One engine and its snapshots: made when it is initialized, given up at the end of training."""

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
from ftckpt.deepspeed.active_engine import door
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
"""The name of the script's object that knows the position of the iterators which the script makes."""


class EngineSession:
    """Snapshots of one engine.

    Collective. Restores at once, but for RNG and the position in the data: these follow right before the first
    batch is drawn, where it is also seen whether the script knows of the restore.

    Args:
        engine: what ``deepspeed.initialize`` has made.
        objects: the script's own, by name.
        config: ``job`` and ``node`` need not be given.
        begins: of epochs that began while the engine was made.
        named: whether the user has named the checkpoint at which the engine stands.
        args: what ``deepspeed.initialize`` was given as such.
        check_counted: given where the script counts an iteration behind the engine's step, until it calls
            ``take_boundary``, or trains, saves or loads; raises where it has not counted it by then.

    Raises:
        UnsupportedError: a release, a JSON field or state that ftckpt does not know.
        ConfigError: no job name can be found, or another engine is followed.
        LaunchError: a restarted attempt of torchrun could not meet.
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
        door.hooks.undo += [self._leave_data, self._script.remove]
        try:
            checkpointer, self._from_memory = self._restore(named)
        except BaseException:  # a refusal leaves the engine as it was
            door.leave()
            raise
        self._hooks = EngineHooks(door.hooks, engine, checkpointer, self.begin_batch, check_counted=check_counted)
        self._follow()
        active_engine.session = self
        door.checkpointer = checkpointer  # last: an engine that cannot be followed must not count as one that is
        if not self._data.is_known:
            checkpointer.events.announce(
                "where in its data training stands is for the script to know: from engine.global_steps, or from an "
                "object that is given to ftckpt.deepspeed.register"
            )

    def take_boundary(self) -> None:
        """The script has counted what it trained last; does nothing where it was taken already."""
        self._hooks.take_boundary()

    def begin_iteration(self) -> None:
        """The script says where its iterations begin: from here on boundaries wait for it, and not for the engine."""
        self._hooks.is_deferred = True
        self.begin_batch()

    def end(self) -> None:
        """Training has ended well; the last boundary may wait for an iteration that does not come."""
        if self._hooks.is_deferred and self._check_counted is None:
            self.take_boundary()

    def _new_position(self) -> DataPosition:
        return DataPosition(self._engine, self._begins, owned_by_script=_OWNS_DATA in self._objects)

    # Hooks outlive a position: ``load_checkpoint`` makes a new one.
    def begin_batch(self) -> None:
        """A training batch is about to be used; or drawn, by a script that says so before: RNG is right then, too."""
        self.take_boundary()
        active_engine.check_others()
        self._state.late_changes.begin()
        self._script.begin_iteration()
        self._data.begin_training()

    def _draw_from(self, given: Any) -> Any:
        return self._data.draw_from(given)

    def _leave_data(self) -> None:
        self._data.remove()

    def _restore(self, named: bool = False, in_training: bool = False) -> tuple[Checkpointer, int | None]:
        """A new checkpointer, and the iteration that it has restored, if one is newer than the engine's state."""
        data, script, before = self._data, self._script, int(self._engine.global_steps)
        objects = {**self._objects, _DATA: data, _SCRIPT: script}
        state = self._start.build(lambda: DeepSpeedState(self._engine, objects))
        checkpointer = self._start.checkpointer(state)
        self._state = state
        data.set_rng, data.log = state.set_rng, checkpointer.events.announce
        data.draws = state.late_changes.begin
        script.log = checkpointer.events.announce
        restored = checkpointer.restore(newer_than=before, rollback=named, may_load=True, in_training=in_training)
        # Where the script has loaded the same iteration from storage it knows of it.
        script.restored(restored if restored != before else None)
        return checkpointer, restored

    def _begin_anew(self, named: bool = False, in_training: bool = False) -> None:
        """Go on with a checkpointer that knows nothing of the one before, the script has loaded another state."""
        checkpointer, self._from_memory = self._restore(named, in_training)
        door.checkpointer = self._hooks.checkpointer = checkpointer

    def _follow(self) -> None:
        self._hooks.fence_optimizer()
        self._hooks.see_pauses()
        if self._engine.pipeline_parallelism:
            follow_pipeline(self._hooks, self._draw_from)
        else:
            self._hooks.follow_micro_batches()
        door.hooks.wrap(self._engine, "load_checkpoint", self._load_checkpoint)
        door.hooks.wrap(self._engine, "destroy", self._destroy)
        door.hooks.wrap(self._engine, "save_checkpoint", self._save_checkpoint)
        door.hooks.wrap(self._engine, "compile", _refuse_compile)

    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.take_boundary()  # what is saved is of that iteration
        return original(*args, **kwargs)

    def _load_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Before training has begun the newer of storage and memory counts, unless the user goes back; afterwards a
        load is the user's wish."""
        self.take_boundary()
        self._hooks.checkpointer.fence()  # what is loaded must not be written below a copy
        self._hooks.checkpointer.pause()
        result = self._load(original, args, kwargs)
        # From here on addresses, counters and perhaps the lineage are others: whatever counts, snapshots begin anew.
        loaded = self._engine.global_steps
        # DeepSpeed's way to say that there was no checkpoint to load.
        if result[0] is None:
            return result
        if self._hooks.has_trained:
            self._begin_at_storage(loaded)
            return result
        before, whole = self._from_memory, is_whole(original, args, kwargs)
        if before is not None and loaded > before and not whole:
            raise ConfigError(
                f"load_checkpoint: iteration {before} was restored from memory, and loading a part of iteration "
                f"{loaded} from storage would mix the two; load all of it, or remove the snapshots with "
                f"'ftckpt clean {self._start.config.job}'"
            )
        self._forget_restored()
        self._begin_anew(named=whole and loaded > 0 and is_named(original, args, kwargs))
        newest = self._from_memory
        if newest is None and before is not None and not whole:
            raise ConfigError(
                f"load_checkpoint: storage went back to iteration {loaded}, a part of which was loaded over "
                f"iteration {before} of memory, which is given up now: start once more, or load all of it"
            )
        which = f"storage has {loaded}, which counts" if newest is None else f"memory has {newest}, which counts"
        self._hooks.checkpointer.events.announce(f"load_checkpoint: {which}")
        return result

    def _load(self, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Load into the scheduler and the counters that the engine was built with: Megatron's scheduler adds what it
        loads to what it has, and a load of the module alone leaves counters as they are."""
        scheduler, inner = self._engine.lr_scheduler, optimizers.inner(self._engine.optimizer)
        # A load in training finds the scheduler as it would without ftckpt.
        if self._from_memory is None or self._hooks.has_trained:
            return original(*args, **kwargs)
        restored = copy.deepcopy((schedulers.save(scheduler), save_groups(inner), counters(self._engine)))
        result = (None, None)
        try:
            schedulers.load(scheduler, self._fresh_scheduler)
            set_counters(self._engine, self._fresh_counters)
            result = original(*args, **kwargs)
        finally:
            # Nothing was loaded: what memory had stays, learning rates too.
            if result[0] is None:
                schedulers.load(scheduler, restored[0])
                load_groups(inner, restored[1])
                set_counters(self._engine, restored[2])
        return result

    def _begin_at_storage(self, loaded: int) -> None:
        """Training was taken back, or elsewhere: what memory and storage have must not come back, now or at the next
        restart."""
        left = self._hooks.checkpointer
        events = left.events
        events.announce(f"iteration {loaded} was loaded from storage while training: snapshots begin anew")
        # In an error handler too: the user goes back on all ranks.
        left.close(remove=True, done=False)
        self._begin_anew(in_training=True)

    def _forget_restored(self) -> None:
        """What a load does not overwrite is as before the snapshot was restored, in case that storage counts."""
        self._data.remove()
        self._hooks.checkpointer.close(remove=False)
        for name, state in self._fresh.items():
            self._objects[name].load_state_dict(copy.deepcopy(state))
        self._data = self._new_position()

    def _destroy(self, original: Callable[..., Any]) -> Any:
        """The script says that it is done, unless it does so because of an error, or the engine is collected.

        Under the runner the end of the script says that.
        """
        # This session refers to the engine, which is collected with the interpreter alone.
        if not sys.is_finalizing() and sys.exc_info()[0] is None and not active_engine.has_runner():
            active_engine.close()
        return original()


def _place(engine: Any) -> tuple[dict[str, int], dict[str, int | str | bool]]:
    support.check(engine)
    check_optimizer(engine)  # before state is restored and hooks are set: a refusal leaves the engine as it was
    if engine.pipeline_parallelism:
        check_pipeline(engine)
    return coordinates(engine), layout_sizes(engine)


def _refuse_compile(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError("engine.compile() is not supported by ftckpt; do not call it")


def follow(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], config: Config) -> Any:
    """Call ``deepspeed.initialize`` and follow the engine that it makes; returns what it returns.

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
