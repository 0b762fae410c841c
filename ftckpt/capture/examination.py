"""Whether hooks and snapshots fit a release of a framework that ftckpt was not tested with."""

from __future__ import annotations

import logging

from ftckpt.capture.capture import Capture
from ftckpt.errors import UnsupportedError
from ftckpt.model.snapshot import SnapshotId

log = logging.getLogger("ftckpt")

_MOST_STEPS = 1000
"""Fences between two boundaries, beyond which there is no boundary. One iteration may have dozens: one for each
optimizer inside, and one more."""
_MOST_LOOKS = 50
"""Snapshots without a change of stepped state, such as iterations that a loss scaler skips at the start."""


class Examination:
    """Of one rank, in its first iterations, until training has changed what the optimizer steps.

    Each snapshot is read back as a restart reads it, and compared with the live state, while training waits. State
    that differs from the snapshot before must have been changed behind a fence.

    Args:
        program: the framework and its version.
    """

    def __init__(self, program: str) -> None:
        self.program = program
        self._before: SnapshotId | None = None
        self._fences = 0  # since the snapshot before
        self._steps = 0  # fences since the last boundary
        self._looks = 0
        self.over = False

    def fenced(self) -> None:
        """The fence was called.

        Raises:
            UnsupportedError: boundaries do not come.
        """
        self._fences += 1
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise self._refusal(
                f"{_MOST_STEPS} steps of the optimizer were seen and no end of an iteration: no snapshot is taken"
            )

    def bounded(self) -> None:
        """An iteration has ended."""
        self._steps = 0

    def look(self, capture: Capture, timeout_secs: float) -> None:
        """Examine the snapshot that has just begun; at the boundary, before training goes on.

        Raises:
            UnsupportedError: what does not fit.
            CaptureError: the snapshot has failed.
        """
        capture.fence(timeout_secs)  # copies no longer wait for windows, which do not come while training waits
        capture.settle(timeout_secs)
        snapshot = capture.newest
        if snapshot is None or snapshot == self._before:
            return
        if different := capture.differing(snapshot):
            raise self._refusal(
                f"{different} in the snapshot of iteration {snapshot.iteration} is not what training has"
            )
        changed = capture.differing(self._before, stepped=True) if self._before is not None else None
        if changed and not self._fences:
            raise self._refusal(f"{changed} was changed, and no hook was called before the optimizer's step")
        self._before, self._fences, self._looks = snapshot, 0, self._looks + 1
        self.over = bool(changed) or self._looks == _MOST_LOOKS
        if self._looks == _MOST_LOOKS and not changed:
            log.warning(
                "ftckpt: nothing that the optimizer steps has changed in %d snapshots of %s: whether it is fenced "
                "is not known", _MOST_LOOKS, self.program,
            )  # fmt: skip

    def _refusal(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.program} does not fit this ftckpt: {what}; install a tested release, or switch ftckpt off"
        )
