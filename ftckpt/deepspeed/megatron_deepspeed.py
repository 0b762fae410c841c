"""Megatron-DeepSpeed's train loop, ``megatron.training``: the engine that it makes, and what it counts for itself.

The loop never asks ``engine.global_steps``. It counts iterations, samples and tokens in its arguments, behind
``engine.step`` or ``train_batch``, and builds its data loaders from these counters when the engine is there and a
checkpoint on storage has been loaded. So the counters are an object of the snapshot, the engine is followed at the
end of ``setup_model_and_optimizer``, and the boundary of an iteration is where the next one begins, training ends, or
the loop saves: its evaluation is over by then, and has been counted.

| function of ``megatron.training`` | what is done |
|---|---|
| ``setup_model_and_optimizer`` | behind it: the newer of storage and memory counts |
| ``train_step`` | before it: the boundary of the iteration before; after a restart, RNG |
| ``train`` | behind it: the last boundary |
| ``training_log`` | before it: sums of losses that wait for the next log line go on |

Each is looked up through the module at run time, so that replacing the name is enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftckpt.config import Config
from ftckpt.deepspeed import initialize, section
from ftckpt.deepspeed.initialize import door
from ftckpt.errors import ConfigError, UnsupportedError
from ftckpt.frameworks import launcher
from ftckpt.frameworks.log_sums import LogSums

if TYPE_CHECKING:
    from ftckpt.deepspeed.session import EngineSession

_MARK = "_create_ds_config_dict"
"""A function that Megatron-LM does not have in its module of this name."""
_COUNTERS = ("iteration", "consumed_train_samples", "consumed_valid_samples", "consumed_train_tokens")
_DATA = "data"
_REFUSED = {"kd": "--kd", "mos": "--mos", "compression_training": "compression_training, in the JSON,"}


class Counters:
    """Where the loop stands, as an object of a snapshot.

    Args:
        arguments: Megatron's.
    """

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments
        self.sums = LogSums()

    def state_dict(self) -> dict[str, Any]:
        """The counters as they stand: the loop has counted the iteration."""
        counters = {name: getattr(self._arguments, name) for name in _COUNTERS}
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
    """One ``megatron.training``, and the engine that it trains once that is followed."""

    def __init__(self, training: Any) -> None:
        self._training = training
        self._counters: Counters | None = None
        self._session: EngineSession | None = None

    def set_up(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around what builds model and engine, and loads a checkpoint.

        Raises:
            UnsupportedError: a flag of Megatron-DeepSpeed whose state is not known.
            ConfigError: ftckpt is switched on, and DeepSpeed is not.
        """
        arguments = self._training.get_args()
        has_engine = bool(arguments.deepspeed)
        config = section.merged(section.of(arguments.deepspeed_config_dict) if has_engine else None)
        if not config.enabled:
            return original(*args, **kwargs)
        if not has_engine:
            raise ConfigError("ftckpt is switched on, and --deepspeed is not: without it there is nothing to follow")
        for name, written in _REFUSED.items():
            if getattr(arguments, name, False):
                raise UnsupportedError(f"Megatron-DeepSpeed's {written} is not supported by ftckpt; leave it out")
        with initialize.attached_later():
            made = original(*args, **kwargs)
        if arguments.inference or arguments.skip_train:
            launcher.log_once("nothing is trained here (--inference, --skip-train), and ftckpt does nothing")
            return made
        self._follow(made[0][0], arguments, config)
        return made

    def _follow(self, engine: Any, arguments: Any, config: Config) -> None:
        from ftckpt.deepspeed.data import EpochBegins
        from ftckpt.deepspeed.session import EngineSession
        from ftckpt.deepspeed.storage import is_named

        if _DATA in initialize.objects:
            raise ConfigError(f"register: the name {_DATA!r} is taken, by the counters of Megatron-DeepSpeed")
        # Not with --finetune, which begins to count at 0, whatever is loaded.
        named = engine.global_steps > 0 and is_named(
            engine.load_checkpoint, (arguments.load,), {"tag": arguments.load_tag}
        )
        self._counters = Counters(arguments)
        self._session = EngineSession(
            engine, {**initialize.objects, _DATA: self._counters}, config, EpochBegins(), named, counts_behind=True
        )

    def train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around one iteration, which draws its batches itself."""
        if self._session is not None and door.checkpointer is not None:
            self._session.begin_batch()
        return original(*args, **kwargs)

    def train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around all iterations; the loop may exit between two of them."""
        try:
            result = original(*args, **kwargs)
        except SystemExit:
            self._take_boundary()
            raise
        self._take_boundary()
        return result

    def training_log(self, original: Callable[..., Any], losses: Any, sums: Any, *args: Any, **kwargs: Any) -> Any:
        """Around what adds this iteration's losses to the sums."""
        if self._counters is not None and door.checkpointer is not None:
            self._counters.sums.follow(losses, sums)
        return original(losses, sums, *args, **kwargs)

    def _take_boundary(self) -> None:
        if self._session is not None and door.checkpointer is not None:
            self._session.take_boundary()


def install(training: Any) -> None:
    """Put ftckpt before the functions of this ``megatron.training``, if it is Megatron-DeepSpeed's.

    Raises:
        UnsupportedError: it lacks one of them.
    """
    if not hasattr(training, _MARK) or door.patches.has(training, "train_step"):
        return
    loop = TrainLoop(training)
    wrap = functools.partial(door.patches.wrap, training)
    wrap("setup_model_and_optimizer", loop.set_up)
    wrap("train_step", loop.train_step)
    wrap("train", loop.train)
    wrap("training_log", loop.training_log)
