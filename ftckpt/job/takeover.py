"""Saves of a framework that are left to SMPs: what all ranks must agree on for one, and what was left last.

For each framework's own functions around its saving, which know when it is called and what it asks for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ftckpt.job.checkpointer import Checkpointer

_SMP_SECS = 5.0
"""For an SMP that is starting: a framework's own save takes as long."""


class Takeover:
    """The saves of one job; the same on all ranks.

    Args:
        device: on which the framework's ranks reach each other.
        has_come: whether what was left at that iteration, or something newer, is where a job would look for it. Asked
            on rank 0.
        one_at_a_time: whether a save is left only while nothing is on its way to storage, behind which no other
            snapshot than its own would do.
    """

    def __init__(
        self, device: str | torch.device, has_come: Callable[[int], bool], *, one_at_a_time: bool = False
    ) -> None:
        self._device = device
        self._has_come = has_come
        self._one_at_a_time = one_at_a_time
        self.left = -1
        """The iteration of the last save that was left to SMPs, since which the framework has saved none."""

    def leaves(self, checkpointer: Checkpointer, iteration: int, reason: str = "") -> bool:
        """Whether the save of ``iteration`` is left to SMPs. Collective.

        ``reason`` is why this rank cannot do so; where a rank has one the framework saves by itself, and is told.
        """
        reason = reason or self._objection(checkpointer, iteration)
        if self.refused(checkpointer, iteration, reason):
            return False
        self.left = iteration
        return True

    def refused(self, checkpointer: Checkpointer, iteration: int, reason: str) -> bool:
        """Whether any rank has a ``reason``; then the framework saves by itself. Collective."""
        # The framework's group, not ours, whose ranks may have lost each other: what fails here fails in any save.
        objects = torch.tensor([bool(reason)], dtype=torch.int, device=self._device)
        torch.distributed.all_reduce(objects, op=torch.distributed.ReduceOp.MAX)
        if not objects.item():
            return False
        reason = reason or "another rank objects"
        checkpointer.events.emit("not_taken_over", iteration=iteration, reason=reason)
        return True

    def saved(self, checkpointer: Checkpointer, iteration: int) -> None:
        """The framework has saved ``iteration`` by itself, to last."""
        checkpointer.saved, self.left = iteration, -1

    def lacks(self) -> bool:
        """Whether something was left that has not come. On rank 0."""
        return self.left >= 0 and not self._has_come(self.left)

    def _objection(self, checkpointer: Checkpointer, iteration: int) -> str:
        if checkpointer.off or checkpointer.begun != iteration:
            return "a rank takes no snapshot of it"
        if torch.distributed.get_rank() == 0 and self.lacks():
            return f"what was to be there of iteration {self.left} is not"
        if self._one_at_a_time and checkpointer.persisting is not None:
            return "another snapshot is on its way to storage"
        if not checkpointer.has_smp(_SMP_SECS):
            return "an SMP does not know yet what to do"
        return ""
