"""Megatron-DeepSpeed's train loop, ``megatron.training``: the engine that it makes, and what it counts for itself.

The loop never asks ``engine.global_steps``. It counts iterations, samples and tokens in its arguments, behind
``engine.step`` or ``train_batch``, and builds its data loaders from these counters when the engine is there and a
checkpoint on storage has been loaded. So the counters are an object of the snapshot, the engine is followed at the
end of ``setup_model_and_optimizer``, and the boundary of an iteration is where the next one begins, training ends, or
the loop saves: its evaluation is over by then, and has been counted. A loop of a script's own around these functions
may count elsewhere: its first boundary is refused.

| function of ``megatron.training`` | what is done |
|---|---|
| ``setup_model_and_optimizer`` | behind it: the newer of storage and memory counts |
| ``train_step`` | before it: the boundary of the iteration before; after a restart, RNG |
| ``train`` | behind it: the last boundary |
| ``training_log`` | before it: sums of losses that wait for the next log line go on |

Each is looked up through the module at run time, so that replacing the name is enough.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftckpt.config import Config
from ftckpt.deepspeed import active_engine, section
from ftckpt.deepspeed.active_engine import door
from ftckpt.errors import ConfigError, UnsupportedError
from ftckpt.frameworks import launcher
from ftckpt.frameworks.log_sums import LogSums

if TYPE_CHECKING:
    from ftckpt.deepspeed.session import EngineSession

_MARK = "_create_ds_config_dict"
"""A function that Megatron-LM does not have in its module of this name."""
_NEEDED = ("iteration", "consumed_train_samples")
"""Counters without which nobody knows where the loop stands in its data."""
_COUNTERS = (*_NEEDED, "consumed_valid_samples", "consumed_train_tokens")
"""Some releases and forks lack the latter ones, and whatever would use them."""
_DATA = "data"
_FUNCTIONS = ("setup_model_and_optimizer", "train_step", "train", "training_log")
_REFUSED = {"kd": "--kd", "mos": "--mos", "compression_training": "compression_training, in the JSON,"}
_loops: dict[Any, TrainLoop] = {}
"""Those of the modules before which ftckpt stands."""


class LoopCounters:
    """The train loop's counters, as an object of a snapshot.

    Args:
        arguments: Megatron's.
    """

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments
        self._lead = 0
        self.sums = LogSums()

    def begin(self, steps: int) -> None:
        """Training is about to begin, and the engine has counted ``steps``: not always as many, with --finetune."""
        self._lead = self._arguments.iteration - steps

    def agree(self, steps: int) -> bool:
        """Whether the loop has counted as many iterations since then as the engine, which has counted ``steps``."""
        return bool(self._arguments.iteration - steps == self._lead)

    def state_dict(self) -> dict[str, Any]:
        """The counters as they stand: the loop has counted the iteration."""
        counters = {name: getattr(self._arguments, name) for name in _COUNTERS if hasattr(self._arguments, name)}
        return {"counters": counters, "log_sums": self.sums.save()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the loop, and the data loaders that it is about to build, start there."""
        for name, value in state["counters"].items():
            setattr(self._arguments, name, value)
        self.sums.load(state["log_sums"])

    def load_reshaped(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Of all stages of another layout: all know the position, and the losses."""
        self.load_state_dict(states[0])


class TrainLoop:
    """One ``megatron.training``, and the engine that it trains once that is followed.

    Args:
        training: the module.
        lacks: those of the functions above that it does not have: ftckpt cannot be on then.
    """

    def __init__(self, training: Any, lacks: Sequence[str] = ()) -> None:
        self._training = training
        self._lacks = lacks
        self._engine: Any = None
        self._counters: LoopCounters | None = None
        self._session: EngineSession | None = None

    def set_up(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around what builds model and engine, and loads a checkpoint.

        Raises:
            UnsupportedError: a function or a counter is missing; a flag whose state is not known.
            ConfigError: ftckpt is switched on, and DeepSpeed is not.
        """
        arguments = self._training.get_args()
        has_engine = bool(getattr(arguments, "deepspeed", False))
        json = getattr(arguments, "deepspeed_config_dict", None) if has_engine else None
        config = section.merged(None if json is None else section.of(json))
        if not config.enabled:
            return original(*args, **kwargs)
        if not has_engine:
            raise ConfigError("ftckpt is switched on, and --deepspeed is not: without it there is nothing to follow")
        trains = not any(getattr(arguments, name, False) for name in ("inference", "skip_train"))
        if trains:
            self._check(arguments)
        with active_engine.attached_later():
            made = original(*args, **kwargs)
        if not trains:
            launcher.log_once("nothing is trained here (--inference, --skip-train), and ftckpt does nothing")
            return made
        _check_counters(arguments, _NEEDED)
        self._follow(made[0][0], arguments, config)
        return made

    def _check(self, arguments: Any) -> None:
        if self._lacks:
            raise UnsupportedError(
                f"megatron.training has no {', '.join(self._lacks)}, from where ftckpt is called: install a tested "
                "release, or switch ftckpt off"
            )
        # Not ``iteration``, which is set while model and engine are built.
        _check_counters(arguments, [name for name in _NEEDED if name != "iteration"])
        for name, written in _REFUSED.items():
            if getattr(arguments, name, False):
                raise UnsupportedError(f"Megatron-DeepSpeed's {written} is not supported by ftckpt; leave it out")

    def _follow(self, engine: Any, arguments: Any, config: Config) -> None:
        from ftckpt.deepspeed.data import EpochBegins
        from ftckpt.deepspeed.session import EngineSession
        from ftckpt.deepspeed.storage import is_named

        if _DATA in active_engine.objects:
            raise ConfigError(f"register: the name {_DATA!r} is taken, by the counters of Megatron-DeepSpeed")
        # Not with --finetune, which begins to count at 0, whatever is loaded.
        # Releases before February 2024 have no --load-tag, and load what ``latest`` names.
        tag = {"tag": getattr(arguments, "load_tag", None)}
        named = engine.global_steps > 0 and is_named(engine.load_checkpoint, (arguments.load,), tag)
        counters, objects = LoopCounters(arguments), active_engine.objects
        session = EngineSession(
            engine, {**objects, _DATA: counters}, config, EpochBegins(), named, check_counted=self.check_counted
        )
        self.follow(engine, counters, session)

    def follow(self, engine: Any, counters: LoopCounters, session: EngineSession) -> None:
        """``engine`` is about to be trained: it and ``counters`` are where they were."""
        self._engine, self._counters, self._session = engine, counters, session
        counters.begin(engine.global_steps)

    def check_counted(self) -> None:
        """At the boundary of an iteration.

        Raises:
            ConfigError: it is not counted where the counters are, and a restart would begin elsewhere.
        """
        if not self._has_counted():
            arguments = self._training.get_args()
            raise ConfigError(
                f"args.iteration is {arguments.iteration} and engine.global_steps {self._engine.global_steps}: the "
                "loop counts elsewhere, and a restart would begin in the wrong place; let it set args.iteration and "
                "args.consumed_train_samples behind each train_step, or call megatron.training.train"
            )

    def _has_counted(self) -> bool:
        return self._counters is not None and self._counters.agree(self._engine.global_steps)

    def train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around one iteration, which draws its batches itself."""
        if self._session is not None and door.checkpointer is not None:
            self._session.begin_batch()
        return original(*args, **kwargs)

    def train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around all iterations; the loop may exit between two of them."""
        try:
            result = original(*args, **kwargs)
        except SystemExit as ended:
            # All ranks take a boundary together. One that exits by itself, in the middle or for an error, must not
            # wait for the others.
            if ended.code in (None, 0) and self._has_counted():
                self._take_boundary()
            raise
        self._take_boundary()
        return result

    def training_log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around what adds this iteration's losses, its first argument, to the sums, its second."""
        if self._counters is not None and door.checkpointer is not None:
            bound = inspect.signature(original).bind(*args, **kwargs)
            losses, sums, *_ = *bound.args, *bound.kwargs.values()
            self._counters.sums.follow(losses, sums)
        return original(*args, **kwargs)

    def _take_boundary(self) -> None:
        if self._session is not None and door.checkpointer is not None:
            self._session.take_boundary()


def _check_counters(arguments: Any, names: Sequence[str]) -> None:
    if lacks := [f"args.{name}" for name in names if not hasattr(arguments, name)]:
        raise UnsupportedError(
            f"this Megatron-DeepSpeed has no {', '.join(lacks)}, by which ftckpt knows where it stands in its data: "
            "install a tested release, or switch ftckpt off"
        )


def install(training: Any) -> None:
    """Put ftckpt before the functions of this ``megatron.training``, if it is Megatron-DeepSpeed's.

    One that lacks a function is refused only where ftckpt is switched on.
    """
    if not hasattr(training, _MARK):
        return
    lacks = [name for name in _FUNCTIONS if not hasattr(training, name)]
    # A module that was reloaded has the session of before.
    if (loop := _loops.get(training)) is None:
        loop = _loops[training] = TrainLoop(training, lacks)
        door.patches.undo.append(lambda: _loops.pop(training))
    around = (loop.set_up, loop.train_step, loop.train, loop.training_log)
    for name, function in zip(_FUNCTIONS, around, strict=True):
        is_wanted = name == "setup_model_and_optimizer" or not lacks
        if is_wanted and name not in lacks and not door.patches.has(training, name):
            door.patches.wrap(training, name, function)
