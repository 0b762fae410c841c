"""Profile of the network's idle times, from the byte counters of interfaces by position in the iteration.

Phases do not show gradients reduced during the backward pass, nor prefetched parameters.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ftckpt.smp.link import interfaces_at

# Enough for a median, and few enough to be over before training changes.
ITERATIONS = 20
PARTS = 64
"""Number of bins of an iteration."""
_ALIKE = 0.2
"""Iterations that deviate more from the median length are ignored: evaluations, saves."""
_BUSY, _LEAST_RATE = 0.1, 1e6
"""Rate of a busy bin, of the highest; minimum of that in bytes per second: less means that counters miss training."""
_LEAST_IDLE = 0.125
_OVERHEAD = 1.06
"""Headers and retransmissions, on top of this process's own bytes."""
# Times PARTS, the first is the shortest iteration that can be profiled: 0.32 s.
_SAMPLE_SECS, _IDLE_SECS = 0.005, 0.5
_AGAIN_SECS = 600.0
"""Until the next profile: training changes its sequence length or schedule."""
_MOST_REFUSED = 2
"""Consecutive iterations without room after which the profile is outdated."""
_SYSFS = Path("/sys/class/net")
_INFINIBAND = "32"  # ARPHRD_INFINIBAND

Sample = tuple[float, float, float]
"""Position in the iteration, from 0 to 1; bytes of training; seconds of the sample."""


@dataclass(frozen=True)
class NetworkProfile:
    """The idle parts of an iteration, as start and end positions."""

    iteration_secs: float
    idle: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, iterations: Sequence[tuple[float, Sequence[Sample]]]) -> NetworkProfile | None:
        """The profile of iterations, given as seconds and samples; None if there is no usable one."""
        usual_secs = statistics.median(secs for secs, _ in iterations)
        alike = [samples for secs, samples in iterations if abs(secs - usual_secs) <= _ALIKE * usual_secs]
        if len(alike) < len(iterations) / 2 or usual_secs < PARTS * _SAMPLE_SECS:
            return None
        idle = idle_parts(sample for samples in alike for sample in samples)
        # If it is rarely idle, waiting for it would take too long.
        return cls(usual_secs, idle) if any(end - begin >= _LEAST_IDLE for begin, end in idle) else None

    def has_room(self, since_begin_secs: float, need_secs: float) -> bool | None:
        """Whether a transfer of ``need_secs`` can start now; None: the iteration is longer than the profiled ones."""
        position, need = since_begin_secs / self.iteration_secs, need_secs / self.iteration_secs
        if not 0 <= position < 1:
            return None
        # A transfer that fits nowhere may start in the first half of the longest part.
        need = min(need, max(end - begin for begin, end in self.idle) / 2)
        return any(begin <= position and position + need <= end for begin, end in self.idle)


def idle_parts(samples: Iterable[Sample]) -> tuple[tuple[float, float], ...]:
    """The parts whose mean rate is far below the highest; none if training's traffic is not visible."""
    nbytes, secs = [0.0] * PARTS, [0.0] * PARTS
    for position, moved, took_secs in samples:
        at = min(PARTS - 1, int(position * PARTS))
        nbytes[at] += moved
        secs[at] += took_secs
    # A bin without samples counts as busy.
    rates = [moved / took if took else math.inf for moved, took in zip(nbytes, secs, strict=True)]
    highest = max((rate for rate in rates if rate < math.inf), default=0.0)
    runs = [list(run) for _, run in groupby(range(PARTS), lambda at: rates[at] <= _BUSY * highest)]
    found = [(run[0] / PARTS, (run[-1] + 1) / PARTS) for run in runs if rates[run[0]] <= _BUSY * highest]
    return tuple(found) if highest >= _LEAST_RATE else ()


def counter_files(interface: Path) -> list[tuple[Path, int]]:
    """The byte counters of an interface with their units; RDMA bypasses the interface's own."""
    ports = sorted((interface / "device" / "infiniband").glob("*/ports/*/counters"))
    found = [(port / name, 4) for port in ports for name in ("port_rcv_data", "port_xmit_data")]
    if not found or (interface / "type").read_text().strip() != _INFINIBAND:  # there the ports count everything
        found += [(interface / "statistics" / name, 1) for name in ("rx_bytes", "tx_bytes")]
    return [(path, unit) for path, unit in found if path.exists()]


class TrafficMonitor:
    """Profiles the interfaces at ``addresses`` repeatedly, in a thread; ``stop`` ends it.

    Args:
        began_secs: start of the current iteration (``time.monotonic``); 0: none yet.
        own_bytes: bytes moved by this process so far.
    """

    profile: NetworkProfile | None = None
    _asked_secs = _refuses_since = 0.0

    def __init__(
        self, addresses: str, began_secs: Callable[[], float], own_bytes: Callable[[], int], sysfs: Path = _SYSFS
    ) -> None:
        self._began_secs, self._own_bytes = began_secs, own_bytes
        self._files: list[tuple[Path, int]] = []
        self._over = threading.Event()
        with suppress(OSError, ValueError, KeyError):  # no interface has them: no counters
            self._files = [file for name in interfaces_at(addresses) for file in counter_files(sysfs / name)]
        if self._files:
            threading.Thread(target=self._run, name="smp-traffic", daemon=True).start()

    def has_room(self, need_secs: float) -> bool | None:
        """Whether a transfer of ``need_secs`` can start now; None without a profile."""
        profile, now = self.profile, time.monotonic()  # read once: the thread may replace it
        if profile is None:
            return None
        room = profile.has_room(now - self._began_secs(), need_secs)
        if room is not False or now - self._asked_secs > profile.iteration_secs:
            self._refuses_since = now
        self._asked_secs = now
        if now - self._refuses_since > _MOST_REFUSED * profile.iteration_secs:
            # Iterations have become so short that the profiled idle parts do not occur any more.
            self.profile = None
            return None
        return room

    def stop(self) -> None:
        """Stop profiling."""
        self._over.set()

    def _run(self) -> None:
        try:
            while iterations := self._watch():
                self.profile = NetworkProfile.of(iterations)
                is_known, again_secs = self.profile is not None, time.monotonic() + _AGAIN_SECS
                while time.monotonic() < again_secs and is_known == (self.profile is not None):
                    if self._over.wait(_IDLE_SECS):
                        return
        except (OSError, ValueError):  # the interface disappeared
            self.profile = None

    def _watch(self) -> list[tuple[float, list[Sample]]]:
        """Sample ``ITERATIONS`` iterations; returns none if stopped before."""
        iterations: list[tuple[float, list[Sample]]] = []
        seen: list[Sample] = []  # of the current iteration, in seconds after its start
        began_secs = at_secs = last = 0.0
        pause_secs = 0.0
        while len(iterations) < ITERATIONS:
            if self._over.wait(pause_secs):
                return []
            total = sum(unit * int(path.read_bytes()) for path, unit in self._files)
            moved, now_secs, begins_secs = total - _OVERHEAD * self._own_bytes(), time.monotonic(), self._began_secs()
            if begins_secs != began_secs:
                secs = begins_secs - began_secs
                if seen:
                    iterations.append((secs, [(at / secs, nbytes, took) for at, nbytes, took in seen]))
                seen, began_secs = [], begins_secs
            elif began_secs > 0:
                seen.append(((now_secs + at_secs) / 2 - began_secs, moved - last, now_secs - at_secs))
            at_secs, last = now_secs, moved
            # Longer iterations are sampled less often: memory is bounded even if one never ends.
            pause_secs = max(_SAMPLE_SECS, (now_secs - began_secs) / (3 * PARTS)) if began_secs > 0 else _IDLE_SECS
        return iterations
