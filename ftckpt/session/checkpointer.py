"""The six lines of Python: construct, ``restore``, then ``fence`` and ``step`` in each iteration, ``close``."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from operator import index
from pathlib import Path

from ftckpt import forks
from ftckpt.capture.capture import Capture
from ftckpt.config import Config
from ftckpt.errors import ConfigError, FtckptError, LaunchError, SilentCorruptionError, StorageError
from ftckpt.events import Events
from ftckpt.group import Group
from ftckpt.memory.arena import Arena
from ftckpt.memory.heartbeat import HeartbeatGauge
from ftckpt.memory.launch_record import LauncherRun
from ftckpt.model.lineage import LoadedCheckpoint
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import Topology
from ftckpt.model.training_state import TrainingState
from ftckpt.restore.staging import PINNED_SECS, free_pinned
from ftckpt.schedule.iteration import COMPUTE
from ftckpt.schedule.window_scheduler import WindowScheduler
from ftckpt.session import deadlines
from ftckpt.session.gc_pause import no_collections
from ftckpt.session.last_snapshot import RankShutdownReport
from ftckpt.session.missing_close import OpenJob
from ftckpt.session.rank_parts import RankContext
from ftckpt.session.rank_storage import save_command
from ftckpt.session.save import MAX_FILE_BYTES, UniversalSave
from ftckpt.session.shard import Shard
from ftckpt.session.snapshot_driver import SnapshotDriver
from ftckpt.session.start import load, meet


class Checkpointer:
    """Snapshots of one rank, agreed with all others. Every method is called by the training thread.

    Construction, ``restore``, ``step`` and ``close`` are collective. The order of calls is ``restore`` once,
    then per iteration ``fence`` before the first write to stepped state and ``step`` at the boundary, then
    ``close`` when training is done (not after an error: the snapshots are needed then). ``phase`` tells where
    in the schedule training is, so that copies find its windows.

    What comes before the first boundary is in ``ftckpt.session.start``, what is done at fences and boundaries in
    ``SnapshotDriver``.

    Args:
        config: ``job`` and ``node`` must be names.
        state: what to save; see TrainingState for who calls what.
        topology: the place and node of every rank.
        group: all ranks; a new one if not given.
        run: what starts this process again when a rank fails; given to one of the ranks that it started here.

    Raises:
        ConfigError: ``job`` or ``node`` is empty; the directory for events cannot be written.
    """

    def __init__(
        self, config: Config, state: TrainingState, topology: Topology, group: Group | None = None,
        run: LauncherRun | None = None,
    ) -> None:  # fmt: skip
        rank = self._rank = RankContext.attach(config, state, topology, group, run or LauncherRun(""))
        self.config, self.topology, self.events, self.group = rank.config, topology, rank.events, rank.group
        self.training_state = state
        self._state, self._protection = rank.state, rank.protection
        self._pacer: WindowScheduler | None = None
        self._shard: Shard | None = None
        self._snapshots: SnapshotDriver | None = None  # once the state is loaded, and the shard is laid out
        self._boundary = -1  # the iteration of the last one
        self._closed = self._is_copy = False
        forks.trains(self._abandon)
        self._close_error: str | None = None
        self._open_job = OpenJob(config)
        self._fenced = False  # since the last boundary
        self._reminder = Reminder(self.events)

    @property
    def off(self) -> bool:
        """Whether ftckpt has turned itself off: training goes on without snapshots."""
        return self._state.off

    @property
    def begun(self) -> int:
        """The iteration of the last snapshot that this rank has begun; -1: none."""
        return self._snapshots.begun if self._snapshots is not None else -1

    @property
    def whole(self) -> SnapshotId | None:
        """The newest snapshot that all ranks are known to have sealed."""
        return self._state.whole

    @property
    def protected(self) -> SnapshotId | None:
        """The newest snapshot whose parity all nodes have; None where there is none, or no protection."""
        return self._state.targets.protected

    @property
    def persisted(self) -> SnapshotId | None:
        """The newest snapshot of this attempt that is on storage; None where none is."""
        return self._state.flushes.persisted

    @property
    def lineage(self) -> bytes:
        """Of the snapshots that are taken now."""
        return self._state.lineage

    @property
    def arena(self) -> Arena | None:
        """Where this rank's snapshots lie; None before ``restore``, and where no arena could be had."""
        return self.capture.arena if self.capture is not None else None

    @property
    def capture(self) -> Capture | None:
        """What copies this rank's shard into its arena; None as ``arena``."""
        return self._shard.capture if self._shard is not None else None

    @property
    def node_dir(self) -> Path:
        """The directory of this node's arenas, from ``restore`` on."""
        return self._rank.arenas.path

    def phase(self, kind: str) -> None:
        """Training comes to a part of the iteration: a kind of ``ftckpt.schedule.iteration``. Takes microseconds, and
        once per snapshot some hundred.

        Raises:
            Exception: only under ``on_error: raise``: what kept a snapshot from being agreed on.
        """
        if self._pacer is not None and not self._closed:
            self._protection.beat(self._boundary, kind)
            if not self.off:
                self._pacer.enter(kind)
                # Others answer while this rank computes: of what is posted at the fence alone, a boundary that comes
                # right behind it waits for all of them, hop by hop.
                if kind in COMPUTE and self._snapshots is not None:
                    self._snapshots.post_if_known()

    def pause(self) -> None:
        """Training pauses, such as for an evaluation or a save, until its next phase. Takes microseconds.

        The time until then does not count as a cost of snapshots.
        """
        if self._pacer is not None and not self._closed:
            self._protection.beat(self._boundary, "pause")
            if not self.off:
                self._pacer.pause()

    def expect(self, kinds: Sequence[str], lengths: Sequence[float]) -> None:
        """A model of the schedule: its ``kinds`` of places between the schedule's begin and the fence, and their
        relative lengths. Copies go by it until the places were measured."""
        if self._pacer is not None:
            self._pacer.expect(kinds, lengths)

    def restore(
        self, newer_than: int = -1, rollback: bool = False, lasting: bool = True, *, may_load: bool = False,
        in_training: bool = False,
    ) -> int | None:  # fmt: skip
        """Bring back the newest whole snapshot; returns its iteration, or None if state is to stay as it is.

        Must be called once before the first ``step``, on a first start too: it allocates the arena.

        Args:
            newer_than: the iteration that the script has loaded from storage before, if it has. Of that and memory
                the newer counts, unless storage had a newer one at an earlier start: then somebody took it back.
            rollback: the operator has named that iteration: it counts, and memory is given up. Restarts with the
                same one go on from memory.
            lasting: False where that checkpoint may vanish with a node: that an older one is loaded then is no
                rollback.
            may_load: the script may load a checkpoint behind this, which counts where snapshots prove to be lost:
                slots are verified before anything is written.
            in_training: the script has loaded ``newer_than`` while it trained, or went to the beginning: that counts,
                and no later start brings back what memory and storage have.

        Raises:
            LostError, MismatchError, MemoryBudgetError, ArenaError, UnsupportedError: on all ranks together.
            StorageError: likewise; what is to be restored lies on storage, and that is away.
        """
        if self._shard is not None:
            raise ConfigError("restore() was called twice")
        if self._closed:
            raise ConfigError("restore() after close(): attach the training state again")
        if rollback and newer_than <= 0:
            raise ConfigError(
                "restore: rollback goes back to newer_than, the iteration that was loaded; give it, too"
            )
        unproven = not may_load or self.config.on_lost != "storage"
        loaded = LoadedCheckpoint(newer_than, rollback, lasting, in_training, may_load)
        try:
            with no_collections():
                return self._restore(loaded, unproven)
        except BaseException as error:  # a start that failed leaves what was there before
            if isinstance(error, StorageError) and not error.lasting:
                self._rank.attempt.take_back()
            self._withdraw()
            raise

    def _restore(self, loaded: LoadedCheckpoint, unproven: bool) -> int | None:
        begin, rank = time.perf_counter(), self._rank
        described, near, self._pacer, kept = meet(rank)
        self.events.end_part("meet")
        shard = self._shard = Shard(
            self.config, self.topology, self.group, arenas=rank.arenas, events=self.events, described=described,
            pacer=self._pacer, locality=near, tell_copying=self._protection.tell_copying,
            redundancy=self._protection.redundancy,
        )  # fmt: skip
        now = load(rank, shard, described, loaded, unproven)
        freed = free_pinned()
        # After the load: to make room this gives up slots of old arenas, which the load may have read.
        there = now.snapshot if now.in_memory else None
        shard.lay_out(there, self._protection, now.cast)
        self.events.end_part("lay_out")
        self._snapshots = SnapshotDriver(rank, shard, self._pacer, kept)
        iteration = now.snapshot.iteration if now.snapshot is not None else None
        self._boundary = -1 if iteration is None else iteration
        self._snapshots.begin(now.lineage, now.snapshot, now.in_memory, now.rebuilt)
        # From here on a rank that is stopped for long breaks nothing: the framework's own groups wait for it too.
        rank.group.outlast_stalls()
        rank.attempt.trains()
        if self.topology.rank == 0:  # which speaks for all
            self._open_job.begin(self.node_dir, self._boundary)
        shard.supply()
        freed.join(PINNED_SECS)
        self.events.end_part("begin")
        parts: defaultdict[str, float] = defaultdict(float)  # of a load that is repeated some come twice
        for (_, start), (name, end) in pairwise([("", begin), *self.events.parts]):
            parts[name] += end - start
        secs, lineage = time.perf_counter() - begin, now.lineage.hex()
        self.events.emit(
            "restored", iteration=iteration, lineage=lineage, source=now.source, blocked_secs=secs,
            part_secs=parts, ends=rank.attempt.ends,
        )  # fmt: skip
        self.events.announce(
            f"job {self.config.job}, {len(self.topology.members)} ranks: {now.where}, in {secs:.1f} s"
        )
        return iteration

    def fence(self) -> None:
        """Call before stepped state changes; returns at once unless a copy is unfinished."""
        if self._is_copy:
            return
        self._state.has_stepped = True
        self._open_job.fence()
        if self._snapshots is not None and self._snapshots.kept is not None:
            self._snapshots.kept.pass_by()
        self._fence()
        self._fenced = True

    def step(self, iteration: int) -> None:
        """The boundary of ``iteration``: optimizer, scheduler and counters have advanced, no batch is drawn.

        Raises:
            ConfigError: ``restore`` was not called, or ``iteration`` is no whole number.
            SilentCorruptionError: only under ``on_corruption: abort``, on all ranks.
            FtckptError: only under ``on_error: raise``; where a snapshot did not come to storage, on all ranks at the
                same boundary.
        """
        snapshots = self._snapshots
        if self._is_copy:
            return
        if snapshots is None:
            raise ConfigError("step() before restore(): call restore() once, on a first start too")
        try:
            iteration = index(iteration)
        except TypeError:
            raise ConfigError(
                f"step(): the iteration is {iteration!r}: give the number of the one that has ended"
            ) from None
        self._protection.is_set_up = True
        self._boundary = iteration
        if not self._closed:
            snapshots.execute(self._state.passes(iteration))
        self._open_job.step(iteration)
        if self.off or self._closed:
            self._let_go()
            self._tell_counts()
            self.phase("start")
            return
        if not self._fenced:  # by a script that calls none: at the latest here, where the next snapshot begins
            self._fence()
        self._fenced, begin = False, time.perf_counter()
        if snapshots.kept is not None:
            snapshots.kept.keep(iteration, self.training_state.save_objects)
        assert self._pacer is not None
        self._pacer.boundary(flushing=self._state.flushes.current is not None)
        try:
            snapshots.boundary(iteration, begin)
        except SilentCorruptionError:  # nothing that training goes on from here is worth having
            self._tell_counts()
            raise
        except Exception as error:  # noqa: BLE001 - promise 4: training goes on whatever a snapshot does
            snapshots.fail(error)
        finally:
            self._rank.numbers.bounded(time.perf_counter() - begin)
        self._tell_counts()
        self.phase("start")

    def numbers(self, who: str = "") -> dict[str, float]:
        """For charts, by name; counted since ``who`` has asked last. Not collective; takes microseconds.

        ``blocked_ms`` per snapshot and ``blocked_ms_most``: for how long training waited; ``snapshots``, ``skipped``,
        ``failed``: how many; ``copied_bytes_per_sec`` of this rank; ``whole_age``, ``protected_age``: iterations
        since the newest such snapshot, absent where there is none.
        """
        return self._rank.numbers.report(who, self._boundary, self.whole, self.protected)

    def _tell_counts(self) -> None:
        numbers, persisted = self._rank.numbers, self.persisted
        numbers.passed(self._boundary, self._state.interval.spacing, self.whole, self.protected)
        counts = numbers.counts
        counts[HeartbeatGauge.DIFFERING] = self._shard.num_differing if self._shard is not None else 0
        counts[HeartbeatGauge.PERSISTED] = persisted.iteration + 1 if persisted is not None else 0
        if reason := self._state.off_reason:
            reason += "; start the job again when that is mended"
        elif self._shard is not None:
            reason = self._shard.shortage
        counts[HeartbeatGauge.NO_SNAPSHOTS] = int(bool(reason))
        if not self.off or self.topology.rank == 0:  # all ranks are off together
            self._reminder.update(reason)
        self._protection.tell_counts(counts)

    def save_universal(self, path: Path, max_file_bytes: int = MAX_FILE_BYTES, precision: str = "") -> Path:
        """Write the newest snapshot that every rank has sealed to the directory ``path``, which all nodes reach.

        Collective, at a boundary, after ``step``; training waits for it. Each rank writes its own files, of at most
        ``max_file_bytes``. Nothing has the name ``path`` before all of it is on the disk; ``path.partial``, which a
        killed job leaves, is removed by the next call. ``precision`` is the type of weights that are casts of their
        masters (``BF16``), where the snapshot does not say it.

        Raises:
            ConvertError: on all ranks together: no snapshot is whole yet, bytes are damaged, ranks do not agree on
                one tensor, or the destination exists, is full, or is not shared by all nodes.
            RuntimeError: a rank is gone.
        """
        save = UniversalSave(self.group, self.topology, self.node_dir, self.arena, self.events)
        self.pause()
        if self._snapshots is not None:  # training waits anyway: for the newest that can be had
            self._snapshots.settle(deadlines.FENCE_SECS)
        return save.run(path, max_file_bytes, precision)

    def close(self, remove: bool | None = None, done: bool = True) -> None:
        """End: when all ranks have come here the arenas are removed, otherwise they stay for a restart.

        They stay with ``remove=False`` and no other rank is waited for; that is the default while an exception is
        handled, as in a ``finally``, and ``remove=True`` otherwise. A second call does nothing.

        With the arenas removed the job is ``done``: no further attempt of its launcher trains anything, whatever
        becomes of this one. So what must be done at the end, and may fail, comes before. They stay where the last
        snapshot is to be on storage and is not. Not ``done``, training goes on from another state, which undoes what
        memory has: none of it comes to storage.

        Before ``restore`` it removes nothing, and the job is not done.

        Raises:
            StorageError: under ``on_error: raise``, where the last snapshot did not come to storage.
        """
        if self._closed:
            return
        in_error = sys.exc_info()[0] is not None
        remove = not in_error if remove is None else remove
        failure: StorageError | None = None
        if remove:
            remove, failure = self._bring_home(done)
        else:
            self._fence()  # nothing more is trained: the last snapshot is good
        # Where nothing was restored either: who only looks at a state that is there need not train.
        if self._boundary < 0 and not in_error and done:
            self.events.announce(
                "step() was never called: no snapshot was taken of this training"
                if self._snapshots is not None
                else "close() before restore(): no snapshot was taken, and what earlier starts left in memory stays; "
                f"remove it with 'ftckpt clean {self.config.job}'"
            )
        arena = self.arena
        self._stop()
        if remove and self._shard is not None:
            try:
                self._rank.links.part(lambda: self._leave(arena, done))
                if done and self._boundary >= 0:
                    self.events.announce(self._last_words())
            except (LaunchError, RuntimeError, OSError) as error:
                self._close_error = str(error)
        if arena is not None:
            arena.close()
        self._rank.arenas.release()
        self.events.emit("closed", iteration=self._boundary, error=self._close_error)
        self.events.close()
        if failure is not None:
            raise failure

    def _bring_home(self, done: bool) -> tuple[bool, StorageError | None]:
        """What is not on storage when memory goes is lost: whether it may go, and what is to be raised."""
        if not done or self._snapshots is None or not self._rank.storage.wants_last:
            return True, None
        if not (problem := self._persist_last()):
            return not self.group.broken, None
        text = (
            f"the last snapshot did not come to storage: {problem}; memory keeps it: {save_command(self.config)}, or "
            "a start under this name, which goes on from it"
        )
        if self.config.on_error == "raise":
            return False, StorageError(text, lasting=True)
        self.events.announce(text)
        return False, None

    def _persist_last(self) -> str:
        """Why the last snapshot is not on storage; empty where it is."""
        shard, snapshots = self._shard, self._snapshots
        assert shard is not None and snapshots is not None
        # Not before the first boundary of this attempt.
        boundary = self._boundary if self._protection.is_set_up else -1
        rank = RankShutdownReport(
            self.config, self.events, self._state, self._protection, shard=shard, kept=snapshots.kept,
            boundary=boundary, begin=snapshots.take,
        )  # fmt: skip
        try:
            try:
                self._fence()
            except FtckptError as error:  # told already; all ranks go on together to what is left
                self._close_error = str(error)
            self.pause()
            return self._rank.links.meet("save", lambda: self._rank.storage.bring_last(rank))
        except (FtckptError, RuntimeError) as error:
            self._close_error = str(error)
            return f"whether it is there is not known ({error})"

    def _leave(self, arena: Arena | None, done: bool) -> None:
        def agreed() -> None:
            if done:
                self._rank.attempt.finish(self._boundary)

        self._rank.arenas.leave(arena, agreed, self._protection.smp.end)

    def _last_words(self) -> str:
        text = f"the job has ended after iteration {self._boundary}, and its memory is given back"
        if self.config.persist:
            return text
        return f"{text}; without --ftckpt-persist none of it comes to storage by itself"

    def _stop(self) -> None:
        # In this order: copies stop before the arena that they write can go.
        self._closed = True
        self._open_job.close()
        if self._snapshots is not None:
            self._snapshots.kept = None
        for part in (self.capture, self._pacer, self._protection):
            if part is not None:
                part.close()

    def _abandon(self) -> None:
        """In a child of the process that trains this is a copy, and does nothing."""
        self._closed = self._is_copy = True

    def _let_go(self) -> None:
        """Off, and a boundary later, behind the last proof: training's memory is training's alone."""
        if self._snapshots is not None and self._pacer is not None and self._snapshots.let_go():
            self._pacer.close()

    def _withdraw(self) -> None:
        """The start was refused: it leaves what was there before."""
        arena = self.arena
        self._stop()
        if arena is not None:
            arena.close()
        self._rank.arenas.withdraw()
        self.events.close()

    def _fence(self) -> None:
        self.phase("fence")
        if self.off or self._closed:
            return
        if self._snapshots is not None:
            self._snapshots.require_calls()
            self._snapshots.fence()
        self.phase("optimizer")


_REPEAT_SECS = 60.0


class Reminder:
    """Repeats in the log, once a minute, why this rank takes no snapshots: what a failure would lose grows."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._next_secs: float | None = None

    def update(self, reason: str) -> None:
        """Training is at a boundary; ``reason`` is empty where snapshots are taken."""
        now_secs = time.monotonic()
        if not reason:
            self._next_secs = None
        elif self._next_secs is None:  # the first time the cause itself is logged
            self._next_secs = now_secs + _REPEAT_SECS
        elif now_secs >= self._next_secs:
            self._next_secs = now_secs + _REPEAT_SECS
            self._events.warn(f"no snapshots are taken: {reason}")
