"""An SMP takes its share of the cores that idle, and a tenth of that where training wants all."""

from __future__ import annotations

import io
import os

import pytest

from ftckpt.config import MAX_REST_SECS
from ftckpt.smp import cpu_throttle as cores_module
from ftckpt.smp.cpu_throttle import CoreSecs, CoreShare, core_secs

CORES = 4.0


class Machine:
    """Cores; other processes want ``busy`` of them, also while the SMP works. It takes from both alike."""

    def __init__(self, busy: float, share: float = 0.1) -> None:
        self.now, self.used, self.idle, self.busy = 100.0, 7.0, 50.0, busy
        self.tells = True
        self.share = CoreShare(share * CORES, self.look, lambda: self.used, lambda: self.now)

    def look(self) -> CoreSecs | None:
        return CoreSecs(self.idle, CORES * self.now) if self.tells else None

    @property
    def paid(self) -> bool:
        return self.now >= self.share.due_secs

    def go(self, secs: float, own: float = 0.0) -> None:
        """Time in which the SMP takes ``own`` cores."""
        self.now += secs
        self.used += own * secs
        self.idle += max(0.0, (1 - self.busy) * (CORES - own)) * secs

    def work(self, secs: float, piece_secs: float = 0.01) -> None:
        """Pieces that take a full core while they run."""
        for _ in range(round(secs / piece_secs)):
            self.go(piece_secs, 1.0)
            self.share.note()

    def taken(self, secs: float, protect_secs: float) -> float:
        """Cores taken in ``secs`` of protections; each starts when the one before is paid for."""
        begun, used = self.now, self.used
        while self.now < begun + secs:
            assert self.paid
            self.work(protect_secs)
            self.go(max(0.0, self.share.due_secs - self.now))
        return (self.used - used) / (self.now - begun)


@pytest.mark.parametrize("secs", [0.05, 0.5, 2.0])
@pytest.mark.parametrize(
    ("busy", "part"), [(0.0, 1.0), (0.25, 0.75), (0.5, 0.5), (0.88, 0.12), (0.95, 0.1), (1.0, 0.1)]
)
def test_no_more_than_a_share_of_the_cores_that_idle_is_taken(busy: float, part: float, secs: float) -> None:
    """And a tenth of it where none idles, however much the SMP itself has taken before; no pause is longer than the
    longest."""
    machine = Machine(busy)
    machine.taken(60.0, secs)  # nothing was known at first
    least = secs / (secs + MAX_REST_SECS)
    assert machine.taken(600.0, secs) == pytest.approx(max(0.1 * CORES * part, least), rel=0.1)


def test_threads_are_for_cores_that_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    machine = Machine(0.0)
    assert [machine.share.threads(most) for most in (0, 1, 4, 99)] == [1, 1, 4, 16]
    machine.busy = 0.85
    machine.go(2.0)
    machine.share.note()
    assert [machine.share.threads(most) for most in (1, 4)] == [1, 2]
    machine.busy = 1.0
    machine.go(2.0)
    machine.share.note()
    assert machine.share.threads(4) == 1


@pytest.mark.parametrize("busy", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("protect_secs", [0.05, 5.0, 500.0])
def test_what_was_taken_is_paid_in_time_however_busy_the_cores_are(busy: float, protect_secs: float) -> None:
    """The guaranteed minimum: protection waits no longer than that after any piece of work."""
    machine = Machine(busy)
    for _ in range(20):
        machine.go(protect_secs, 1.0)
        machine.share.note()
        assert machine.share.due_secs - machine.now <= MAX_REST_SECS + 1e-6
        machine.go(MAX_REST_SECS)
        assert machine.paid


STAT = """\
cpu  900 0 300 1000 200 0 0 50 0 0
cpu0 100 10 40 700 100 5 5 40 0 0
cpu1 200 0 60 100 100 0 0 10 30 10
cpu12 600 0 200 200 0 0 0 0 0 0
intr 1977 {many}
""".format(many="0 " * 5000)


def test_cores_are_counted_as_the_kernel_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for a disk are idle time, a hypervisor's part is not, a guest's is in ``user`` already."""
    monkeypatch.setattr("builtins.open", lambda path: io.StringIO(STAT))
    monkeypatch.setattr(cores_module.os, "sysconf", lambda name: 100)
    assert core_secs({0, 1}) == CoreSecs(10.0, 14.7)
    assert core_secs({2, 12}) == CoreSecs(2.0, 10.0)
    assert core_secs({77}) == CoreSecs(0.0, 0.0), "whose share is as it was set"
