"""A training job without its compute, so that a few cores can show a pipeline's idle windows.

Megatron's own schedule, messages, hooks and optimizer run as in training. Two things are replaced: the compute of a
transformer layer, by a wait that takes no core, and the rate of copies, by a given one. Copies are real: all bytes
reach the arena. A wait cannot show how a copy slows concurrent compute, so that is modelled: a compute step takes
longer by ``interference`` times the time for which copies of its rank ran during it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from ftckpt.schedule.iteration import Iteration

# The error of a sleep on a kernel without real-time scheduling.
_PRECISION_SECS = 50e-6
_CREDIT_SECS = 2e-3
"""The most of a late copy's delay that is taken off the next one."""


def sleep_until(due: float) -> None:
    """Returns at ``time.perf_counter()`` ``due``, or at once if that is past."""
    while (left := due - time.perf_counter()) > 0:
        time.sleep(left)


class SlowCopies:
    """Limits background copies to ``bytes_per_sec`` and records when they ran; one per process."""

    def __init__(self) -> None:
        from ftckpt.capture import copier

        self.bytes_per_sec = math.inf
        self._lock = threading.Lock()
        self._spans: list[tuple[float, float]] = []
        self._running = math.inf
        self._due = -math.inf
        self._copy_chunk = copier.copy_chunk
        copier.copy_chunk = self._slow

    def clear(self) -> None:
        """Forgets the finished copies."""
        with self._lock:
            self._spans.clear()

    def secs_since(self, begin: float) -> float:
        """The time for which copies have run since ``begin``."""
        now = time.perf_counter()
        with self._lock:
            done = sum(max(0.0, end - max(start, begin)) for start, end in self._spans)
            return done + max(0.0, now - max(self._running, begin))

    def _slow(self, tensors: Sequence[torch.Tensor], copy: Any, *args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        with self._lock:
            self._running = begin
        self._copy_chunk(tensors, copy, *args, **kwargs)
        # A sleep ends late: the delay comes off the next copy, so that the rate holds over many of them.
        since = self._due if 0 <= begin - self._due < _CREDIT_SECS else begin
        self._due = since + copy.nbytes / self.bytes_per_sec
        sleep_until(self._due)
        with self._lock:
            self._spans.append((begin, time.perf_counter()))
            self._running = math.inf


class _Step:
    """A timer that makes the time between ``start`` and ``stop`` as long as given, or changes nothing without one."""

    def __init__(self, secs: float, steps: TimedSteps) -> None:
        self._secs, self._steps, self._begin = secs, steps, 0.0

    def start(self, *args: Any, **kwargs: Any) -> None:
        self._begin = time.perf_counter()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Waits for the rest of the time, which grows while copies run."""
        steps = self._steps
        # Again after each sleep: a copy that started meanwhile makes this step longer.
        while self._secs:
            due = self._begin + self._secs + steps.interference * steps.copies.secs_since(self._begin)
            if due - time.perf_counter() < _PRECISION_SECS:
                return
            sleep_until(due)


class TimedSteps:
    """A replacement for ``config.timers``: Megatron starts and stops one around each compute step.

    A step ends a fixed time after its start, however long the remaining real compute (embedding, loss, autograd)
    takes: stages are balanced.
    """

    def __init__(self, forward_secs: float, backward_secs: float, copies: SlowCopies) -> None:
        self.interference, self.copies = 0.0, copies
        self._other = _Step(0.0, self)
        self._steps = {
            "forward-compute": _Step(forward_secs, self),
            "backward-compute": _Step(backward_secs, self),
        }

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> _Step:
        """The timer of that name."""
        return self._steps.get(name, self._other)


def empty_layers(model: Sequence[torch.nn.Module]) -> None:
    """Makes transformer layers return their input; their gradients are zeros."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                module.forward = _identity  # type: ignore[method-assign]


def _identity(hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
    # A copy: the pipeline frees a tensor that a stage has sent.
    return hidden_states.clone(), None


class Listener:
    """Replaces the checkpointer when ftckpt is off: records the spans that the hooks report."""

    def __init__(self) -> None:
        self.iterations: list[Iteration] = []
        self._marks: list[tuple[str, float]] = []

    def expect(self, kinds: Sequence[str], lengths: Sequence[float]) -> None:
        """See Checkpointer."""

    def phase(self, kind: str) -> None:
        """See Checkpointer."""
        if self._marks and self._marks[-1][0] not in (kind, "optimizer"):
            self._marks.append((kind, time.perf_counter()))

    def fence(self) -> None:
        """See Checkpointer."""
        self.phase("fence")
        self.phase("optimizer")

    def step(self, iteration: int) -> None:
        """See Checkpointer."""
        now = time.perf_counter()
        if self._marks:
            edges = tuple(at - self._marks[0][1] for _, at in [*self._marks, ("", now)])
            self.iterations.append(Iteration(tuple(kind for kind, _ in self._marks), edges))
        self._marks = [("start", now)]
