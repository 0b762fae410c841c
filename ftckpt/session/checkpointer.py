"""The facade of a session: construct, ``restore``, then ``fence`` and ``step`` in each iteration, ``close``."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from functools import partial
from itertools import pairwise
from operator import index
from pathlib import Path

from ftckpt import forks
from ftckpt.capture.capture import Capture
from ftckpt.config import Config
from ftckpt.errors import ConfigError, FtckptError, LaunchError, SilentCorruptionError, StorageError
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
from ftckpt.session import deadlines
from ftckpt.session.gc_pause import no_collections
from ftckpt.session.rank_context import RankContext
from ftckpt.session.reminders import OpenJob, Reminder, save_command
from ftckpt.session.save import MAX_FILE_BYTES, UniversalSave
from ftckpt.session.shard import Shard
from ftckpt.session.shutdown import LastFlush
from ftckpt.session.snapshot_driver import SnapshotDriver
from ftckpt.session.start import LoadResult, load, meet


class Checkpointer:
    """Snapshots of one rank, coordinated with all other ranks. Only the training thread calls its methods.

    Construction, ``restore``, ``step`` and ``close`` are collective. Call ``restore`` once; then, in each iteration,
    ``fence`` before the first write to optimizer-updated state and ``step`` at the step boundary; then ``close``
    when training is done (not after an error: a restart needs the snapshots). ``phase`` reports the position in
    the schedule, so that copies run in its windows.

    ``ftckpt.session.start`` does the work before the first boundary, ``SnapshotDriver`` the work at fences and
    boundaries.

    Args:
        config: ``job`` and ``node`` must not be empty.
        state: the training state to save; see TrainingState.
        topology: the coordinates and the node of every rank.
        group: all ranks; a new group if not given.
        run: the launcher run that restarts this process; given to one of the ranks that it started on this node.

    Raises:
        ConfigError: ``job`` or ``node`` is empty; the directory for events cannot be written.
    """

    def __init__(
        self, config: Config, state: TrainingState, topology: Topology, group: Group | None = None,
        run: LauncherRun | None = None,
    ) -> None:  # fmt: skip
        rank = self.rank = RankContext.attach(config, state, topology, group, run or LauncherRun(""))
        """The parts of this rank's session."""
        self.config, self.topology, self.events, self.group = rank.config, topology, rank.events, rank.group
        self.training_state = state
        self.snapshots: SnapshotDriver | None = None
        """This rank's snapshots; None before ``restore``."""
        self._boundary = -1  # the iteration of the last step boundary
        self._closed = self._is_copy = False
        forks.trains(self._abandon)
        self._open_job = OpenJob(config)
        self._fenced = False  # since the last boundary
        self._close_error: str | None = None
        self._reminder = Reminder(self.events)

    @property
    def off(self) -> bool:
        """Whether ftckpt has turned itself off: training continues without snapshots."""
        return self.rank.state.off

    @property
    def begun(self) -> int:
        """The iteration of the last snapshot that this rank started; -1: none."""
        return self.snapshots.begun if self.snapshots is not None else -1

    @property
    def committed(self) -> SnapshotId | None:
        """The newest snapshot that all ranks are known to have sealed."""
        return self.rank.state.committed

    @property
    def protected(self) -> SnapshotId | None:
        """The newest snapshot whose parity is complete on all nodes; None if there is none, or no protection."""
        return self.rank.state.targets.protected

    @property
    def persisted(self) -> SnapshotId | None:
        """The newest snapshot that this attempt persisted; None if there is none."""
        return self.rank.state.flushes.persisted

    @property
    def arena(self) -> Arena | None:
        """The arena of this rank's snapshots; None before ``restore``, or if no arena could be allocated."""
        return self.snapshots.arena if self.snapshots is not None else None

    @property
    def capture(self) -> Capture | None:
        """The copier of this rank's shard into its arena; None as ``arena``."""
        return self.snapshots.capture if self.snapshots is not None else None

    @property
    def node_dir(self) -> Path:
        """The directory of this node's arenas; valid after ``restore``."""
        return self.rank.arenas.path

    def phase(self, kind: str) -> None:
        """Enter a part of the iteration: a kind of ``ftckpt.schedule.iteration``. Takes microseconds, and some
        hundred of them once per snapshot.

        Raises:
            Exception: only under ``on_error: raise``: the error of a vote that failed.
        """
        if self.snapshots is not None and not self._closed:
            self.rank.protection.beat(self._boundary, kind)
            if not self.off:
                self.snapshots.scheduler.enter(kind)
                # The other ranks' votes arrive while this rank computes. A vote that is posted only at the fence
                # makes the boundary that follows at once wait for the whole all-reduce.
                if kind in COMPUTE:
                    self.snapshots.post_if_known()

    def pause(self) -> None:
        """Pause until the next ``phase``, as for an evaluation or a save. Takes microseconds.

        The paused time does not count as a cost of snapshots.
        """
        if self.snapshots is not None and not self._closed:
            self.rank.protection.beat(self._boundary, "pause")
            if not self.off:
                self.snapshots.scheduler.pause()

    def restore(
        self, newer_than: int = -1, rollback: bool = False, lasting: bool = True, *, may_load: bool = False,
        in_training: bool = False,
    ) -> int | None:  # fmt: skip
        """Restore the newest committed snapshot; returns its iteration, or None if the state stays as it is.

        Call it once before the first ``step``, on a first start too: it allocates the arena.

        Args:
            newer_than: the iteration of the checkpoint that the script has already loaded; -1: none. The newer of it
                and memory is used. If storage had a newer one at an earlier start, the user rolled back: it is used.
            rollback: the operator named that iteration: it is used, and memory is invalidated. Restarts that name
                the same iteration resume from memory.
            lasting: False if that checkpoint can vanish with a node: loading an older one is then no rollback.
            may_load: the script may load a checkpoint after this call, which is used if snapshots prove to be lost:
                slots are verified before anything is written.
            in_training: the script loaded ``newer_than`` while it trained, or restarted from the beginning: that
                state is used, and no later start restores what memory and storage have.

        Raises:
            ConfigError: called twice or after ``close``; ``newer_than`` is no integer, or missing for a rollback.
            LostError, MismatchError, MemoryBudgetError, ArenaError, UnsupportedError: on all ranks together.
            StorageError: on all ranks together; the snapshot is on storage, which is unreachable.
        """
        if self.snapshots is not None:
            raise ConfigError("restore() was called twice")
        if self._closed:
            raise ConfigError("restore() was called after close(): attach the training state again")
        newer_than = _integer(newer_than, "restore(): newer_than")
        if rollback and newer_than <= 0:
            raise ConfigError("restore(): rollback needs newer_than: pass the iteration of the loaded checkpoint")
        loaded = LoadedCheckpoint(newer_than, rollback, lasting, in_training, may_load)
        try:
            with no_collections():
                return self._restore(loaded)
        except BaseException as error:  # a failed start leaves memory as it was
            if isinstance(error, StorageError) and not error.lasting:
                self.rank.attempt.take_back()
            self._withdraw()
            raise

    def _restore(self, loaded: LoadedCheckpoint) -> int | None:
        begin, rank = time.perf_counter(), self.rank
        described, scheduler, kept = meet(rank)
        self.events.end_part("meet")
        shard = Shard(rank, described, scheduler)
        snapshots = self.snapshots = SnapshotDriver(rank, shard, scheduler, kept)
        now = load(rank, shard, loaded)
        freed = free_pinned()
        # After the load: this may free slots of old arenas, which the load reads.
        shard.lay_out(now.snapshot if now.in_memory else None, now.cast)
        self.events.end_part("lay_out")
        iteration = now.snapshot.iteration if now.snapshot is not None else None
        self._boundary = -1 if iteration is None else iteration
        snapshots.begin(now.lineage, now.snapshot, now.in_memory, now.rebuilt)
        # From here on a stalled rank must not break the group: the framework's own groups wait for it, too.
        rank.group.outlast_stalls()
        rank.attempt.trains()
        if self.topology.rank == 0:  # one log line per job
            self._open_job.begin(self.node_dir, self._boundary)
        shard.supply()
        freed.join(PINNED_SECS)
        self.events.end_part("begin")
        self._report_restored(now, iteration, begin)
        return iteration

    def _report_restored(self, now: LoadResult, iteration: int | None, begin: float) -> None:
        parts: defaultdict[str, float] = defaultdict(float)  # a repeated load has some parts twice
        for (_, start), (name, end) in pairwise([("", begin), *self.events.parts]):
            parts[name] += end - start
        secs = time.perf_counter() - begin
        self.events.emit(
            "restored", iteration=iteration, lineage=now.lineage.hex(), source=now.source, blocked_secs=secs,
            part_secs=parts, ends=self.rank.attempt.ends,
        )  # fmt: skip
        self.events.announce(
            f"job {self.config.job}, {len(self.topology.members)} ranks: {now.where}, in {secs:.1f} s"
        )

    def fence(self) -> None:
        """Wait for unfinished copies. Call it before optimizer-updated state changes, in each iteration."""
        if self._is_copy:
            return
        self._open_job.fence()
        if self.snapshots is not None and self.snapshots.kept is not None:
            self.snapshots.kept.pass_by()
        self._fence()
        self._fenced = True

    def step(self, iteration: int) -> None:
        """Mark the step boundary of ``iteration``: optimizer, scheduler and counters have advanced, and the next
        batch is not drawn yet.

        Raises:
            ConfigError: ``restore`` was not called, or ``iteration`` is not an integer.
            SilentCorruptionError: only under ``on_corruption: abort``, on all ranks.
            FtckptError: only under ``on_error: raise``; a failed flush raises on all ranks at the same boundary.
        """
        snapshots = self.snapshots
        if self._is_copy:
            return
        if snapshots is None:
            raise ConfigError("step() before restore(): call restore() once, on a first start too")
        iteration = _integer(iteration, "step(): the iteration")
        last, self._boundary = self._boundary, iteration
        self._open_job.step(iteration)
        if not self._closed:
            self.rank.protection.beat(iteration, "step")  # the others may wait for each other in this call
            snapshots.execute(self.rank.state.check_order(last, iteration))
        try:
            if self.off or self._closed:
                snapshots.release()
            else:
                self._take_snapshot(snapshots, iteration)
        finally:
            self._publish_counts()
        self.phase("start")

    def _take_snapshot(self, snapshots: SnapshotDriver, iteration: int) -> None:
        if not self._fenced:  # the script called no fence(): copies must end before the next snapshot starts
            self._fence()
        self._fenced, begin = False, time.perf_counter()
        if snapshots.kept is not None:
            snapshots.kept.keep(iteration, self.training_state.save_objects)
        flushes, target = self.rank.state.flushes, self.rank.state.targets.target
        snapshots.scheduler.boundary(flushes.current is not None, target.iteration if target is not None else -1)
        try:
            snapshots.boundary(iteration, begin, self._open_job.num_fences > 0)
        except SilentCorruptionError:  # the job must end: its state may be corrupt
            raise
        except Exception as error:  # noqa: BLE001 - promise 4: training continues whatever a snapshot does
            snapshots.fail(error)
        finally:
            self.rank.numbers.bounded(time.perf_counter() - begin)

    def numbers(self, who: str = "") -> dict[str, float]:
        """Metrics by name, counted since the last call with the same ``who``. Not collective; takes microseconds.

        ``blocked_ms``: training's wait per snapshot, ``blocked_ms_most``: the longest one; ``snapshots``,
        ``skipped``, ``failed``: how many; ``copied_bytes_per_sec`` of this rank; ``whole_age``, ``protected_age``:
        iterations since the newest committed or protected snapshot, absent if there is none.
        """
        return self.rank.numbers.report(who, self._boundary, self.committed, self.protected)

    def _publish_counts(self) -> None:
        rank, persisted = self.rank, self.persisted
        shard = self.snapshots.shard if self.snapshots is not None else None
        rank.numbers.passed(self._boundary, rank.state.interval.spacing, self.committed, self.protected)
        counts = rank.numbers.counts
        counts[HeartbeatGauge.DIFFERING] = shard.num_differing if shard is not None else 0
        counts[HeartbeatGauge.PERSISTED] = persisted.iteration + 1 if persisted is not None else 0
        reason = shard.shortage if shard is not None else ""
        if rank.state.off_reason:
            reason = f"{rank.state.off_reason}; fix the cause and restart the job"
        counts[HeartbeatGauge.NO_SNAPSHOTS] = int(bool(reason))
        if not self.off or self.topology.rank == 0:  # all ranks are off together
            self._reminder.update(reason)
        rank.protection.publish_counts(counts)

    def save_universal(self, path: Path, max_file_bytes: int = MAX_FILE_BYTES, precision: str = "") -> Path:
        """Write the newest committed snapshot to the directory ``path``, which all nodes must share.

        Collective, at a boundary, after ``step``; training waits for it. Each rank writes its own files, of at most
        ``max_file_bytes``. The directory gets its name ``path`` when all of it is durable; the next call removes the
        ``path.partial`` of a killed job. ``precision`` is the dtype of weights that are casts of their master
        weights (``BF16``), if the snapshot does not record it.

        Raises:
            ConvertError: on all ranks together: no snapshot is committed yet, bytes are corrupt, ranks differ in
                one tensor, or the destination exists, is full, or is not shared by all nodes.
            RuntimeError: a rank is unreachable.
        """
        save = UniversalSave(self.group, self.topology, self.node_dir, self.arena, self.events)
        self.pause()
        if self.snapshots is not None:  # training waits anyway: let the snapshot in flight complete
            self.snapshots.settle(deadlines.FENCE_SECS)
        return save.run(path, max_file_bytes, precision)

    def close(self, remove: bool | None = None, done: bool = True) -> None:
        """End the session. ``remove``: remove the arenas once all ranks have called this; they stay if one does not.

        With ``remove=False`` the arenas stay for a restart, and this waits for no other rank. That is the default
        while an exception is handled, as in a ``finally``; else ``True`` is. A second call does nothing.

        ``done``: the job is complete once its arenas are removed, and its launcher trains nothing in later attempts,
        even if this one fails afterwards: do fallible work before. The arenas stay if the last snapshot must be
        flushed and is not. ``done=False``: training restarts from another state, which invalidates memory; nothing
        is flushed.

        Before ``restore`` this removes nothing and does not complete the job.

        Raises:
            StorageError: under ``on_error: raise``, if the final flush failed.
        """
        if self._closed:
            return
        in_error = sys.exc_info()[0] is not None
        remove = not in_error if remove is None else remove
        failure: StorageError | None = None
        if remove:
            remove, failure = self._bring_home(done)
        else:
            self._fence()  # seals the last snapshot
        # Only if nothing was restored: a script that only evaluates a restored state need not train.
        if self._boundary < 0 and not in_error and done:
            self.events.announce(
                "step() was never called: no snapshot was taken of this training"
                if self.snapshots is not None
                else "close() before restore(): no snapshot was taken, and those of earlier starts stay in memory; "
                f"remove them with 'ftckpt clean {self.config.job}'"
            )
        self._end(remove, done)
        if failure is not None:
            raise failure

    def _bring_home(self, done: bool) -> tuple[bool, StorageError | None]:
        """Flush the last snapshot; returns whether memory may be freed, and the error to raise."""
        if not done or self.snapshots is None or not self.rank.flushes_at_end:
            return True, None
        if not (problem := self._flush_last(self.snapshots)):
            return not self.group.broken, None
        text = (
            f"final flush failed: {problem}; the last snapshot stays in memory: save it with "
            f"{save_command(self.config)}, or start the job again, which resumes from it"
        )
        if self.config.on_error == "raise":
            return False, StorageError(text, lasting=True)
        self.events.announce(text)
        return False, None

    def _flush_last(self, snapshots: SnapshotDriver) -> str:
        """Flush the last snapshot; returns why that failed, empty if it did not."""
        # -1 before the first boundary of this attempt: no snapshot of it is wanted.
        flush = LastFlush(self.rank, snapshots, self._boundary if self._open_job.has_stepped else -1)
        try:
            try:
                self._fence()
            except FtckptError as error:  # logged already; the flush is collective
                self._close_error = str(error)
            self.pause()
            return self.rank.links.meet("save", flush.run)
        except (FtckptError, RuntimeError) as error:
            self._close_error = str(error)
            return f"its outcome is unknown: {error}"

    def _end(self, remove: bool, done: bool) -> None:
        """Release everything, and ``remove`` the arenas."""
        arena, rank = self.arena, self.rank

        def leave() -> None:
            agreed = partial(rank.attempt.finish, self._boundary) if done else lambda: None
            rank.arenas.leave(arena, agreed, rank.protection.smp.end)

        self._stop()
        if remove and self.snapshots is not None:
            try:
                rank.links.part(leave)
                if done and self._boundary >= 0:
                    unsaved = (
                        "" if self.config.persist else "; without --ftckpt-persist nothing is flushed to storage"
                    )
                    text = f"the job has ended after iteration {self._boundary}, and its memory is freed"
                    self.events.announce(text + unsaved)
            except (LaunchError, RuntimeError, OSError) as error:
                self._close_error = str(error)
        if arena is not None:
            arena.close()
        rank.arenas.release()
        self.events.emit("closed", iteration=self._boundary, error=self._close_error)
        self.events.close()

    def _stop(self) -> None:
        # In this order: copies must stop before their arena is closed.
        self._closed = True
        self._open_job.close()
        if self.snapshots is not None:
            self.snapshots.close()
        self.rank.protection.close()

    def _abandon(self) -> None:
        """Make this object inert: it is a copy in a forked child of the training process."""
        self._closed = self._is_copy = True

    def _withdraw(self) -> None:
        """Undo a refused start: memory is left as it was before."""
        arena = self.arena
        self._stop()
        self.snapshots = None
        if arena is not None:
            arena.close()
        self.rank.arenas.withdraw()
        self.events.close()

    def _fence(self) -> None:
        self.phase("fence")
        if self.off or self._closed:
            return
        if self.snapshots is not None:
            self.snapshots.require_calls()
            self.snapshots.fence()
        self.phase("optimizer")


def _integer(value: object, name: str) -> int:
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name} is {value!r}, not an integer: pass the number of an iteration") from None
