"""A training job without its compute, so that a few cores can show a pipeline's idle windows.

Megatron's own schedule, messages, hooks and optimizer run as they do in training. Two things are replaced: what a
transformer layer computes, by a wait that takes no core, and the rate of copies, by one that is given. Copies are
real: all bytes go to the arena. What a copy costs the compute beside it cannot be seen in a wait, so it is modelled:
a compute step takes ``interference`` times as much longer as copies of its rank ran during it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from ftckpt.schedule.iteration import Iteration

# What a sleep may be too long or too short by, on a kernel without real-time scheduling.
_PRECISION_SECS = 50e-6
_CREDIT_SECS = 2e-3
"""Most that a copy which the scheduler made late is taken off the next one."""


def sleep_until(due: float) -> None:
    """Return at ``time.perf_counter()`` ``due``, or at once where that is past."""
    while (left := due - time.perf_counter()) > 0:
        time.sleep(left)


class SlowCopies:
    """Holds background copies to ``bytes_per_sec`` and knows when they ran; one per process."""

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
        """Forget the copies that are done."""
        with self._lock:
            self._spans.clear()

    def secs_since(self, begin: float) -> float:
        """How long copies have run since ``begin``."""
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


class _Silent:
    def start(self, *args: Any, **kwargs: Any) -> None:
        """See megatron.core.timers."""

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """See megatron.core.timers."""


class _Step(_Silent):
    """Makes what lies between ``start`` and ``stop`` as long as it is said to be."""

    def __init__(self, secs: float, steps: TimedSteps) -> None:
        self._secs = secs
        self._steps = steps
        self._begin = 0.0

    def start(self, *args: Any, **kwargs: Any) -> None:
        """A compute step begins."""
        self._begin = time.perf_counter()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the rest of its time, which grows while copies run beside it."""
        steps = self._steps
        # Again after each sleep: a copy that began meanwhile makes this step longer.
        while True:
            due = self._begin + self._secs + steps.interference * steps.copies.secs_since(self._begin)
            if due - time.perf_counter() < _PRECISION_SECS:
                return
            sleep_until(due)


class TimedSteps:
    """Stands where ``config.timers`` does: Megatron starts and stops one around each compute step.

    A step ends a set time after its begin, whatever of it the remains of real compute (embedding, loss, autograd)
    took: stages are balanced.
    """

    def __init__(self, forward_secs: float, backward_secs: float, copies: SlowCopies) -> None:
        self.interference = 0.0
        self.copies = copies
        self._silent = _Silent()
        self._steps = {
            "forward-compute": _Step(forward_secs, self),
            "backward-compute": _Step(backward_secs, self),
        }

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The timer of that name."""
        return self._steps.get(name, self._silent)


def empty_layers(model: Sequence[torch.nn.Module]) -> None:
    """Have transformer layers hand on what they are given; their gradients are zeros."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                module.forward = _hand_on  # type: ignore[method-assign]


def _hand_on(hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
    # A tensor of its own: the pipeline frees what a stage has sent.
    return hidden_states.clone(), None


class Listener:
    """In the checkpointer's place when ftckpt is off: notes the spans that the hooks tell, and does nothing."""

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
