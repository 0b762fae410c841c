"""Checks a script's own iteration counters against those of its restored engine.

A restored engine continues its counters. A script that counts for itself begins at zero: it would train too
many iterations, or on the wrong data. Python does not show what a script counts in a local variable. Two things show:

* whether the script has asked, by reading ``engine.global_steps`` or ``engine.global_samples`` since the restore. One
  that neither asks nor has registered an object cannot know, and is refused if it never asked while the snapshots
  were taken either. One that asks only behind a step (to log, or to stop) may be right or wrong, and is told.
* fields of the ``args`` given to ``deepspeed.initialize`` which had the value of one of these counters whenever an
  iteration began (``iteration``, ``consumed_train_samples``). They must have it again, unless the script asks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from ftckpt.errors import ConfigError

_COUNTERS = ("global_steps", "global_samples")
_FRAMEWORKS = ("deepspeed", "ftckpt")
_ENOUGH = 2
"""Iterations: in the first one every field that is 0 has a counter's value, and nothing is behind a step yet."""
_FIX = (
    "take the position from engine.global_steps when deepspeed.initialize and load_checkpoint have returned, or give "
    "ftckpt the script's counters: see ftckpt/deepspeed/README.md"
)


class ScriptPosition:
    """Saved and loaded as one of the objects of the training state.

    Args:
        engine: which is asked.
        args: what ``deepspeed.initialize`` was given as such; None where it was given none.
        has_objects: the script has registered objects: they were given their state, and it may know by them.
    """

    def __init__(self, engine: Any, args: Any, has_objects: bool) -> None:
        self.log: Callable[[str], None] = lambda line: None
        """Takes one line for people."""
        self._engine = engine
        self._engine_class: Any = type(engine)
        self._fields = vars(args) if hasattr(args, "__dict__") else {}
        self._has_objects = has_objects
        self._restored: int | None = None
        self._num_begun = 0  # iterations, of this attempt and those before it
        self._last_begun = -1
        self._has_asked = False  # in any attempt
        self._knows = False
        self._followers: dict[str, list[str]] = {}
        self._watch()

    def state_dict(self) -> dict[str, Any]:
        """What was seen until this boundary."""
        return {"begun": self._num_begun, "asked": self._has_asked, "followers": dict(self._followers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was seen before."""
        self._num_begun, self._has_asked = state["begun"], state["asked"]
        self._followers = dict(state["followers"])

    def restored(self, iteration: int | None) -> None:
        """The engine was brought to ``iteration``, of which the script has not heard; None: of all that it has."""
        self._restored = iteration
        self._knows = False
        self._watch()

    def begin_iteration(self) -> None:
        """A training batch is about to be used, perhaps the first one of an iteration.

        Raises:
            ConfigError: the script does not know what was restored.
        """
        steps = int(vars(self._engine)["global_steps"])
        if steps == self._last_begun:
            return
        if self._restored is not None:
            self._check(self._restored)
        elif self._last_begun >= 0 and self._num_begun == 1 and not self._may_know():
            self.log(
                "the script has trained an iteration and never read engine.global_steps: a restart would begin at 0 "
                f"with it, and is refused; {_FIX}"
            )
        self._restored, self._last_begun = None, steps
        self._follow()

    def remove(self) -> None:
        """Look at the engine no longer."""
        self._engine.__class__ = self._engine_class

    def _may_know(self) -> bool:
        return self._knows or self._has_objects

    def _check(self, iteration: int) -> None:
        compared = [(name, counter) for counter in _COUNTERS for name in self._followers.get(counter, ())]
        # In the first iteration much is 0. A field that this attempt's arguments do not have is no counter of its.
        compared = [pair for pair in compared if self._num_begun >= _ENOUGH and pair[0] in self._fields]
        differing = [
            f"args.{name} is {self._fields[name]} and engine.{counter} {vars(self._engine)[counter]}"
            for name, counter in compared
            if self._fields[name] != vars(self._engine)[counter]
        ]
        # One that has asked may go by another variable, and set its field behind the step.
        if differing and not self._knows:
            raise ConfigError(
                f"iteration {iteration} was restored from memory, and the script would go on from another: before "
                f"the first batch {', '.join(differing)}; {_FIX}"
            )
        if compared or self._may_know():
            return
        if not self._has_asked and self._num_begun >= _ENOUGH:
            raise ConfigError(
                f"engine.global_steps is {iteration}, restored from memory, and the script has not read it: it would "
                f"train as if from the beginning; {_FIX}"
            )
        self.log(
            f"the script has not read engine.global_steps since iteration {iteration} was restored: if it counts "
            f"iterations for itself it trains too many; {_FIX}"
        )

    def _follow(self) -> None:
        """Keep the fields of the arguments that have a counter's value, as they had at each begin before."""
        for counter in _COUNTERS:
            value = vars(self._engine)[counter]
            names = self._followers.get(counter, ()) if self._num_begun else self._fields
            # Exactly ints: a flag that is False is no counter that is 0.
            followers = [n for n in names if type(self._fields.get(n)) is int and self._fields[n] == value]
            self._followers[counter] = sorted(followers)
        self._num_begun += 1

    def _watch(self) -> None:
        """Give the one engine a class of its own, which sees who reads a counter; until the script has done so."""
        base = self._engine_class
        members: dict[str, Any] = {name: self._watched(name) for name in _COUNTERS}
        members.update(__module__=base.__module__, __qualname__=base.__qualname__)
        self._engine.__class__ = type(base.__name__, (base,), members)

    def _watched(self, name: str) -> property:
        def read(engine: Any) -> Any:
            reader = sys._getframe(1).f_globals.get("__name__", "")
            if reader.partition(".")[0] not in _FRAMEWORKS:
                self._knows = self._has_asked = True
                self.remove()
            return vars(engine)[name]

        def write(engine: Any, value: Any) -> None:
            vars(engine)[name] = value

        return property(read, write)
