"""One attempt of a launcher at a job: what the record of the launcher run learns of it, and that of failures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from ftckpt.config import Config
from ftckpt.errors import StalledError, StorageError
from ftckpt.events import Events
from ftckpt.model.failures import (
    FailureRate,
    FailureRecord,
    LastAttempt,
    StartFacts,
    ended_by,
    expected,
    in_words,
    next_record,
)
from ftckpt.model.text import listed
from ftckpt.model.tiers import NODE, mtbf_secs
from ftckpt.model.topology import Topology
from ftckpt.persist.failures import tell_trained
from ftckpt.persist.place import Place
from ftckpt.persist.storage import open_storage, patiently
from ftckpt.setting_checks import check_mtbf
from ftckpt.store import ends
from ftckpt.store.directory import PULSE_NAME
from ftckpt.store.ends import EndNote
from ftckpt.store.failures import note_end, read_failures, still_trains, write_failures
from ftckpt.store.outcome import MOST_STARTS, LauncherRun
from ftckpt.store.pulse import Pulse

log = logging.getLogger("ftckpt")

_TELL_SECS = 10.0
"""For storage to take the note that a job has ended: nobody needs it but the counts of the next start."""

_MOST_ENDS = 4
"""Told of how an attempt has ended: the first is the cause, what follows mostly its consequence."""

_OFTEN_SECS = 1.0
"""Between two times at which training says that it goes on: failures are counted by the hour."""


class AttemptSight(NamedTuple):
    """What one rank knows at the start. ``starts``: that came to nothing, -1 where it speaks for no launcher run;
    ``run``: the name of that. ``last`` and ``ends``: what its node's memory has, and has seen of the end of the
    attempt before, where it leads the node."""

    starts: int
    run: str
    last: LastAttempt | None
    ends: tuple[EndNote, ...] = ()


class AttemptRecord:
    """What this process adds to the record of ``run``, which is given to one of the ranks that it started here, and
    to that of failures, which each node keeps in its memory."""

    def __init__(self, config: Config, topology: Topology, run: LauncherRun, events: Events) -> None:
        self._config = config
        self._topology = topology
        self._run = run
        self._events = events
        self._has_snapshot = False
        self._node_dir: Path | None = None  # where this rank leads its node
        self._found: dict[str, LastAttempt] = {}  # by the node
        self.ends: list[str] = []
        """What nodes have seen of how the attempt before this one ended, the cause first; from ``begin`` on."""
        self._runs: tuple[str, ...] = ()
        self.record: FailureRecord | None = None
        """What the next start is to know of failures; from ``learn`` on."""
        self._is_kept = False
        self._next_secs = 0.0  # when training tells again that it goes on

    @property
    def launch(self) -> str:
        """The name of the launcher run; "" on ranks that do not speak for it, and where it has none."""
        return self._run.name

    def begin(self, sights: Sequence[AttemptSight]) -> None:
        """Refuse what would fail as the attempts before it did: a launcher that has no such rule goes on for days.
        ``sights`` are what all ranks see.

        Raises:
            StalledError: on all ranks alike.
        """
        if self._run.problem:
            log.warning("ftckpt: what this attempt comes to cannot be kept for the next: %s", self._run.problem)
        self._runs = tuple(sorted({one.run for one in sights if one.run}))
        members = [*zip(self._topology.members, sights, strict=True)]
        self._found = {member.node: one.last for member, one in members if one.last is not None}
        told = sorted(((member.node, end) for member, one in members for end in one.ends), key=lambda of: of[1].order)
        self.ends = [f"node {node}: {end.text}" for node, end in told[:_MOST_ENDS]]
        # The least: a node that comes and goes has failed in a row while others made snapshots.
        starts = min((one.starts for one in sights if one.starts >= 0), default=0)
        if starts >= MOST_STARTS:
            error = StalledError(
                f"{starts} attempts in a row have made no snapshot that is whole on all ranks, and came no further "
                "than those before them: what ended them would end the next one, too; see their errors above, and "
                "start the job again when that is mended"
            )
            error.of_all_ranks = True
            raise error

    def learn(
        self, owner: str, *, on_storage: LastAttempt | None, lost: bool, taken_back: bool
    ) -> Mapping[str, FailureRate]:
        """What has ended the attempt before this one, and what failures are to be expected by now, by their kind. The
        same on all ranks.

        ``owner`` is a word of this attempt that all ranks know; ``lost`` and ``taken_back``: see
        ``failures.StartFacts``.
        """
        nodes = tuple(sorted({member.node for member in self._topology.members}))
        known = [*self._found.values(), *([on_storage] if on_storage is not None else [])]
        last = LastAttempt.newest(known)
        kind = ended_by(last and last.record, StartFacts(self._found, self._runs, lost, taken_back))
        if kind == NODE and last is not None:
            gone = sorted(set(last.record.nodes) - set(self._found))
            self.ends.insert(0, f"nothing is left in the memory of node(s) {listed(gone)}")
        begins = FailureRecord(self._config.job, 1, owner, nodes, self._runs, time.time())
        self.record = next_record(last, kind, begins).with_ends(self.ends)
        rates = expected(mtbf_secs(check_mtbf(self._config.mtbf), len(nodes)), self.record, len(nodes))
        self._events.emit(
            "failures", last=kind, attempt=self.record.number, nodes=len(nodes), ends=self.ends,
            seen={one: rate.seen for one, rate in rates.items()}, secs={one: r.secs for one, r in rates.items()},
            given_secs={one: r.given_secs for one, r in rates.items()},
            mtbf_secs={one: r.mtbf_secs for one, r in rates.items()},
        )  # fmt: skip
        for text in self.ends:
            self._events.announce(f"how the attempt before this one ended: {text}")
        if last is not None:
            self._events.announce(f"failures: {in_words(rates)}")
        return rates

    def keep(self) -> None:
        """Training begins: what has ended the attempt before this one is counted."""
        self._is_kept = True
        self._write(write_failures)
        if self._node_dir is not None:
            with suppress(OSError):  # they are told once more
                ends.forget(self._node_dir)

    def trains(self) -> None:
        """A boundary."""
        if self._is_kept and self._node_dir is not None and time.monotonic() >= self._next_secs:
            self._next_secs = time.monotonic() + _OFTEN_SECS
            still_trains(self._node_dir)

    def take_back(self) -> None:
        """Storage is away that this attempt must read: however many wait for it, none of them has failed."""
        self._run.take_back()

    def progress(self) -> None:
        """A snapshot of this attempt is whole: the first one ends the row of those that came to nothing."""
        if not self._has_snapshot:
            self._has_snapshot = True
            self._run.progress()

    def finish(self, iteration: int) -> None:
        """The job is done with ``iteration``: no further attempt trains anything."""
        text = f"job {self._config.job} finished at iteration {iteration}: nothing is left to train"
        self._run.end(0, text, str(Path(self._config.arena).absolute()), self._config.job)

    def end(self) -> None:
        """This attempt has ended as it was to, whether its snapshots stay or not: that is no failure."""
        if self.record is None or not self._is_kept:
            return
        self._write(note_end)
        if self._config.persist and self._topology.rank == 0:
            # On a thread: storage that hangs must not keep the job from its end.
            thread = Thread(target=self._tell_end, args=(self.record.owner,), name="ftckpt-ended", daemon=True)
            thread.start()
            thread.join(_TELL_SECS)

    def look(self, node_dir: Path) -> AttemptSight:
        """Count the attempt; what is known here of those before it."""
        self._node_dir = node_dir if self._topology.is_node_leader else None
        ends.are_told_in(node_dir)
        starts = self._run.begin(self._config.job, _reached(node_dir)) if self._run.name else -1
        last: LastAttempt | None = None
        told: list[EndNote] = []
        if self._node_dir is not None:
            try:
                ends.tell_silent(self._node_dir)  # no SMP may have been there to see it
                told = ends.read(self._node_dir)
                last = read_failures(self._node_dir)
            except (OSError, ValueError) as error:
                self._events.emit("failures_unknown", error=str(error))
        return AttemptSight(starts, self._run.name, last, tuple(told[:_MOST_ENDS]))

    def _write(self, write: Callable[[Path, FailureRecord], None]) -> None:
        assert self.record is not None
        try:
            if self._node_dir is not None:
                write(self._node_dir, self.record)
        except OSError as error:  # the next start knows what this one has found
            self._events.emit("failures_unknown", error=str(error))

    def _tell_end(self, owner: str) -> None:
        where = Place.of(self._config.persist, self._config.persist_format).snapshots
        try:
            setting = "--ftckpt-persist"
            patiently(lambda: tell_trained(open_storage(where, setting), owner, time.time(), ended=True), _TELL_SECS)
        except StorageError as error:
            self._events.emit("failures_unknown", error=str(error))


def _reached(node_dir: Path) -> int:
    """The last boundary that the attempt before this one has passed here: a killed rank has told it by its signs of
    life alone. -1 where nothing is known."""
    if not (node_dir / PULSE_NAME).exists():  # to open it would make it
        return -1
    return Pulse.open(node_dir, None).furthest()
