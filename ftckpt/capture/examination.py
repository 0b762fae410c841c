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

    Each snapshot is read back as a restart reads it, and compared with the live state, while training waits. At the
    first fence behind it stepped state must still be that of the snapshot; state that differs from the snapshot
    before must have been changed behind a fence. A rank that finds a misfit ends by itself, the launcher ends the
    others.

    Args:
        program: the framework and its version.
    """

    def __init__(self, program: str) -> None:
        self.program = program
        self._before: SnapshotId | None = None
        self._is_fresh = False  # nothing but forward and backward has run since that snapshot
        self._fences = 0  # since the snapshot before
        self._steps = 0  # fences since the last boundary
        self._looks = 0
        self.fits = False
        """Training has changed what the optimizer steps, behind a fence."""

    @property
    def over(self) -> bool:
        """Whether there is nothing more to learn."""
        return self.fits or self._looks >= _MOST_LOOKS

    def fenced(self, capture: Capture | None) -> None:
        """The fence was called.

        Raises:
            UnsupportedError: it comes too late, or boundaries do not come.
        """
        if capture is not None and self._is_fresh and (late := self._changed(capture)):
            raise self._refusal(f"{late} was changed before the hook on the optimizer's step was called")
        self._is_fresh = False
        self._fences += 1
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise self._refusal(
                f"{_MOST_STEPS} steps of the optimizer were seen and no end of an iteration: no snapshot is taken"
            )

    def at_boundary(self) -> None:
        """An iteration has ended."""
        self._steps, self._is_fresh = 0, False

    def look(self, capture: Capture, timeout_secs: float) -> None:
        """Examine the snapshot that has just begun; at the boundary, before training goes on.

        Raises:
            UnsupportedError: what does not fit; a snapshot that holds other bytes is void.
            CaptureError: the snapshot has failed.
        """
        capture.fence(timeout_secs)  # copies no longer wait for windows, which do not come while training waits
        capture.settle(timeout_secs)
        snapshot = capture.newest
        if snapshot is None or snapshot == self._before:
            return
        changed, fences = self._changed(capture), self._fences
        self._before, self._fences, self._is_fresh = snapshot, 0, True
        self._looks += 1
        if different := capture.differing(snapshot):
            capture.forget(snapshot.iteration)
            where = f"the snapshot of iteration {snapshot.iteration}"
            raise self._refusal(f"{different} in {where} is not what training has")
        if changed and not fences:
            raise self._refusal(f"{changed} was changed, and the hook on the optimizer's step was not called")
        self.fits = bool(changed)
        if self._looks == _MOST_LOOKS and not changed:
            log.warning(
                "ftckpt: nothing that the optimizer steps has changed in %d snapshots of %s: whether it is fenced "
                "is not known", _MOST_LOOKS, self.program,
            )  # fmt: skip

    def _changed(self, capture: Capture) -> str:
        """What the optimizer steps and differs from the snapshot before; empty also where that was dropped, undone,
        or lies in arenas that were laid out anew."""
        if self._before is None or not capture.holds(self._before):
            return ""
        return capture.differing(self._before, stepped=True)

    def _refusal(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.program} does not fit this ftckpt: {what}; install a tested release, or switch ftckpt off"
        )
