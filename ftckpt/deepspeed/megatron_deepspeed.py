"""Megatron-DeepSpeed's train loop, ``megatron.training``: the engine that it creates, and its own counters.

The loop never reads ``engine.global_steps``. It counts iterations, samples and tokens in its arguments, after
``engine.step`` or ``train_batch``, and builds its data loaders from these counters once the engine exists and a
checkpoint from storage is loaded. So the counters are an object of the snapshot, and the engine is followed from the
end of ``setup_model_and_optimizer``. The boundary of an iteration is the start of the next one, the end of training,
or a save of the loop, when evaluation has ended and is counted. A script's own loop around these functions may count
elsewhere: its first boundary raises an error.

| function of ``megatron.training`` | action |
|---|---|
| ``setup_model_and_optimizer`` | after it: restores memory if it is newer than storage |
| ``train_step`` | before it: the boundary of the previous iteration; after a restart, RNG |
| ``train`` | after it: the last boundary |
| ``training_log`` | before it: restores the loss sums for the next log line |

The loop looks up each function in the module at run time, so wrapping the module's attribute is enough.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftckpt.config import Config
from ftckpt.deepspeed import active_engine, section
from ftckpt.deepspeed.active_engine import integration, steps_of
from ftckpt.errors import ConfigError, UnsupportedError
from ftckpt.frameworks import launcher
from ftckpt.frameworks.log_sums import LogSums

if TYPE_CHECKING:
    from ftckpt.deepspeed.session import EngineSession

_MARK = "_create_ds_config_dict"
"""A function that distinguishes Megatron-DeepSpeed's module from Megatron-LM's of the same name."""
_NEEDED = ("iteration", "consumed_train_samples")
"""Counters that define the loop's position in its data."""
_COUNTERS = (*_NEEDED, "consumed_valid_samples", "consumed_train_tokens")
"""Some releases and forks lack the last two, and the code that would use them."""
_DATA = "data"
_FUNCTIONS = ("setup_model_and_optimizer", "train_step", "train", "training_log")
_REFUSED = {"kd": "--kd", "mos": "--mos", "compression_training": "compression_training, in the JSON,"}
_loops: dict[Any, TrainLoop] = {}
"""Wrapped modules and their train loops."""


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
        """Records at the start of training how far the loop is ahead of the engine's ``steps`` (--finetune)."""
        self._lead = self._arguments.iteration - steps

    def agree(self, steps: int) -> bool:
        """Whether the loop has counted as many iterations since then as the engine, which is at ``steps``."""
        return bool(self._arguments.iteration - steps == self._lead)

    def state_dict(self) -> dict[str, Any]:
        """The current counters; the loop has counted the iteration."""
        counters = {name: getattr(self._arguments, name) for name in _COUNTERS if hasattr(self._arguments, name)}
        return {"counters": counters, "log_sums": self.sums.save()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the counters from which the loop, and the data loaders that it builds next, start."""
        for name, value in state["counters"].items():
            setattr(self._arguments, name, value)
        self.sums.load(state["log_sums"])

    def load_reshaped(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores the first stage's state: all stages of a layout have the same position and losses."""
        self.load_state_dict(states[0])


class TrainLoop:
    """The wrappers of one ``megatron.training``, and the engine that it trains.

    Args:
        training: the module.
        lacks: needed functions that it does not have: ftckpt cannot be switched on then.
    """

    def __init__(self, training: Any, lacks: Sequence[str] = ()) -> None:
        self._training = training
        self._lacks = lacks
        self._engine: Any = None
        self._counters: LoopCounters | None = None
        self._session: EngineSession | None = None

    def set_up(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps ``setup_model_and_optimizer``, which builds model and engine and loads a checkpoint.

        Raises:
            UnsupportedError: a function or a counter is missing, or a flag is not supported.
            ConfigError: ftckpt is switched on, but DeepSpeed is not.
        """
        arguments = self._training.get_args()
        has_engine = bool(getattr(arguments, "deepspeed", False))
        json = getattr(arguments, "deepspeed_config_dict", None) if has_engine else None
        config = section.merged(None if json is None else section.of(json))
        if not config.enabled:
            return original(*args, **kwargs)
        if not has_engine:
            raise ConfigError("ftckpt is switched on but --deepspeed is not: set --deepspeed, or switch ftckpt off")
        trains = not any(getattr(arguments, name, False) for name in ("inference", "skip_train"))
        if trains:
            self._check(arguments)
        with active_engine.attached_later():
            made = original(*args, **kwargs)
        if not trains:
            launcher.log_once("inactive: nothing is trained (--inference, --skip-train)")
            return made
        _check_counters(arguments, _NEEDED)
        self._follow(made[0][0], arguments, config)
        return made

    def _check(self, arguments: Any) -> None:
        if self._lacks:
            raise UnsupportedError(
                f"megatron.training has no {', '.join(self._lacks)}, which ftckpt must wrap: install a tested "
                "release, or switch ftckpt off"
            )
        # Without ``iteration``, which is set while model and engine are built.
        _check_counters(arguments, [name for name in _NEEDED if name != "iteration"])
        for name, written in _REFUSED.items():
            if getattr(arguments, name, False):
                raise UnsupportedError(f"Megatron-DeepSpeed's {written} is not supported by ftckpt; remove it")

    def _follow(self, engine: Any, arguments: Any, config: Config) -> None:
        from ftckpt.deepspeed.data import EpochBegins
        from ftckpt.deepspeed.session import EngineSession
        from ftckpt.deepspeed.storage import is_named

        if _DATA in active_engine.objects:
            raise ConfigError(f"register: the name {_DATA!r} is reserved for the counters of Megatron-DeepSpeed")
        # Not with --finetune, which counts from 0 regardless of the checkpoint.
        # Releases before February 2024 have no --load-tag and load the checkpoint that ``latest`` names.
        tag = {"tag": getattr(arguments, "load_tag", None)}
        named = steps_of(engine) > 0 and is_named(engine.load_checkpoint, (arguments.load,), tag)
        counters, objects = LoopCounters(arguments), active_engine.objects
        session = EngineSession(
            engine, {**objects, _DATA: counters}, config, EpochBegins(), named, check_counted=self.check_counted
        )
        self.follow(engine, counters, session)

    def follow(self, engine: Any, counters: LoopCounters, session: EngineSession) -> None:
        """Follows ``engine`` at the start of training, after it and ``counters`` are restored."""
        self._engine, self._counters, self._session = engine, counters, session
        counters.begin(steps_of(engine))

    def check_counted(self) -> None:
        """Checks at a boundary that the loop has counted the iteration.

        Raises:
            ConfigError: the loop counts elsewhere, so a restart would resume at another iteration.
        """
        if not self._has_counted():
            arguments = self._training.get_args()
            raise ConfigError(
                f"args.iteration is {arguments.iteration} and engine.global_steps {steps_of(self._engine)}: the "
                "loop counts elsewhere, so a restart would resume at the wrong iteration; set args.iteration and "
                "args.consumed_train_samples after each train_step, or call megatron.training.train"
            )

    def _has_counted(self) -> bool:
        return self._counters is not None and self._counters.agree(steps_of(self._engine))

    def train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps ``train_step``, one iteration, which draws its own batches."""
        if self._session is not None and integration.checkpointer is not None:
            self._session.begin_batch()
        return original(*args, **kwargs)

    def train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps ``train``, all iterations; the loop may exit between two of them."""
        try:
            result = original(*args, **kwargs)
        except SystemExit as ended:
            # A boundary is collective: a rank that exits alone, within an iteration or after an error, must not take
            # it.
            if ended.code in (None, 0) and self._has_counted():
                self._take_boundary()
            raise
        self._take_boundary()
        return result

    def training_log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps ``training_log``, which adds this iteration's losses (first argument) to the sums (second)."""
        if self._counters is not None and integration.checkpointer is not None:
            bound = inspect.signature(original).bind(*args, **kwargs)
            losses, sums, *_ = *bound.args, *bound.kwargs.values()
            self._counters.sums.follow(losses, sums)
        return original(*args, **kwargs)

    def _take_boundary(self) -> None:
        if self._session is not None and integration.checkpointer is not None:
            self._session.take_boundary()


def _check_counters(arguments: Any, names: Sequence[str]) -> None:
    if lacks := [f"args.{name}" for name in names if not hasattr(arguments, name)]:
        raise UnsupportedError(
            f"this Megatron-DeepSpeed has no {', '.join(lacks)}, from which ftckpt reads the position in the data: "
            "install a tested release, or switch ftckpt off"
        )


def install(training: Any) -> None:
    """Wraps the functions of a ``megatron.training`` module, if it is Megatron-DeepSpeed's.

    A module that lacks a function raises an error only if ftckpt is switched on.
    """
    if not hasattr(training, _MARK):
        return
    lacks = [name for name in _FUNCTIONS if not hasattr(training, name)]
    # A reloaded module keeps its session.
    if (loop := _loops.get(training)) is None:
        loop = _loops[training] = TrainLoop(training, lacks)
        integration.patches.undo.append(lambda: _loops.pop(training))
    around = (loop.set_up, loop.train_step, loop.train, loop.training_log)
    for name, function in zip(_FUNCTIONS, around, strict=True):
        is_wanted = name == "setup_model_and_optimizer" or not lacks
        if is_wanted and name not in lacks and not integration.patches.has(training, name):
            integration.patches.wrap(training, name, function)
