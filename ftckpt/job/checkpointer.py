"""The six lines of Python: construct, ``restore``, then ``fence`` and ``step`` in each iteration, ``close``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ftckpt.capture.affinity import Locality, locality
from ftckpt.capture.boundary import LastBoundary
from ftckpt.capture.capture import Capture
from ftckpt.capture.examination import Examination
from ftckpt.config import MEGATRON, Config, taken_over
from ftckpt.errors import (
    ArenaError,
    CaptureError,
    ConfigError,
    FtckptError,
    LaunchError,
    SilentCorruptionError,
    StorageError,
)
from ftckpt.events import Events
from ftckpt.group import Group, gather_each
from ftckpt.job.actions import (
    Action,
    Announcement,
    OldArenaRemoval,
    Skip,
    Take,
    TargetMarks,
    TurnOff,
    WholeMark,
)
from ftckpt.job.agreement import Coverage, Will
from ftckpt.job.arenas import NodeArenas, Sight
from ftckpt.job.attempt import AttemptRecord, AttemptSight
from ftckpt.job.conditions import conditions
from ftckpt.job.garbage import no_collections
from ftckpt.job.last_snapshot import RankEnd
from ftckpt.job.links import Links
from ftckpt.job.losses import Losses
from ftckpt.job.numbers import RankNumbers
from ftckpt.job.protection import Protection
from ftckpt.job.rank_storage import RankStorage
from ftckpt.job.save import MAX_FILE_BYTES, UniversalSave
from ftckpt.job.session import RankState
from ftckpt.job.shard import Shard, corruption_text, device_of, make_pacer
from ftckpt.job.slow_ranks import SlowRanks
from ftckpt.model import objects
from ftckpt.model.loaded import Checkpoint
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import human
from ftckpt.model.topology import Topology
from ftckpt.model.training_state import Description, TrainingState
from ftckpt.restore import prefetch
from ftckpt.restore.restart import Restart
from ftckpt.store.arena import Arena
from ftckpt.store.outcome import LauncherRun
from ftckpt.store.pulse import PulseCount
from ftckpt.windows.cost import Wish
from ftckpt.windows.pacer import Pacer

_POLL_SECS = 0.02


class _Loaded(NamedTuple):
    """The lineage of what follows, what the training state holds now, where it came from in words and in short,
    whether that lies in memory, and ``cast`` as of ``Restart``."""

    lineage: bytes
    snapshot: SnapshotId | None
    where: str
    source: str | None = None
    in_memory: bool = False
    cast: frozenset[str] = frozenset()


class Checkpointer:
    """Snapshots of one rank, agreed with all others. Every method is called by the training thread.

    Construction, ``restore``, ``step`` and ``close`` are collective. The order of calls is ``restore`` once,
    then per iteration ``fence`` before the first write to stepped state and ``step`` at the boundary, then
    ``close`` when training is done (not after an error: the snapshots are needed then). ``phase`` tells where
    in the schedule training is, so that copies find its windows.

    What is to be done ``ftckpt.job.session`` decides; this class does it.

    Args:
        config: ``job`` and ``node`` must be names.
        state: what to save; see TrainingState for who calls what.
        topology: the place and node of every rank.
        group: all ranks; a new one if not given.
        run: what starts this process again when a rank fails; given to one of the ranks that it started here.
        examines: a framework's release that the first iterations are to show to fit.

    Raises:
        ConfigError: ``job`` or ``node`` is empty; the directory for events cannot be written.
    """

    def __init__(
        self, config: Config, state: TrainingState, topology: Topology, group: Group | None = None,
        run: LauncherRun | None = None, *, examines: str = "",
    ) -> None:  # fmt: skip
        if not config.job or not config.node:
            raise ConfigError("job and node: both need a name")
        if config.persist == MEGATRON:
            raise ConfigError(
                "--ftckpt-persist: megatron is for a job that Megatron-LM's own train loop saves; name a directory "
                "or a URL"
            )
        self.topology = topology
        try:
            self.events = Events(config.events_dir, topology.rank, limit_bytes=config.events_bytes)
        except OSError as error:
            raise ConfigError(
                f"--ftckpt-events: {config.events} cannot be written: {error.strerror}; name another directory"
            ) from None
        self._links = Links(config.start_timeout_secs, config.agree_timeout_secs, group)
        self.group = self._links.group
        self.training_state = state
        self._protection = Protection(config, topology, self.group, self.events)
        self.config = config = replace(config, slots=self._protection.slots)
        self._arenas = NodeArenas(
            config, topology, self.group, self.events, self._protection.least_slots,
            protects=self._protection.protects,
        )  # fmt: skip
        # Asked once: a later layout may leave no mode, and its arena must still be made known to the SMP.
        self._protects = self._protection.on
        self._slow_ranks = SlowRanks(config, topology)
        self._numbers = RankNumbers()
        self._state = RankState(config, self._protection.protects, self._slow_ranks)
        self._pacer: Pacer | None = None
        self._shard: Shard | None = None
        self._boundary = -1  # the iteration of the last one
        self._kept: LastBoundary | None = None  # of that one, where the last snapshot is to come to storage
        self._closed = False
        self._fenced = False  # since the last boundary
        self._attempt = AttemptRecord(config, topology, run or LauncherRun(""), self.events)
        self._storage = RankStorage(config, self.group, self.events, self._protection, self._state)
        self._examination = Examination(examines) if examines else None
        self._losses = Losses(self._links, self._state, self.events)
        self.begun = -1
        """The iteration of the last snapshot that this rank has begun; -1: none."""
        self.saved = -1
        """The iteration that a framework has saved by itself, so that it need not come to storage at the end."""

    @property
    def off(self) -> bool:
        """Whether ftckpt has turned itself off: training goes on without snapshots."""
        return self._state.off

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
    def persisting(self) -> SnapshotId | None:
        """The snapshot that is on its way to storage; None where none is."""
        return self._state.flushes.current

    def has_smp(self, timeout_secs: float) -> bool:
        """Whether this node's SMP knows what to do, now or within ``timeout_secs``: it starts beside training."""
        deadline = time.monotonic() + timeout_secs
        while not (guards := self._protection.smp_guards) and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)
        return guards

    def bring(self, iteration: int) -> None:
        """The snapshot of ``iteration``, which is under way, is to go to storage. All ranks call it, or none."""
        self._state.flushes.ask(iteration)

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
        return self._arenas.path

    def phase(self, kind: str) -> None:
        """Training comes to a part of the iteration: a kind of ``ftckpt.windows.iteration``. Takes microseconds."""
        if self._pacer is not None and not self._closed:
            self._protection.beat(self._boundary, kind)
            if not self.off:
                self._pacer.enter(kind)

    def beat(self, evaluates: bool = False) -> None:
        """A sign of life, for a script that is busy with something else than training for long. Takes microseconds.

        ``evaluates``: training pauses for an evaluation, which ends with its next phase.
        """
        if evaluates:
            self._pause()
        self._protection.pause(evaluates)

    def section(self, name: str) -> AbstractContextManager[None]:
        """Training pauses for an ``evaluation``, a ``save`` or a ``load``, which may be silent for longer than an
        iteration; how long is learnt from those that were seen. Sections may lie in each other.

        Ranks that wait for one that pauses must be in the section too, up to the barrier at which they meet.

        Raises:
            ConfigError: another name.
        """
        self._pause()
        return self._protection.section(name)

    def _pause(self) -> None:
        if self._pacer is not None and not self._closed and not self.off:
            self._pacer.pause()

    def expect(self, kinds: Sequence[str], lengths: Sequence[float]) -> None:
        """A model of the schedule: its ``kinds`` of places between the schedule's begin and the fence, and their
        relative lengths. Copies go by it until the places were measured."""
        if self._pacer is not None:
            self._pacer.expect(kinds, lengths)

    def restore(
        self, newer_than: int = -1, rollback: bool = False, lasting: bool = True, *, may_load: bool = False
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

        Raises:
            LostError, MismatchError, MemoryBudgetError, ArenaError, UnsupportedError: on all ranks together.
            StorageError: likewise; what is to be restored lies on storage, and that is away.
        """
        if self._shard is not None:
            raise ConfigError("restore() was called twice")
        if rollback and newer_than <= 0:
            raise ConfigError(
                "restore: rollback goes back to newer_than, the iteration that was loaded; give it, too"
            )
        unproven = not may_load or self.config.on_lost != "storage"
        try:
            with no_collections():
                return self._restore(Checkpoint(newer_than, rollback, lasting=lasting), unproven)
        except BaseException as error:
            if isinstance(error, StorageError) and not error.lasting:
                self._attempt.take_back()
            self._withdraw()
            raise

    def _restore(self, loaded: Checkpoint, unproven: bool) -> int | None:
        begin = time.perf_counter()
        self.events.emit("joined", job=self.config.job, node=self.topology.me.node)
        if self.topology.is_node_leader:
            self.events.emit("conditions", node=self.topology.me.node, **conditions())
        prefetch.pause()
        # Before anything is read: from here on no other attempt writes these arenas.
        self._arenas.enter()
        self._protection.smp.tell_hazards(self._arenas.path)
        described, near = self._meet()
        assert self._pacer is not None
        shard = self._shard = Shard(
            self.config, self.topology, self.group, arenas=self._arenas, events=self.events, described=described,
            pacer=self._pacer, locality=near, redundancy=self._protection.redundancy,
        )  # fmt: skip
        now = self._load(shard, described, loaded, unproven)
        # After the load: to make room this gives up slots of old arenas, which the load may have read.
        there = now.snapshot if now.in_memory else None
        shard.lay_out(there, self._protection if self._protects else None, now.cast)
        self._begin(now.lineage, now.snapshot, now.in_memory)
        self._attempt.keep()
        shard.supply()
        iteration = now.snapshot.iteration if now.snapshot is not None else None
        secs, lineage = time.perf_counter() - begin, now.lineage.hex()
        self.events.emit("restored", iteration=iteration, lineage=lineage, source=now.source, blocked_secs=secs)
        self.events.announce(
            f"job {self.config.job}, {len(self.topology.members)} ranks: {now.where}, in {secs:.1f} s"
        )
        return iteration

    def _meet(self) -> tuple[Description, Locality]:
        """All ranks are there, see what they are to see, and are prepared. Collective."""
        prepared: list[tuple[Description, Locality]] = []

        def prepare() -> None:
            prepared.append(self._prepare())

        places, attempts, _ = gather_each(
            self.group, (self._arenas.look, Sight), (lambda: self._attempt.look(self._arenas.path), AttemptSight),
            (prepare, type(None)),
        )  # fmt: skip
        self._arenas.require_one_directory(places)
        self._attempt.begin(attempts)
        return prepared[0]

    def _prepare(self) -> tuple[Description, Locality]:
        """What this rank does by itself before the first look at what is there."""
        self._storage.prepare()
        described = self.training_state.describe()
        if self._storage.wants_last:
            self._kept = LastBoundary(described)
        self._check_objects()
        device = device_of(described)
        near = locality(self.config.affinity, device)
        self._arenas.cores = near.cores
        self._pacer = make_pacer(self.config, self.topology, device, self._arenas.path, self.events)
        return described, near

    def _check_objects(self) -> None:
        """What cannot be saved is an error at start, not at each snapshot of a job that trains."""
        needed, room = len(objects.encode(dict(self.training_state.save_objects()))), self.config.objects_mib << 20
        if needed > room:
            raise ConfigError(
                f"objects need {needed} bytes, objects_mib {self.config.objects_mib} gives {room}; raise objects_mib"
            )

    def fence(self) -> None:
        """Call before stepped state changes; returns at once unless a copy is unfinished."""
        self._state.stepped()
        if self._examination is not None:
            self._examination.fenced(self.capture)
        if self._kept is not None:
            self._kept.pass_by()
        self._fence()
        self._fenced = True

    def step(self, iteration: int) -> None:
        """The boundary of ``iteration``: optimizer, scheduler and counters have advanced, no batch is drawn.

        Raises:
            ConfigError: ``restore`` was not called.
            UnsupportedError: in the first iterations: the framework's release does not fit.
            SilentCorruptionError: only under ``on_corruption: abort``, on all ranks.
            FtckptError: only under ``on_error: raise``; where a snapshot did not come to storage, on all ranks at the
                same boundary.
        """
        if self._pacer is None:
            raise ConfigError("step() before restore(): call restore() once, on a first start too")
        self._protection.is_set_up = True
        self._boundary = iteration
        self._attempt.trains()
        if self._examination is not None:
            self._examination.bounded()
        if self.off or self._closed:
            self._let_go()
            self._tell_counts()
            self.phase("start")  # a sign of life: what trains without snapshots is no hang
            return
        if self._state.undoes(iteration):
            self._go_back(iteration)
            return
        if not self._fenced:  # by a script that calls none: at the latest here, where the next snapshot begins
            self._fence()
        self._fenced, begin = False, time.perf_counter()
        if self._kept is not None:
            self._kept.keep(iteration, self.training_state.save_objects)
        self._pacer.boundary(flushing=self._state.flushes.current is not None)
        try:
            self._act(iteration, begin)
        except SilentCorruptionError:  # nothing that training goes on from here is worth having
            self._tell_counts()
            raise
        except Exception as error:  # noqa: BLE001 - promise 4: training goes on whatever a snapshot does
            self._fail(error)
        finally:
            self._numbers.bounded(time.perf_counter() - begin)
        if self._examination is not None and self.capture is not None and self.begun == iteration:
            self._examine(self._examination, self.capture)
        self._tell_counts()
        self.phase("start")

    def numbers(self, who: str = "") -> dict[str, float]:
        """For charts, by name; counted since ``who`` has asked last. Not collective; takes microseconds.

        ``blocked_ms`` per snapshot and ``blocked_ms_most``: for how long training waited; ``snapshots``, ``skipped``,
        ``failed``: how many; ``copied_bytes_per_sec`` of this rank; ``whole_age``, ``protected_age``: iterations
        since the newest such snapshot, absent where there is none; ``restarts`` of the job so far.
        """
        attempt = self._attempt.record.number if self._attempt.record is not None else 1
        return self._numbers.report(who, self._boundary, self.whole, self.protected, attempt)

    def _tell_counts(self) -> None:
        counts, persisted = self._numbers.counts, self.persisted
        counts[PulseCount.SLOW] = int(self._slow_ranks.has_me and not self.off)
        counts[PulseCount.DIFFERING] = self._shard.num_differing if self._shard is not None else 0
        counts[PulseCount.PERSISTED] = persisted.iteration + 1 if persisted is not None else 0
        counts[PulseCount.COMPUTE_US] = round(self._slow_ranks.compute_secs * 1e6)
        self._protection.tell_counts(counts)

    def _act(self, iteration: int, begin: float) -> None:
        if self._state.lost:
            self._search(iteration)
        elif self._state.boundary(iteration):
            self._snapshot(iteration, begin)
        else:
            self._post()
            if self._pacer is not None:
                self._pacer.learn()

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
        with self.section("save"):
            return save.run(path, max_file_bytes, precision)

    def close(self, remove: bool | None = None, done: bool = True) -> None:
        """End: when all ranks have come here the arenas are removed, otherwise they stay for a restart.

        They stay with ``remove=False`` and no other rank is waited for; that is the default while an exception is
        handled, as in a ``finally``, and ``remove=True`` otherwise. A second call does nothing.

        With the arenas removed the job is ``done``: no further attempt of its launcher trains anything, whatever
        becomes of this one. So what must be done at the end, and may fail, comes before.

        Raises:
            StorageError: under ``on_error: raise``, where the last snapshot did not come to storage; the arenas stay.
        """
        if self._closed:
            return
        in_error = sys.exc_info()[0] is not None
        remove = not in_error if remove is None else remove
        failure: StorageError | None = None
        if remove and self._shard is not None and self._storage.wants_last:
            failure = self._persist_last(done)
            # Otherwise it stays for the next attempt, or for 'ftckpt save'.
            remove = failure is None and not self.group.lost
        elif not remove:
            self._fence()  # nothing more is trained: the last snapshot is good
            if self._state.lost:
                self._links.stop("a rank has ended")
        arena = self.arena
        self._stop()
        if failure is None and not in_error:
            self._attempt.end()  # while no other attempt can have begun
        if remove and self._shard is not None:
            try:
                self._links.part(lambda: self._leave(arena, done))
            except (LaunchError, RuntimeError, OSError) as error:
                self.events.emit("close_incomplete", error=str(error))
        if arena is not None:
            arena.close()
        self._arenas.release()
        self.events.emit("closed", iteration=self._boundary)
        self.events.close()
        if failure is not None:
            raise failure

    def _persist_last(self, done: bool) -> StorageError | None:
        """What is not on storage when memory goes is lost; where that is to be an error it is returned."""
        assert self._shard is not None
        # Not where training goes on from another state, and nowhere before the first boundary of this attempt.
        boundary = self._boundary if done and self._protection.is_set_up else -1
        rank = RankEnd(
            self.config, self.events, self._state, self._protection, shard=self._shard, kept=self._kept,
            boundary=boundary, saved=self.saved, begin=self._take,
        )  # fmt: skip
        try:
            try:
                self._fence()
            except FtckptError as error:  # told already; all ranks go on together to what is left
                self.events.emit("close_incomplete", error=str(error))
            with self.section("save"):
                return self._links.meet("save", lambda: self._storage.bring_last(rank))
        except (FtckptError, RuntimeError) as error:
            self.events.emit("close_incomplete", error=str(error))
        return None

    def _leave(self, arena: Arena | None, done: bool) -> None:
        def agreed() -> None:
            if done:
                self._attempt.finish(self._boundary)

        self._arenas.leave(arena, agreed, self._protection.smp.end)

    def _stop(self) -> None:
        # In this order: copies stop before the arena that they write can go.
        self._closed, self._kept = True, None
        for part in (self.capture, self._pacer, self._protection):
            if part is not None:
                part.close()

    def _let_go(self) -> None:
        """Off, and a boundary later, behind the last proof: training's memory is training's alone."""
        if self._shard is not None and self._pacer is not None and self._shard.let_go():
            self._kept = None
            self._pacer.close()

    def _withdraw(self) -> None:
        """The start was refused: it leaves what was there before."""
        arena = self.arena
        self._stop()
        if arena is not None:
            arena.close()
        self._arenas.withdraw()
        self.events.close()

    def _load(self, shard: Shard, described: Description, loaded: Checkpoint, unproven: bool) -> _Loaded:
        restart = Restart(
            self.group,
            self.topology,
            self._arenas.path,
            self.events,
            storage=self._storage.snapshots,
            slots=self.config.slots,
            job=self.config.job,
        )
        try:
            reshapes, before = self.training_state.reshapes, self.config.restore_before
            decision = restart.choose(self.config.on_lost, loaded, reshapes, before, unproven)
            self._arenas.origin = restart.origin
            # Before anybody trains: a kill behind that must not find a newer slot to go on from.
            lineage = restart.void_newer(decision)
            if decision is not None:
                decision = restart.load(decision, self.training_state, described)
            # Behind the load, which may find that something is bad. What Megatron has saved needs no saving anew.
            saved = loaded.iteration if taken_over(self.config.persist) else -1
            self._state.flushes.begin(max(restart.on_storage, saved))
            self._expect_failures(restart)
            if decision is None:
                return _Loaded(lineage, None, loaded.as_begin(restart.why))
            shard.capacities = restart.capacities(decision)
            snapshot, source = decision.snapshot, restart.source
            where = f"iteration {snapshot.iteration} from {source}{loaded.beside(self.config.job)}"
            return _Loaded(lineage, snapshot, where, source, restart.in_memory, restart.cast)
        finally:
            restart.close()
            self._tell_prefetched()

    def _tell_prefetched(self) -> None:
        if (read := prefetch.end()) is not None:
            self.events.emit("prefetched", iteration=read.iteration, bytes=read.bytes, secs=read.secs)
            self.events.announce(
                f"{human(read.bytes)} of iteration {read.iteration} on storage were read while ranks started, in "
                f"{read.secs:.1f} s"
            )

    def _expect_failures(self, restart: Restart) -> None:
        """By how earlier attempts have ended: how often snapshots go to storage follows from it."""
        attempt, protection = self._attempt, self._protection
        rates = attempt.learn(
            self.group.name, on_storage=restart.last, lost=restart.lost, taken_back=restart.taken_back
        )
        self._state.flushes.expect(rates, protection.survives_nodes)
        protection.smp.failures = attempt.record

    def _begin(self, lineage: bytes, restored: SnapshotId | None, in_memory: bool) -> None:
        """Snapshots begin, in the arenas as they are laid out."""
        self._boundary = restored.iteration if restored is not None else -1
        self._state.begin(lineage, restored, time.monotonic(), in_memory)
        if self.arena is None or not self._protects:
            self._protection.show(self._arenas.path)
            if self.config.on_hang == "abort":
                self.events.announce(
                    "on_hang abort does nothing: SMPs watch, and none runs where nothing is protected"
                )
            return
        self._state.take_over(*self._protection.survey(restored))
        self._mark_arrangement()

    def _mark_arrangement(self) -> None:
        """Marks go to the arena as it is laid out. No mode may be left where no replica set spans nodes: what no
        parity guards must never be called protected."""
        if self._protection.protects:
            self._protection.mark(self._state.marks)
        else:
            self._execute(self._state.not_protected())

    def _go_back(self, iteration: int) -> None:
        """The script has loaded an older state: what it undid must not come back at a restart."""
        self._execute([self._state.went_back(iteration)])
        if self.capture is None:
            return
        # First: the SMP makes no more of it. What it has made, or is at, stays until the next start: once the last
        # rank has voided its slots nothing can be rebuilt around packages and parity, and they are no sign of a loss.
        # A kill before that is one before training went back: what ranks have voided by then parity may bring back.
        self.capture.arena.control.mark_target(None)
        self.capture.arena.control.mark_flush(None)
        self.capture.forget(iteration)

    def _fence(self) -> None:
        """Once per snapshot: wait for its copies, and post what this rank has if that is known by then."""
        self.phase("fence")
        if self.off or self._closed:
            return
        if self._state.owes_round:
            begin = time.perf_counter()
            # Both: where copies have failed the others must learn it.
            for action in (self._wait_for_copies, self._post):
                try:
                    action()
                except Exception as error:  # noqa: BLE001 - promise 4: training goes on whatever a snapshot does
                    self._fail(error)
            self._numbers.fenced(secs := time.perf_counter() - begin)
            self.events.emit("fence", blocked_secs=secs)
        self.phase("optimizer")

    def _wait_for_copies(self) -> None:
        if self.capture is not None:
            self.capture.fence(self.config.fence_timeout_secs)

    def _snapshot(self, iteration: int, begin: float) -> None:
        """Take the snapshot of ``iteration`` if all ranks do."""
        shard, pacer = self._shard, self._pacer
        assert shard is not None and pacer is not None
        problem: Exception | None = None
        try:
            self._agree()
            if self._state.windows_measured:
                shard.note_capacity()
        except Exception as error:  # noqa: BLE001 - raised below
            problem = error
            self._note_loss(error)
        # Collective: every rank enters a proof that is due, whatever it has read and whatever failed here.
        if self._state.proof_due:
            self._prove(shard)
        pacer.learn()
        if problem is not None:
            raise problem
        capture = shard.capture
        room = capture.writable(self._state.keep) if capture is not None else []
        decision = self._state.take(has_room=bool(room))
        if isinstance(decision, Skip):
            self._numbers.counts[PulseCount.SKIPPED] += 1
            self.events.emit("skipped", iteration=iteration, reason=decision.reason)
        elif decision is not None and capture is not None:
            slot = self._take(decision, room)
            self.begun = iteration
            self._numbers.took(capture.stepped_bytes)
            self.events.emit("snapshot", iteration=iteration, slot=slot, blocked_secs=time.perf_counter() - begin)

    def _examine(self, examination: Examination, capture: Capture) -> None:
        try:
            with self.section("save"):  # all that a rank has is read: nobody is to take that for a hang
                examination.look(capture, self.config.fence_timeout_secs)
        except (CaptureError, ArenaError) as error:
            self._fail(error)
        if examination.over:
            self._examination = None
        if examination.fits:
            self.events.announce(
                f"{examination.program} was examined: steps are fenced, and snapshots hold what training has"
            )

    def _note_loss(self, error: Exception) -> bool:
        """Whether ranks have lost each other."""
        actions = self._losses.note(error)
        self._execute(actions or ())
        return actions is not None

    def _search(self, iteration: int) -> None:
        self._execute(self._state.search(time.monotonic()))
        self._execute(self._losses.meet(iteration))

    def _take(self, decision: Take, room: Sequence[int] | None = None) -> int:
        capture, pacer = self.capture, self._pacer
        assert capture is not None and pacer is not None
        base = pacer.begin(capture.stepped_bytes, capture.unit_bytes)
        # Without an SMP to take checksums this rank takes them itself.
        objects = self.training_state.save_objects() if self._kept is None else {}
        slot = capture.begin(
            decision.snapshot, decision.keep, objects, base, hashed=not self._protection.smp_guards, kept=self._kept,
            slots=room,
        )  # fmt: skip
        pacer.follow(capture.flight, decision.snapshot.iteration)
        if self.config.schedule == "sync":
            # Sealed when ``step`` returns: who ends the job right behind it has this snapshot.
            capture.settle(self.config.fence_timeout_secs)
        return slot

    def _agree(self) -> None:
        """Learn what is whole on all ranks. Here, and nowhere else, ranks are waited for: a slot is needed now.

        Raises:
            AgreementError, CaptureError: the others cannot be reached, or did not answer in time.
        """
        try:
            if self.capture is not None:
                self.capture.settle(self.config.fence_timeout_secs)
        except CaptureError as error:
            self._fail(error)
        self._post()
        verdicts = self._links.agreement.read(self.config.agree_timeout_secs)
        if verdicts is None:
            self._state.miss()
            raise CaptureError(f"other ranks did not answer within {self.config.agree_timeout_secs} s")
        self._execute(self._state.learn(verdicts, time.monotonic()))
        if self._shard is not None:
            self._shard.complete(self._state.keep)

    def _post(self) -> None:
        """Post once per snapshot what this rank has, as soon as the host knows it."""
        capture, now_secs = self.capture, time.monotonic()
        if not self._state.owes_round or (capture is not None and capture.flying):
            return
        will = Will.OFF if capture is None else Will.SKIP if capture.busy else Will.GO
        round_ = self._state.round_to_post(
            capture.newest if capture is not None else None,
            will,
            self._pacer.wish if self._pacer is not None else Wish(),
            self._protection.observe(self._state.targets.target),
            now_secs,
            flush=self._protection.observe_flush(self._state.flushes.current),
            compute_secs=self._pacer.compute_secs if self._pacer is not None else float,
        )
        if round_.flush >= 0 and round_.flushed == Coverage.CANNOT:
            self._storage.tell_problem(round_.flush)
        self._links.agreement.post(round_)  # where it raises, the round is still owed
        self._state.posted(round_)

    def _prove(self, shard: Shard) -> None:
        """Replicas still hold the same bits, and derived state still follows; else all ranks lay out anew."""
        state = self._state
        state.proves()
        late = state.late or (shard.capture is not None and shard.capture.busy)
        try:
            proof = shard.prove(late, state.has_stepped, state.whole)
        except FtckptError as error:
            self._execute([state.turn_off(f"no new arena: {error}")])
            return
        proven = state.proofs.held
        state.proved(proof.stepped, proof.changed, proof.new_arenas)
        if proof.ends:
            raise SilentCorruptionError(corruption_text(self.topology, proof, self._boundary, proven))
        if proof.new_arenas:
            self._protect_anew()
            shard.supply()
            shard.complete(state.keep)  # as long as there is no slot the old arena holds all that is whole

    def _protect_anew(self) -> None:
        """The arenas were laid out anew: what cannot be protected in them is not, and training goes on."""
        if self.arena is None or not self._protects:
            return
        try:
            self._protection.arrange(self.arena, self._arenas.coming_bytes, self._arenas.slots)
        except FtckptError as error:
            self.events.emit("not_protected", error=str(error))
            self._execute(self._state.not_protected())
        else:
            self._mark_arrangement()

    def _execute(self, actions: Iterable[Action]) -> None:
        """Do all of it, then raise what failed first: an action comes once, and one after it may turn ftckpt off."""
        failure: Exception | None = None
        for action in actions:
            try:
                self._perform(action)
            except Exception as error:  # noqa: BLE001 - raised below
                failure = failure or error
        if failure is not None:
            raise failure

    def _perform(self, action: Action) -> None:
        match action:
            case WholeMark(snapshot):
                if self.arena is not None:
                    self.arena.control.mark_whole(snapshot)
                self._attempt.progress()
            case TargetMarks():
                self._protection.mark(action)
            case OldArenaRemoval():
                self._arenas.remove_old()
            case Announcement(event, fields, text):
                self.events.emit(event, **fields)
                if text:
                    self.events.announce(text)
                if action.error and self.config.on_error == "raise":
                    raise StorageError(f"{action.error}: {self._storage.problem(fields['iteration'])}", lasting=True)
            case TurnOff(reason):
                self.events.emit("turned_off", reason=reason)
                if self._state.lost:
                    self._links.stop(reason)
                if self.capture is not None:
                    self.capture.stop()

    def _fail(self, error: Exception) -> None:
        """A snapshot failed: past a limit in a row ftckpt turns off. Raises under ``on_error: raise``."""
        self._numbers.failed(self._state.interval.number)
        if not self._note_loss(error):
            self._execute(self._state.fail(repr(error)))
        if self.config.on_error == "raise":
            raise error
