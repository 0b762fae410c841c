"""Checks a script's own iteration counters against those of its restored engine.

A restored engine continues its counters. A script with its own counters starts at zero, so it would train too many
iterations, or on the wrong data. Local variables of a script are not visible; two things are:

* reads of ``engine.global_steps`` or ``engine.global_samples`` since the restore. A script that neither reads them
  nor has registered an object cannot know its position. It is an error if it has not read them in earlier attempts
  either. If it has, perhaps only after a step (to log, or to stop), it may be correct or not: a warning is logged.
* fields of the ``args`` passed to ``deepspeed.initialize`` that were equal to one of these counters whenever an
  iteration started (``iteration``, ``consumed_train_samples``). They must be equal again, unless the script reads the
  engine's counters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ftckpt.errors import ConfigError

_COUNTERS = ("global_steps", "global_samples")
_METHODS = (
    "forward", "backward", "step", "train_batch", "eval_batch", "save_checkpoint", "load_checkpoint",
    "save_16bit_model",
)  # fmt: skip
"""Methods in which the engine reads its counters itself."""
_ENOUGH = 2
"""Iterations before conclusions: in the first one every field that is 0 equals a counter, and no step has ended."""
_FIX = (
    "read the position from engine.global_steps after deepspeed.initialize and load_checkpoint, or register the "
    "script's counters: see ftckpt/deepspeed/README.md"
)


class ScriptPosition:
    """Observations of the script's counters, as an object of the training state.

    Args:
        engine: the engine whose counters the script may read.
        args: the argument ``args`` of ``deepspeed.initialize``, or None.
        has_objects: the script has registered objects, from whose restored state it may know its position.
    """

    def __init__(self, engine: Any, args: Any, has_objects: bool) -> None:
        self.log: Callable[[str], None] = lambda line: None
        """Logs one line."""
        self._engine = engine
        self._engine_class: Any = type(engine)
        self._fields = vars(args) if hasattr(args, "__dict__") else {}
        self._has_objects = has_objects
        self._restored: int | None = None
        self._num_begun = 0  # iterations of this and earlier attempts
        self._last_begun = -1
        self._has_asked = False  # in any attempt
        self._knows = False
        self._is_inside = False  # a method of the engine
        self._followers: dict[str, list[str]] = {}
        self._watch()

    def state_dict(self) -> dict[str, Any]:
        """The observations up to this boundary."""
        return {"begun": self._num_begun, "asked": self._has_asked, "followers": dict(self._followers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the observations."""
        self._num_begun, self._has_asked = state["begun"], state["asked"]
        self._followers = dict(state["followers"])

    def restored(self, iteration: int | None) -> None:
        """Records that the engine was restored to ``iteration``, which the script does not know; None: it knows."""
        self._restored = iteration
        self._knows = False
        self._watch()

    def begin_iteration(self) -> None:
        """Must be called before a training batch is used; the first call of an iteration checks the script.

        Raises:
            ConfigError: the script does not know the restored position.
        """
        steps = int(vars(self._engine)["global_steps"])
        if steps == self._last_begun:
            return
        if self._restored is not None:
            self._check(self._restored)
        elif self._last_begun >= 0 and self._num_begun == 1 and not self._may_know():
            self.log(
                "the script has trained an iteration without reading engine.global_steps: after a restart it would "
                f"start at 0, so the restart will fail; {_FIX}"
            )
        self._restored, self._last_begun = None, steps
        self._follow()

    def remove(self) -> None:
        """Stops observing the engine."""
        self._engine.__class__ = self._engine_class

    def _may_know(self) -> bool:
        return self._knows or self._has_objects

    def _check(self, iteration: int) -> None:
        compared = [(name, counter) for counter in _COUNTERS for name in self._followers.get(counter, ())]
        # In the first iteration many fields are 0. A field missing in this attempt's arguments is not a counter.
        compared = [pair for pair in compared if self._num_begun >= _ENOUGH and pair[0] in self._fields]
        differing = [
            f"args.{name} is {self._fields[name]} and engine.{counter} {vars(self._engine)[counter]}"
            for name, counter in compared
            if self._fields[name] != vars(self._engine)[counter]
        ]
        # A script that has read the counters may use another variable and set its field after the step.
        if differing and not self._knows:
            raise ConfigError(
                f"iteration {iteration} was restored from memory, but the script would resume at another one: before "
                f"the first batch {', '.join(differing)}; {_FIX}"
            )
        if compared or self._may_know():
            return
        if not self._has_asked and self._num_begun >= _ENOUGH:
            raise ConfigError(
                f"engine.global_steps is {iteration}, restored from memory, but the script has not read it and would "
                f"start at 0; {_FIX}"
            )
        self.log(
            f"the script has not read engine.global_steps since iteration {iteration} was restored: if it has its "
            f"own iteration counter, it will train too many iterations; {_FIX}"
        )

    def _follow(self) -> None:
        """Narrows the followers to fields of the arguments that equal a counter, as at every iteration start."""
        for counter in _COUNTERS:
            value = vars(self._engine)[counter]
            names = self._followers.get(counter, ()) if self._num_begun else self._fields
            # Exactly ints: a flag that is False must not count as a counter at 0.
            followers = [n for n in names if type(self._fields.get(n)) is int and self._fields[n] == value]
            self._followers[counter] = sorted(followers)
        self._num_begun += 1

    def _watch(self) -> None:
        """Gives the engine a subclass of its own that detects reads of a counter, until the script has read one.

        A read outside of the engine's methods is the script's: ftckpt reads the attributes' dict.
        """
        base = self._engine_class
        members: dict[str, Any] = {name: self._watched(name) for name in _COUNTERS}
        members |= {name: self._entered(getattr(base, name)) for name in _METHODS if hasattr(base, name)}
        members.update(__module__=base.__module__, __qualname__=base.__qualname__)
        self._engine.__class__ = type(base.__name__, (base,), members)

    def _watched(self, name: str) -> property:
        def read(engine: Any) -> Any:
            if not self._is_inside:
                self._knows = self._has_asked = True
                self.remove()
            return vars(engine)[name]

        def write(engine: Any, value: Any) -> None:
            vars(engine)[name] = value

        return property(read, write)

    def _entered(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            before, self._is_inside = self._is_inside, True
            try:
                return method(*args, **kwargs)
            finally:
                self._is_inside = before

        return call
