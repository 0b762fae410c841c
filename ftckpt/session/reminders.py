"""Warnings in the log: a script never steps, ends without ``close()``, or trains without snapshots."""

from __future__ import annotations

import atexit
import logging
import sys
import time
from pathlib import Path

from ftckpt.config import Config
from ftckpt.events import Events
from ftckpt.forks import off_in_children
from ftckpt.memory.memory_limits import used_bytes
from ftckpt.model.text import human

log = logging.getLogger("ftckpt")

_MOST_FENCES = 50
"""Fences without a boundary after which ``step()`` seems to have been forgotten."""


def save_command(config: Config) -> str:
    """The command that saves a job's memory, for messages."""
    return f"ftckpt save {config.job} DIR{_arena(config)}, on every node at once"


def _arena(config: Config) -> str:
    return "" if config.arena == Config.arena else f" --arena {config.arena}"


class OpenJob:
    """A job that has not been closed: its snapshots stay in memory. Holds no reference to the model."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._node_dir = Path()
        self.iteration = -1
        """The iteration of the last boundary, or the restored one; -1: nothing to resume from."""
        self.has_stepped = False
        """Whether training has passed a boundary in this attempt."""
        self.num_fences = 0

    def begin(self, node_dir: Path, iteration: int) -> None:
        """Snapshots are stored in ``node_dir``; training resumes after ``iteration``."""
        self._node_dir, self.iteration = node_dir, iteration
        _open[self._config.job] = self

    def step(self, iteration: int) -> None:
        """Note a step boundary."""
        self.iteration, self.has_stepped = iteration, True

    def fence(self) -> None:
        """Count a fence; warns once if there have been many without a boundary."""
        self.num_fences += 1
        if self.num_fences == _MOST_FENCES and not self.has_stepped:
            log.warning(
                "ftckpt: the optimizer has stepped %d times and step() was never called: no snapshot is taken; call "
                "step(iteration) at the end of each iteration", _MOST_FENCES,
            )  # fmt: skip

    def close(self) -> None:
        """Forget the job: the script has closed it."""
        _open.pop(self._config.job, None)

    def __str__(self) -> str:
        step, nbytes = "" if self.has_stepped else ", and without a step", human(used_bytes(self._node_dir))
        return (
            f"the script ended without close(){step}, after iteration {self.iteration}: snapshots of job "
            f"{self._config.job} stay in memory, {nbytes} on this node, and the next start resumes from them; "
            f"call close() when training is done, or remove them with "
            f"'ftckpt clean {self._config.job}{_arena(self._config)}' on every node"
        )


_open: dict[str, OpenJob] = {}
"""Open jobs by name: a restart within this process replaces the entry."""
off_in_children(_open.clear)


@atexit.register
def _log_open() -> None:
    # After an uncaught exception (sys.last_value) memory stays on purpose: the next start needs it.
    if not hasattr(sys, "last_value"):
        for job in [job for job in _open.values() if job.iteration >= 0]:
            log.warning("ftckpt: %s", job)


_REPEAT_SECS = 60.0


class Reminder:
    """Repeats in the log, once a minute, why this rank takes no snapshots: a failure would lose ever more work."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._next_secs: float | None = None

    def update(self, reason: str) -> None:
        """Called at each boundary; ``reason`` is empty while snapshots are taken."""
        now_secs = time.monotonic()
        if not reason:
            self._next_secs = None
        elif self._next_secs is None:  # the cause itself has just been logged
            self._next_secs = now_secs + _REPEAT_SECS
        elif now_secs >= self._next_secs:
            self._next_secs = now_secs + _REPEAT_SECS
            self._events.warn(f"no snapshots are taken: {reason}")
