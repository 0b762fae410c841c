"""When training leaves the network idle: byte counters of the node's interfaces, folded by position in the iteration.

Gradients that are reduced beside the backward, and parameters that are gathered beside the forward, are in no phase
that a rank tells. So for some iterations the bytes of training are counted; what this process moves is subtracted.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ITERATIONS = 20
"""That are looked at; of these at least half must take about as long as the others."""
_ALIKE = 0.2
"""An iteration that differs by more from the median says nothing: an evaluation, a checkpoint of the framework."""
_BINS, _LEAST_BINS = 64, 8
_BUSY = 0.1
"""Of the highest rate: below that it is not gradients."""
_LEAST_RATE = 1e6
"""Bytes per second: where training never moves more, it uses another network, or one whose counters are not seen."""
_LEAST_IDLE = 0.05
_OVERHEAD = 1.06
"""Headers and repetitions of what this process moves."""
_MIN_SAMPLE_SECS, _MAX_SAMPLE_SECS = 0.005, 0.05
_AGAIN_SECS = 600.0
"""Training changes: the length of its sequences, its schedule."""
_SYSFS = Path("/sys/class/net")
_INFINIBAND = "32"  # ARPHRD_INFINIBAND

Sample = tuple[float, float, float]
"""Position in the iteration, from 0 to 1; bytes of training; seconds in which they passed."""
Span = tuple[float, float]


@dataclass(frozen=True)
class Profile:
    """Parts of an iteration in which training leaves the network idle, from 0 to 1."""

    iteration_secs: float
    idle: tuple[Span, ...]

    def has_room(self, since_begin_secs: float, need_secs: float) -> bool | None:
        """Whether a transfer of ``need_secs`` can begin now; None: the iteration takes longer than those before."""
        position, need = since_begin_secs / self.iteration_secs, need_secs / self.iteration_secs
        if not 0 <= position < 1:
            return None
        # One that fits nowhere begins in the first half of the longest span.
        need = min(need, max(end - begin for begin, end in self.idle) / 2)
        return any(begin <= position and position + need <= end for begin, end in self.idle)


def fold(samples: Iterable[Sample], bins: int) -> list[float]:
    """The mean rate of training in each part of the iteration, bytes per second."""
    nbytes, secs = [0.0] * bins, [0.0] * bins
    for position, moved, took_secs in samples:
        at = min(bins - 1, int(position * bins))
        nbytes[at] += moved
        secs[at] += took_secs
    # A part of which nothing is known counts as one in use.
    return [max(0.0, moved) / took if took else float("inf") for moved, took in zip(nbytes, secs, strict=True)]


def idle_spans(rates: Sequence[float]) -> tuple[Span, ...]:
    """Parts of the iteration in which the rate is low; none where that cannot be said."""
    highest = max((rate for rate in rates if rate != float("inf")), default=0.0)
    if highest < _LEAST_RATE:
        return ()
    spans: list[Span] = []
    for at, rate in enumerate(rates):
        if rate <= _BUSY * highest:
            begin = spans.pop()[0] if spans and spans[-1][1] == at / len(rates) else at / len(rates)
            spans.append((begin, (at + 1) / len(rates)))
    return tuple(spans) if sum(end - begin for begin, end in spans) >= _LEAST_IDLE else ()


def profile_of(iterations: Sequence[tuple[float, Sequence[Sample]]]) -> Profile | None:
    """What iterations, their seconds and samples, have in common; None where nothing can be learnt."""
    usual_secs = statistics.median(secs for secs, _ in iterations)
    alike = [samples for secs, samples in iterations if abs(secs - usual_secs) <= _ALIKE * usual_secs]
    bins = min(_BINS, int(usual_secs / (2 * _MIN_SAMPLE_SECS)))
    if len(alike) < len(iterations) / 2 or bins < _LEAST_BINS:
        return None
    spans = idle_spans(fold((sample for samples in alike for sample in samples), bins))
    return Profile(usual_secs, spans) if spans else None


def counter_files(interface: Path) -> list[tuple[Path, int]]:
    """What counts the bytes of an interface, each with its unit; over RDMA they pass the interface unseen."""
    ports = sorted((interface / "device" / "infiniband").glob("*/ports/*/counters"))
    found = [(port / name, 4) for port in ports for name in ("port_rcv_data", "port_xmit_data")]
    kind = interface / "type"
    if not (found and kind.exists() and kind.read_text().strip() == _INFINIBAND):  # there they count all
        found += [(interface / "statistics" / name, 1) for name in ("rx_bytes", "tx_bytes")]
    return [(path, unit) for path, unit in found if path.exists()]


class Traffic:
    """Learns the profile of ``interfaces`` on a thread, again and again.

    Args:
        began_secs: when the iteration began that runs now; 0: none has.
        own_bytes: what this process has moved so far.
    """

    def __init__(
        self, interfaces: Iterable[str], began_secs: Callable[[], float], own_bytes: Callable[[], int],
        sysfs: Path = _SYSFS,
    ) -> None:  # fmt: skip
        self.profile: Profile | None = None
        self._began_secs, self._own_bytes = began_secs, own_bytes
        self._files = [file for name in interfaces for file in counter_files(sysfs / name)]
        self._over = threading.Event()
        if self._files:
            threading.Thread(target=self._run, name="smp-traffic", daemon=True).start()

    def has_room(self, need_secs: float) -> bool | None:
        """Whether a transfer of ``need_secs`` can begin now; None where nothing is known."""
        if self.profile is None:
            return None
        return self.profile.has_room(time.monotonic() - self._began_secs(), need_secs)

    def stop(self) -> None:
        """Learn nothing more."""
        self._over.set()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                if iterations := self._watch():
                    self.profile = profile_of(iterations)
                self._over.wait(_AGAIN_SECS)
        except (OSError, ValueError):  # an interface that went away
            self.profile = None

    def _watch(self) -> list[tuple[float, list[Sample]]]:
        """So many iterations; none where it is over before."""
        iterations: list[tuple[float, list[Sample]]] = []
        seen: list[Sample] = []  # of the iteration that runs, in seconds after its begin
        began_secs = at_secs = last = 0.0
        pause_secs = _MIN_SAMPLE_SECS
        while len(iterations) < ITERATIONS:
            if self._over.wait(pause_secs):
                return []
            total = sum(unit * int(path.read_bytes()) for path, unit in self._files)
            moved, now_secs, begins_secs = total - _OVERHEAD * self._own_bytes(), time.monotonic(), self._began_secs()
            if begins_secs == began_secs:
                seen.append(((now_secs + at_secs) / 2 - began_secs, moved - last, now_secs - at_secs))
            else:
                secs = begins_secs - began_secs
                if began_secs > 0 and seen:
                    iterations.append((secs, [(at / secs, nbytes, took) for at, nbytes, took in seen]))
                    pause_secs = min(_MAX_SAMPLE_SECS, max(_MIN_SAMPLE_SECS, secs / (3 * _BINS)))
                seen, began_secs = [], begins_secs
            at_secs, last = now_secs, moved
        return iterations
