"""How old the newest whole and the newest protected snapshot really get, and how many snapshots were left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ftckpt.config import BUSY_SHARE, Config
from ftckpt.job.actions import Announcement
from ftckpt.job.agreement import Coverage, Verdict
from ftckpt.model.snapshot import SnapshotId

_FIRST_SECS, _SECS = 60.0, 600.0
"""What is looked at together: at first, and from then on."""

_ENOUGH_LEFT_OUT = 8
"""So many are told before that."""

_FACTOR = 2.0
"""What has changed by less is not told again."""

_OFTEN = 10
"""Iterations from one protected snapshot to the next that nobody needs to hear how to shorten."""


@dataclass
class _Window:
    """What was seen since a boundary; ages are the largest, in iterations."""

    iteration: int
    secs: float
    due: int = 0
    left_out: int = 0
    whole: int = 0
    protected: int = 0
    rests: int = 0
    whole_age: int = 0
    protected_age: int = 0

    def rates(self, iteration: int) -> tuple[float, ...]:
        """What is compared with what was told: iterations from one to the next, and how many of 16 were left out."""
        iterations = iteration - self.iteration
        return iterations / max(1, self.whole), iterations / max(1, self.protected), 1 + 16 * self.left_out / self.due


@dataclass
class Ages:
    """Of one rank; ``look`` at each boundary at which a snapshot is due, with the verdicts that were read there.

    It is told after the first minute, and every ten minutes where a rate has changed by a factor of two.
    """

    config: Config
    protects: bool
    busy: float = 0.0
    """The part of this node's cores that training wanted, as its SMP has seen it."""
    _window: _Window | None = None
    _told: tuple[float, ...] = ()
    _last: tuple[SnapshotId | None, SnapshotId | None] = field(default=(None, None))

    def leave_out(self) -> None:
        """A snapshot that is due is not taken, because every slot is kept."""
        if self._window is not None:
            self._window.left_out += 1

    def look(
        self, iteration: int, whole: SnapshotId | None, protected: SnapshotId | None, verdicts: Sequence[Verdict],
        now_secs: float,
    ) -> Iterator[Announcement]:  # fmt: skip
        window = self._window
        if window is None:
            window = self._window = _Window(iteration, now_secs)
        else:
            window.due += 1
            window.rests += any(verdict.cover == Coverage.DONE and verdict.target < 0 for verdict in verdicts)
            window.whole += whole != self._last[0]
            window.protected += protected != self._last[1]
            begin = window.iteration  # where there is none everything since would be lost
            window.whole_age = max(window.whole_age, iteration - (whole.iteration if whole else begin))
            window.protected_age = max(
                window.protected_age, iteration - (protected.iteration if protected else begin)
            )
        self._last = whole, protected
        secs = now_secs - window.secs
        if secs < (_SECS if self._told else _FIRST_SECS) and (self._told or window.left_out < _ENOUGH_LEFT_OUT):
            return
        rates = window.rates(iteration)
        if not self._told or any(max(a / b, b / a) >= _FACTOR for a, b in zip(rates, self._told, strict=True)):
            self._told = rates
            yield self._announcement(window, iteration, secs)
        self._window = _Window(iteration, now_secs)

    def _announcement(self, window: _Window, iteration: int, secs: float) -> Announcement:
        iterations = iteration - window.iteration
        fields = {
            "secs": secs, "iterations": iterations, "due": window.due, "left_out": window.left_out,
            "whole": window.whole, "whole_age": window.whole_age,
        }  # fmt: skip
        if self.protects:
            fields |= {"protected": window.protected, "protected_age": window.protected_age}
        each_secs = secs / max(1, iterations)

        def old(age: int) -> str:
            return f"at most {age} iterations ({age * each_secs:.3g} s) old"

        text = f"of {window.due} snapshots in {secs:.0f} s {window.whole} became whole: the newest was "
        text += old(window.whole_age)
        if self.protects:
            text += f"; {window.protected} became protected: the newest was {old(window.protected_age)}"
        return Announcement("ages", fields, "; ".join([text, *self._advice(window, iterations)]))

    def _advice(self, window: _Window, iterations: int) -> Iterator[str]:
        config = self.config
        if window.left_out:
            yield (
                f"{window.left_out} were left out because every slot was kept: more slots prevent that "
                "(--ftckpt-slots 0 takes as many as are needed where memory has room), or a larger "
                "--ftckpt-protect-interval"
            )
        if not self.protects or config.protect_interval != "auto" or iterations <= _OFTEN * max(1, window.protected):
            return
        if 2 * window.rests > window.due:
            yield (
                f"between two the SMP rests, to take no more than {config.smp_cores:g} of a node's idle cores, or "
                f"{config.smp_cores * BUSY_SHARE:g} of all: here {self.busy:.0%} are busy; cores that idle protect "
                "more often, or more of them (--ftckpt-smp-cores)"
            )
        else:
            yield (
                "to protect one takes as long as that: the network (--ftckpt-network-gbps), --ftckpt-smp-gbps or a "
                "node's cores limit it"
            )
