"""Where the ranks of a node are in training, and the heartbeat of the node's SMP.

``.pulse`` in the node's directory is shared memory with one 256-byte entry per rank, indexed by the rank's place on
the node; the last entry is the SMP's. An entry is 32 native 64-bit words with one writer:

* 0: owner: pid in the low 22 bits, above them the process's start time in clock ticks since boot; 0: nobody
* 1: inode of the owner's pid namespace
* 2: CLOCK_MONOTONIC in ns of the last beat
* 3: number of beats
* 4: a rank's iteration plus 1, 0 where it is in none yet; the SMP's state
* 5, 6: a rank's phase: up to 16 ASCII characters, the first in the low byte of word 5; of the SMP the
  iteration plus 1 that it cannot protect, and the digest of its configuration
* 7: a rank's number plus 1; 0: unknown; of the SMP the key of the snapshot that it writes to storage; 0: none
* 8: of the SMP how far that is
* 9: of the SMP the CLOCK_MONOTONIC in ns until which it rests, once it has protected the target
* 10: the CLOCK_MONOTONIC in ns until which a rank copies, unless it says so again; 0: it does not copy
* 11: of the SMP the ns that protecting a target may take by its forecast
* 12: the CLOCK_MONOTONIC in ns at which a rank's iteration began
* 16 to 25: what a rank counts, see ``HeartbeatGauge``

Readers take no lock, and no two words must agree: a lock of a killed process would stop the others. A file
needs no header: zeros and foreign bytes name no live owner, and each writer overwrites its own entry as a whole.
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
"""With the entry of the SMP they fill 64 KiB."""
_ENTRY_WORDS = 32
_PAGE_BYTES = (MAX_PLACES + 1) * _ENTRY_WORDS * 8
_OWNER, _NAMESPACE, _BEAT_NS, _BEATS, _ITERATION, _PHASE, _PHASE_END, _RANK = range(8)
_STATE, _CANNOT, _DIGEST, _FLUSHED, _FLUSH_STATE, _REST_NS = range(4, 10)
_COPIES_UNTIL_NS = 10
_WAIT_NS, _BEGAN_NS = 11, 12
_COUNTS = 16
_SMP = MAX_PLACES
_PHASE_BYTES = 16
_COPY_LEASE_NS = 500_000_000
"""A rank that says for this long neither that it copies nor that it does not is stopped, or gone."""


class SmpState(IntEnum):
    """What an SMP does: ``WAITING`` for a configuration, ``GUARDING`` by it.

    ``CANNOT``: it guards, but the snapshot that is to be protected cannot be, as things are.
    """

    NONE = 0
    WAITING = 1
    GUARDING = 2
    CANNOT = 3


class FlushState(IntEnum):
    """How far the SMPs are with writing a snapshot to storage: ``DONE`` when it is durable there, all of it."""

    NONE = 0
    WORKING = 1
    DONE = 2
    CANNOT = 3


class HeartbeatGauge(IntEnum):
    """What a rank counts since it was started, for those who watch the job."""

    SNAPSHOTS = 0
    """That it has begun."""
    SKIPPED = 1
    """Snapshots that were due."""
    FAILED = 2
    BLOCKED_US = 3
    """Microseconds for which training waited, at boundaries and in fences."""
    COPIED_BYTES = 4
    DIFFERING = 5
    """Fragments of which it held the same bits as others, and came to hold other ones."""
    PERSISTED = 6
    """The iteration of the newest snapshot on storage, plus 1."""
    WHOLE_BEHIND = 7
    """Intervals between snapshots that training has passed since the newest whole one, or since it has begun."""
    PROTECTED_BEHIND = 8
    """The same of the newest protected one."""
    NO_SNAPSHOTS = 9
    """1 while it takes no snapshots: it has turned off, or its arena has too little memory."""

    @property
    def label(self) -> str:
        """As status and metrics name it."""
        return self.name.lower()


@dataclass(frozen=True)
class RankHeartbeat:
    """A rank's last sign of life. ``beat_ns`` is CLOCK_MONOTONIC; ``iteration`` and ``rank`` are -1 where unknown.

    ``is_here`` is False for a process of another pid namespace, whose pid means nothing here: ``lives`` is None where
    nothing else tells (``ftckpt.smp.liveness``). ``counts[count]`` is what it has told of that ``HeartbeatGauge``.
    """

    place: int
    rank: int
    owner: int
    iteration: int
    phase: str
    beat_ns: int
    beats: int
    lives: bool | None
    counts: tuple[int, ...] = (0,) * len(HeartbeatGauge)
    is_here: bool = True

    @property
    def where(self) -> str:
        """In words."""
        phase = f"in {self.phase}" if self.phase else "before its first phase"
        return f"{phase}, after iteration {self.iteration}"


class Heartbeat:
    """One rank's view of the page, or, with ``place=None``, an observer's or the SMP's.

    Nothing raises: where the page cannot be used ``problem`` says why, beats go nowhere and nobody is seen.
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
        """Join the page of the node whose arenas lie in ``node_dir``; never raises, see ``problem``.

        Args:
            place: index of this rank among those of the node, at most 254; None: it has no beat of its own.
            rank: its number in the job, for those who read about it.
        """
        try:
            if not 0 <= (place or 0) < MAX_PLACES:
                raise OSError(f"place {place}, the most is {MAX_PLACES - 1}")
            return cls(map_page(node_dir / PULSE_NAME, _PAGE_BYTES), place, None, rank)
        except (OSError, ValueError) as error:
            return cls(
                private_page(_PAGE_BYTES), None, f"{node_dir / PULSE_NAME}: no signs of life are shared: {error}"
            )

    def beat(self, iteration: int, phase: str) -> None:
        """This rank has come to ``phase`` of ``iteration``. Takes microseconds; for one thread at a time."""
        if self._base is None:
            return
        words, base = self._words, self._base
        code = self._phases.get(phase)
        if code is None:
            code = self._phases[phase] = _phase_words(phase)
        self._beats += 1
        # Plus 1, here and for ranks: a page of zeros then reads as "unknown".
        number = max(0, iteration + 1)
        if number != words[base + _ITERATION]:
            words[base + _BEGAN_NS] = time.monotonic_ns()
            words[base + _ITERATION] = number
        words[base + _PHASE], words[base + _PHASE_END] = code
        words[base + _BEATS] = self._beats
        words[base + _BEAT_NS] = time.monotonic_ns()  # last: an age says how old the rest is at the most

    def tell_copying(self, copying: bool) -> None:
        """Whether this rank copies now; for one thread at a time."""
        base = self._base  # once: the training thread may leave meanwhile
        if base is not None:
            self._words[base + _COPIES_UNTIL_NS] = time.monotonic_ns() + _COPY_LEASE_NS if copying else 0

    def ranks_copy(self) -> bool:
        """Whether any rank of the node copies now."""
        untils = self._words[_COPIES_UNTIL_NS : _SMP * _ENTRY_WORDS : _ENTRY_WORDS].tolist()
        # The clock is read last: a lease that is longer than a lease was never given.
        now = time.monotonic_ns()
        return any(0 < until - now <= _COPY_LEASE_NS for until in untils)

    def tell_counts(self, counts: Sequence[int]) -> None:
        """What this rank has counted so far, by ``HeartbeatGauge``."""
        if self._base is not None:
            for word, value in enumerate(counts, self._base + _COUNTS):
                self._words[word] = value

    def beat_smp(self, state: SmpState = SmpState.GUARDING, cannot: int = -1, digest: int = 0) -> None:
        """The SMP is alive and in ``state``; called by nobody else.

        ``cannot`` is the iteration it cannot protect, ``digest`` that of its configuration; 0: it has none.
        """
        words, base = self._words, _SMP * _ENTRY_WORDS
        if self._smp_beats == 0:
            self._enter(base, 0)
        self._smp_beats += 1
        # The state last of these: whoever reads CANNOT must not find the iteration of an older one.
        words[base + _CANNOT] = max(0, cannot + 1)
        words[base + _DIGEST] = digest
        words[base + _STATE] = state
        words[base + _BEATS] = self._smp_beats
        words[base + _BEAT_NS] = time.monotonic_ns()

    def tell_flush(self, snapshot: SnapshotId | None, state: FlushState) -> None:
        """How far the SMP is with ``snapshot``; called by nobody else."""
        words, base = self._words, _SMP * _ENTRY_WORDS
        key = _key(snapshot) if snapshot is not None else 0
        if words[base + _FLUSHED] != key:
            # No state meanwhile: a reader must not find that of the one before beside this one.
            words[base + _FLUSH_STATE] = FlushState.NONE
            words[base + _FLUSHED] = key
        words[base + _FLUSH_STATE] = state

    def tell_rest(self, until_secs: float) -> None:
        """Until when (``time.monotonic``) the SMP begins with no other target; called by nobody else."""
        self._words[_SMP * _ENTRY_WORDS + _REST_NS] = int(until_secs * 1e9)

    def smp_rests(self) -> bool:
        """Whether the SMP's share of the cores is used up yet."""
        return self._words[_SMP * _ENTRY_WORDS + _REST_NS] > time.monotonic_ns()

    def tell_wait(self, secs: float) -> None:
        """How long the SMP may need for a target; called by nobody else."""
        self._words[_SMP * _ENTRY_WORDS + _WAIT_NS] = int(secs * 1e9)

    def smp_wait_secs(self) -> float:
        """How long the SMP may need for a target, as it forecasts; 0: it has nothing to wait for."""
        return self._words[_SMP * _ENTRY_WORDS + _WAIT_NS] / 1e9

    def flush_state(self, snapshot: SnapshotId) -> FlushState:
        """How far the SMP says that it is with ``snapshot``."""
        base = _SMP * _ENTRY_WORDS
        state = self._words[base + _FLUSH_STATE]
        # Asked behind the state: where it is another snapshot's by now, so may the state be.
        is_named = self._words[base + _FLUSHED] == _key(snapshot)
        return FlushState(state) if is_named and state <= max(FlushState) else FlushState.NONE

    def ranks(self) -> list[RankHeartbeat]:
        """The entries of all ranks that ever joined and did not leave, dead ones included, by place."""
        return [self._read(place) for place in range(MAX_PLACES) if self._words[place * _ENTRY_WORDS + _OWNER]]

    def began_secs(self) -> float:
        """When (``time.monotonic``) the iteration began that runs now, by the first rank of the node; 0: unknown."""
        return next(filter(None, self._words[_BEGAN_NS : _SMP * _ENTRY_WORDS : _ENTRY_WORDS]), 0) / 1e9

    def furthest(self) -> int:
        """The last boundary that a rank has passed which ever joined, also of those that have left; -1: none."""
        return max(self._words[place * _ENTRY_WORDS + _ITERATION] for place in range(MAX_PLACES)) - 1

    def smp_alive(self, max_age_secs: float) -> bool:
        """Whether the SMP lives and gave a sign of life in the last ``max_age_secs``."""
        owner, age_secs, _ = self.smp()
        return owner != 0 and age_secs <= max_age_secs and self._lives(_SMP) is not False

    def smp(self) -> tuple[int, float, SmpState]:
        """The SMP's owner word (0: there is none), the age of its last sign of life in seconds, its state."""
        base = _SMP * _ENTRY_WORDS
        owner, beat_ns, state = (self._words[base + word] for word in (_OWNER, _BEAT_NS, _STATE))
        age_ns = time.monotonic_ns() - beat_ns  # the clock is read last: a beat in the future is none
        age_secs = age_ns / 1e9 if age_ns >= 0 else math.inf
        return owner, age_secs, SmpState(state) if state <= max(SmpState) else SmpState.NONE

    def smp_beat(self) -> tuple[int, int]:
        """The SMP's owner word and how many signs of life it gave: as long as they stay, it gives none."""
        base = _SMP * _ENTRY_WORDS
        return self._words[base + _OWNER], self._words[base + _BEATS]

    def smp_lives(self) -> bool:
        """Whether the SMP is a process of this pid namespace that lives, however silent."""
        return self._lives(_SMP) is True

    def smp_cannot(self, iteration: int) -> bool:
        """Whether the SMP cannot protect the snapshot of ``iteration``, this one and no other."""
        base = _SMP * _ENTRY_WORDS
        return self._words[base + _STATE] == SmpState.CANNOT and self._words[base + _CANNOT] == iteration + 1

    def smp_guards(self, digest: int) -> bool:
        """Whether the SMP's configuration has this ``digest``, which is not 0."""
        return digest != 0 and self._words[_SMP * _ENTRY_WORDS + _DIGEST] == digest

    def leave(self) -> None:
        """This rank trains no more: nobody shall wait for its next beat. Later beats go nowhere."""
        if self._base is not None:
            # The owner alone: an entry without one counts as nobody's, whatever else stands in it.
            self._words[self._base + _OWNER] = 0
            self._base = None

    def leave_smp(self) -> None:
        """The SMP ends: trainers see at once, not by the age of its last beat, that nobody guards."""
        self._words[_SMP * _ENTRY_WORDS + _OWNER] = 0

    def forget_others(self, num_ranks: int) -> None:
        """The node has ``num_ranks`` ranks now: entries of further places are of an earlier start with more.

        For the one process that holds the job's lock on this node: none of those can still train.
        """
        for word in range(num_ranks * _ENTRY_WORDS, MAX_PLACES * _ENTRY_WORDS):
            self._words[word] = 0

    def _enter(self, base: int, number: int) -> None:
        owner = owner_word(os.getpid())
        # The owner goes first and comes last: a reader never takes what the one before left for this one's.
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
            lives=self._lives(place),
            counts=tuple(entry[_COUNTS : _COUNTS + len(HeartbeatGauge)]),
            is_here=entry[_NAMESPACE] == self._namespace,
        )

    def _lives(self, place: int) -> bool | None:
        base = place * _ENTRY_WORDS
        if self._words[base + _NAMESPACE] != self._namespace:
            return None
        return owner_lives(self._words[base + _OWNER])


def _key(snapshot: SnapshotId) -> int:
    """One word for a snapshot, never 0."""
    return xxhash.xxh3_64_intdigest(snapshot.pack()) | 1


def _phase_words(phase: str) -> tuple[int, int]:
    text = phase.encode("ascii", "replace")[:_PHASE_BYTES].ljust(_PHASE_BYTES, b"\0")
    return int.from_bytes(text[:8], "little"), int.from_bytes(text[8:], "little")


def _phase_text(word: int, end: int) -> str:
    text = (word.to_bytes(8, "little") + end.to_bytes(8, "little")).rstrip(b"\0").decode("ascii", "replace")
    return text if text.isprintable() else "?"
