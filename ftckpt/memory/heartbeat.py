"""Heartbeats: the progress of a node's ranks in training, and the state of the node's SMP.

``.pulse`` in the node's directory is shared memory with one 256-byte entry per rank, indexed by the rank's place on
the node; the last entry is the SMP's. An entry is 32 native 64-bit words with one writer:

* 0: owner: pid in the low 22 bits, above them the process's start time in clock ticks since boot; 0: none
* 1: inode of the owner's pid namespace
* 2: CLOCK_MONOTONIC in ns of the last beat
* 3: number of beats
* 4: rank: iteration plus 1, 0 before the first
* 5, 6: rank: phase, up to 16 ASCII characters, the first in the low byte of word 5; SMP: the iteration plus 1 that it
  cannot protect, and the digest of its configuration
* 7: rank: number plus 1, 0: unknown; SMP: key of the snapshot that it flushes, 0: none
* 8: SMP: state of that flush
* 9: SMP: CLOCK_MONOTONIC in ns until which it is throttled after it has protected the target
* 10: rank: CLOCK_MONOTONIC in ns at which its copy lease ends, 0: it does not copy
* 11: SMP: forecast duration of the protection of a target in ns
* 12, 13: rank: CLOCK_MONOTONIC in ns at the start of its iteration, and the duration of the one before in ns
* 16 to 25: rank: counters, see ``HeartbeatGauge``

There is no lock, which a killed process could keep forever, and no two words need to be consistent. The file has no
header: zeros and foreign bytes identify no live owner, and each writer overwrites its entire entry.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import xxhash

from ftckpt.memory.directory import PULSE_NAME
from ftckpt.memory.page import map_page, owner_lives, owner_word, pid_namespace, private_page
from ftckpt.model.snapshot import SnapshotId

MAX_PLACES = 255
"""Maximum of ranks on a node; with the SMP's entry they fill 64 KiB."""
_ENTRY_WORDS = 32
_PAGE_BYTES = (MAX_PLACES + 1) * _ENTRY_WORDS * 8
_OWNER, _NAMESPACE, _BEAT_NS, _BEATS, _ITERATION, _PHASE, _PHASE_END, _RANK = range(8)
_CANNOT, _DIGEST, _FLUSHED, _FLUSH_STATE, _REST_NS = range(5, 10)
_COPIES_UNTIL_NS = 10
_WAIT_NS, _BEGAN_NS, _LAST_NS = 11, 12, 13
_COUNTS = 16
_SMP = MAX_PLACES * _ENTRY_WORDS
_PHASE_BYTES = 16
_COPY_LEASE_NS = 500_000_000
"""Duration of a copy lease. A rank that copies renews it; one that does not renew it is stopped or gone."""


class FlushState(IntEnum):
    """Progress of the flush of a snapshot; ``DONE``: all of it is durable on storage."""

    NONE = 0
    WORKING = 1
    DONE = 2
    CANNOT = 3


class HeartbeatGauge(IntEnum):
    """Counters and gauges of a rank since its start, for status and metrics."""

    SNAPSHOTS = 0
    """Snapshots that the rank has started."""
    SKIPPED = 1
    """Due snapshots that it has skipped."""
    FAILED = 2
    BLOCKED_US = 3
    """Microseconds for which training waited at boundaries and in fences."""
    COPIED_BYTES = 4
    DIFFERING = 5
    """Fragments that differ from their replicas although they must be equal."""
    PERSISTED = 6
    """The iteration of the newest snapshot on storage, plus 1."""
    WHOLE_BEHIND = 7
    """Intervals that training has passed since the newest committed snapshot, or since its start."""
    PROTECTED_BEHIND = 8
    """Intervals that training has passed since the newest protected snapshot, or since its start."""
    NO_SNAPSHOTS = 9
    """1 while the rank takes no snapshots: it is turned off, or its arena has too little memory."""

    @property
    def label(self) -> str:
        """Its name in status and metrics."""
        return self.name.lower()


@dataclass(frozen=True)
class RankHeartbeat:
    """A rank's last heartbeat. ``beat_ns`` and ``began_ns``, the start of its iteration, are CLOCK_MONOTONIC;
    ``last_ns`` is the duration of the iteration before, 0: unknown. ``iteration`` and ``rank`` are -1 if unknown.

    ``is_here`` is False for a process in another pid namespace, whose pid is unusable in this one: ``lives`` is then
    None, unless ``ftckpt.smp.liveness`` knows it. ``counts[gauge]`` is the value of a ``HeartbeatGauge``.
    """

    place: int
    rank: int
    owner: int
    iteration: int
    phase: str
    beat_ns: int
    beats: int
    lives: bool | None
    began_ns: int = 0
    last_ns: int = 0
    counts: tuple[int, ...] = (0,) * len(HeartbeatGauge)
    is_here: bool = True

    @property
    def where(self) -> str:
        """The phase and iteration as text."""
        phase = f"in {self.phase}" if self.phase else "before its first phase"
        return f"{phase}, after iteration {self.iteration}"


class Heartbeat:
    """One rank's view of the page, or, with ``place=None``, an observer's or the SMP's.

    No method raises: if the page cannot be used, ``problem`` is the reason, beats are dropped and no rank is visible.
    """

    def __init__(self, words: memoryview, place: int | None, problem: str | None, rank: int = -1) -> None:
        self.problem = problem
        self._words = words
        self._base = None if place is None else place * _ENTRY_WORDS
        self._beats = self._smp_beats = 0
        self._phases: dict[str, tuple[int, int]] = {}
        self._namespace = pid_namespace() if problem is None else 0
        if self._base is not None:
            self._enter(self._base, max(0, rank + 1))

    @classmethod
    def open(cls, node_dir: Path, place: int | None, rank: int = -1) -> Heartbeat:
        """Join the page of the node directory ``node_dir``; never raises, see ``problem``.

        Args:
            place: index of this rank among the node's ranks, at most 254; None: no entry of its own.
            rank: its number in the job, for readers.
        """
        try:
            if not 0 <= (place or 0) < MAX_PLACES:
                raise OSError(f"place {place} exceeds the maximum of {MAX_PLACES - 1}")
            return cls(map_page(node_dir / PULSE_NAME, _PAGE_BYTES), place, None, rank)
        except (OSError, ValueError) as error:
            return cls.unshared(f"{node_dir / PULSE_NAME}: heartbeats are not shared: {error}")

    @classmethod
    def unshared(cls, problem: str) -> Heartbeat:
        """A page that no other process sees, because of ``problem``."""
        return cls(private_page(_PAGE_BYTES), None, problem)

    def beat(self, iteration: int, phase: str) -> None:
        """Store that this rank entered ``phase`` of ``iteration``. Takes microseconds; one thread at a time."""
        if self._base is None:
            return
        words, base = self._words, self._base
        code = self._phases.get(phase)
        if code is None:
            code = self._phases[phase] = _phase_words(phase)
        self._beats += 1
        # Plus 1, as for rank numbers: zeros then read as "unknown".
        number = max(0, iteration + 1)
        if number != words[base + _ITERATION]:
            now_ns = time.monotonic_ns()
            if words[base + _ITERATION]:  # else the rank has just loaded its state
                words[base + _LAST_NS] = now_ns - words[base + _BEGAN_NS]
            words[base + _BEGAN_NS] = now_ns
            words[base + _ITERATION] = number
        words[base + _PHASE], words[base + _PHASE_END] = code
        words[base + _BEATS] = self._beats
        words[base + _BEAT_NS] = time.monotonic_ns()  # last: the other words are at most as old as the beat

    def tell_copying(self, copying: bool) -> None:
        """Renew or end this rank's copy lease; one thread at a time."""
        base = self._base  # read once: the training thread may leave concurrently
        if base is not None:
            self._words[base + _COPIES_UNTIL_NS] = time.monotonic_ns() + _COPY_LEASE_NS if copying else 0

    def ranks_copy(self) -> bool:
        """Whether any rank of the node copies now."""
        untils = self._words[_COPIES_UNTIL_NS:_SMP:_ENTRY_WORDS].tolist()
        # The clock is read last, so a valid lease has at most its full duration left.
        now = time.monotonic_ns()
        return any(0 < until - now <= _COPY_LEASE_NS for until in untils)

    def tell_counts(self, counts: Sequence[int]) -> None:
        """Store this rank's counters, indexed by ``HeartbeatGauge``."""
        if self._base is not None:
            for word, value in enumerate(counts, self._base + _COUNTS):
                self._words[word] = value

    def beat_smp(self, cannot: int = -1, digest: int = 0) -> None:
        """Store the SMP's beat; only the SMP calls this.

        ``cannot``: the iteration that it cannot protect, -1: none; ``digest``: that of its configuration, 0: none.
        """
        words = self._words
        if self._smp_beats == 0:
            self._enter(_SMP, 0)
        self._smp_beats += 1
        words[_SMP + _CANNOT] = max(0, cannot + 1)
        words[_SMP + _DIGEST] = digest
        words[_SMP + _BEATS] = self._smp_beats
        words[_SMP + _BEAT_NS] = time.monotonic_ns()

    def tell_flush(self, snapshot: SnapshotId | None, state: FlushState) -> None:
        """Store the state of the flush of ``snapshot``; only the SMP calls this."""
        words, key = self._words, _key(snapshot) if snapshot is not None else 0
        if words[_SMP + _FLUSHED] != key:
            # Cleared first: a reader must not see the previous flush's state with this key.
            words[_SMP + _FLUSH_STATE] = FlushState.NONE
            words[_SMP + _FLUSHED] = key
        words[_SMP + _FLUSH_STATE] = state

    def tell_rest(self, until_secs: float) -> None:
        """Store the time (``time.monotonic``) until which the SMP is throttled; only the SMP calls this."""
        self._words[_SMP + _REST_NS] = int(until_secs * 1e9)

    def smp_rests(self) -> bool:
        """Whether the SMP is throttled now: its share of the cores is used up."""
        return self._words[_SMP + _REST_NS] > time.monotonic_ns()

    def tell_wait(self, secs: float) -> None:
        """Store the forecast duration of the protection of a target; only the SMP calls this."""
        self._words[_SMP + _WAIT_NS] = int(secs * 1e9)

    def smp_wait_secs(self) -> float:
        """The SMP's forecast duration of the protection of a target; 0: there is no forecast."""
        return self._words[_SMP + _WAIT_NS] / 1e9

    def flush_state(self, snapshot: SnapshotId) -> FlushState:
        """The SMP's state of the flush of ``snapshot``; NONE if it flushes another one."""
        state = self._words[_SMP + _FLUSH_STATE]
        # Compared after the state is read: if the key differs by now, the state may belong to another snapshot.
        is_named = self._words[_SMP + _FLUSHED] == _key(snapshot)
        return FlushState(state) if is_named and state <= max(FlushState) else FlushState.NONE

    def ranks(self) -> list[RankHeartbeat]:
        """The entries of all ranks that joined and did not leave, dead ones included, by place."""
        return [self._read(place) for place in range(MAX_PLACES) if self._words[place * _ENTRY_WORDS + _OWNER]]

    def began_secs(self) -> float:
        """Start (``time.monotonic``) of the current iteration of the node's first rank with one; 0: unknown."""
        return next(filter(None, self._words[_BEGAN_NS:_SMP:_ENTRY_WORDS]), 0) / 1e9

    def furthest(self) -> int:
        """The last boundary that any rank has passed, including ranks that have left; -1: none."""
        return max(self._words[place * _ENTRY_WORDS + _ITERATION] for place in range(MAX_PLACES)) - 1

    def smp_alive(self, max_age_secs: float) -> bool:
        """Whether the SMP lives and its last beat is at most ``max_age_secs`` old."""
        owner = self._words[_SMP + _OWNER]
        return owner != 0 and self.smp_age_secs() <= max_age_secs and self._lives(_SMP) is not False

    def smp_age_secs(self) -> float:
        """The age of the SMP's last beat."""
        beat_ns = self._words[_SMP + _BEAT_NS]
        age_ns = time.monotonic_ns() - beat_ns  # the clock is read last: a beat in the future is invalid
        return age_ns / 1e9 if age_ns >= 0 else math.inf

    def smp_beat(self) -> tuple[int, int]:
        """The SMP's owner word (0: no SMP) and number of beats; while both are unchanged, it does not beat."""
        return self._words[_SMP + _OWNER], self._words[_SMP + _BEATS]

    def smp_lives(self) -> bool:
        """Whether the SMP is a live process of this pid namespace, whether or not it beats."""
        return self._lives(_SMP) is True

    def smp_cannot(self, iteration: int) -> bool:
        """Whether the SMP reports that it cannot protect the snapshot of ``iteration``."""
        return self._words[_SMP + _CANNOT] == iteration + 1

    def smp_guards(self, digest: int) -> bool:
        """Whether the SMP's configuration has this ``digest``, which is not 0."""
        return digest != 0 and self._words[_SMP + _DIGEST] == digest

    def leave(self) -> None:
        """Withdraw this rank's entry, so that no reader waits for its next beat. Later beats are dropped."""
        if self._base is not None:
            # Clearing the owner suffices: an entry without one is ignored.
            self._words[self._base + _OWNER] = 0
            self._base = None

    def leave_smp(self) -> None:
        """Withdraw the SMP's entry: trainers notice at once, not by the age of its last beat."""
        self._words[_SMP + _OWNER] = 0

    def forget_others(self, num_ranks: int) -> None:
        """Clear entries beyond ``num_ranks``, the number of ranks on the node: an earlier start had more.

        Only the process with the job's lock on this node calls this: no rank of an earlier start can still train.
        """
        for word in range(num_ranks * _ENTRY_WORDS, MAX_PLACES * _ENTRY_WORDS):
            self._words[word] = 0

    def _enter(self, base: int, number: int) -> None:
        owner = owner_word(os.getpid())
        # The owner is cleared first and stored last: no reader attributes the previous owner's words to this one.
        for word in range(_ENTRY_WORDS):
            self._words[base + word] = 0
        self._words[base + _NAMESPACE] = self._namespace
        self._words[base + _RANK] = number
        self._words[base + _BEAT_NS] = time.monotonic_ns()
        self._words[base + _OWNER] = owner

    def _read(self, place: int) -> RankHeartbeat:
        base = place * _ENTRY_WORDS
        entry = [self._words[base + word] for word in range(_ENTRY_WORDS)]
        return RankHeartbeat(
            place=place,
            rank=entry[_RANK] - 1,
            owner=entry[_OWNER],
            iteration=entry[_ITERATION] - 1,
            phase=_phase_text(entry[_PHASE], entry[_PHASE_END]),
            beat_ns=entry[_BEAT_NS],
            beats=entry[_BEATS],
            lives=self._lives(base),
            began_ns=entry[_BEGAN_NS],
            last_ns=entry[_LAST_NS],
            counts=tuple(entry[_COUNTS : _COUNTS + len(HeartbeatGauge)]),
            is_here=entry[_NAMESPACE] == self._namespace,
        )

    def _lives(self, base: int) -> bool | None:
        if self._words[base + _NAMESPACE] != self._namespace:
            return None
        return owner_lives(self._words[base + _OWNER])


def _key(snapshot: SnapshotId) -> int:
    """A hash of a snapshot as one word, never 0."""
    return xxhash.xxh3_64_intdigest(snapshot.pack()) | 1


def _phase_words(phase: str) -> tuple[int, int]:
    text = phase.encode("ascii", "replace")[:_PHASE_BYTES].ljust(_PHASE_BYTES, b"\0")
    return int.from_bytes(text[:8], "little"), int.from_bytes(text[8:], "little")


def _phase_text(word: int, end: int) -> str:
    text = (word.to_bytes(8, "little") + end.to_bytes(8, "little")).rstrip(b"\0").decode("ascii", "replace")
    return text if text.isprintable() else "?"
