"""The six lines of Python: construct, ``restore``, then ``fence`` and ``step`` in each iteration, ``close``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from ftckpt.capture.capture import Capture
from ftckpt.capture.interval import Interval
from ftckpt.capture.node_arenas import NodeArenas
from ftckpt.capture.pacer import Pacer, make_pacer
from ftckpt.capture.proofs import WEIGH_AT, Proofs
from ftckpt.capture.shard import Shard
from ftckpt.comm import Agreement, Group, together
from ftckpt.config import Config
from ftckpt.dialogue import Dialogue
from ftckpt.errors import CaptureError, ConfigError, FtckptError
from ftckpt.events import Events
from ftckpt.layout.topology import Topology
from ftckpt.protection import Protection
from ftckpt.restore.restart import Restart
from ftckpt.state.piece import TrainingState


class Checkpointer:
    """Snapshots of one rank, agreed with all others. Every method is called by the training thread.

    Construction, ``restore``, ``step`` and ``close`` are collective. The order of calls is ``restore`` once,
    then per iteration ``fence`` before the first write to stepped state and ``step`` at the boundary, then
    ``close`` when training is done (not after an error: the snapshots are needed then). ``phase`` tells where
    in the schedule training is, so that copies find its windows.

    Args:
        config: ``job`` and ``node`` must be names.
        state: what to save; see TrainingState for who calls what.
        topology: the place and node of every rank.
        group: all ranks; a new one if not given.

    Raises:
        ConfigError: ``job`` or ``node`` is empty.
    """

    def __init__(self, config: Config, state: TrainingState, topology: Topology, group: Group | None = None) -> None:
        if not config.job or not config.node:
            raise ConfigError("job and node: both need a name")
        self.topology = topology
        self.events = Events(config.events_dir, topology.rank)
        self._state = state
        self._group = group or Group(config.start_timeout_secs)
        self._protection = Protection(config, topology, self._group, self.events)
        self.config = config = replace(config, slots=self._protection.slots)
        self._arenas = NodeArenas(config, topology, self._group, self.events)
        self._interval = Interval(config.interval, config.error_limit + 5)
        self._dialogue = Dialogue(config, self._interval, self._protection, self.events)
        self._proofs = Proofs(config.replica_check_interval)
        self._pacer: Pacer | None = None
        self._shard: Shard | None = None
        self._lineage, self._last, self._at = b"", -1, -1
        self._failures, self._off, self._closed = 0, False, False

    def phase(self, kind: str) -> None:
        """Training comes to a part of the iteration: a kind of ``ftckpt.capture.iteration``. Takes microseconds."""
        if self._pacer is not None and not self._closed:
            self._protection.beat(self._at, kind)
            if not self._off:
                self._pacer.enter(kind)

    def expect(self, kinds: Sequence[str], lengths: Sequence[float]) -> None:
        """A model of the schedule: its ``kinds`` of places between the schedule's begin and the fence, and their
        relative lengths. Copies go by it until the places were measured."""
        if self._pacer is not None:
            self._pacer.expect(kinds, lengths)

    def restore(self, newer_than: int = -1) -> int | None:
        """Bring back the newest whole snapshot; returns its iteration, or None for a start from the beginning.

        Must be called once before the first ``step``, on a first start too: it allocates the arena. A snapshot
        older than ``newer_than``, an iteration that was loaded from storage before, is given up.

        Raises:
            LostError, MismatchError, MemoryBudgetError, ArenaError, UnsupportedError: on all ranks together.
        """
        if self._shard is not None:
            raise ConfigError("restore() was called twice")
        begin = time.perf_counter()
        self.events.emit("joined", job=self.config.job, node=self.topology.me.node)
        self._arenas.enter()
        self._protection.enter(self._arenas.path)
        described = together(self._group, self._state.describe)
        shared = (self.config, self.topology, described, self._arenas.path, self.events)
        pacer = self._pacer = together(self._group, lambda: make_pacer(*shared))
        shard = self._shard = Shard(
            self.config, self.topology, self._group, arenas=self._arenas, events=self.events, described=described,
            pacer=pacer, redundancy=self._protection.redundancy,
        )  # fmt: skip
        restart = Restart(self._group, self.topology, self._arenas.path, self.events)
        try:
            decision = restart.choose(self.config.on_lost, self._state.reshapes)
            if decision is not None and decision.iteration < newer_than:
                self.events.emit("older_than_storage", in_memory=decision.iteration, loaded=newer_than)
                decision = None
            self._lineage, whole = restart.void_newer(decision), None
            if decision is not None:
                restart.load(decision, self._state, described)
                whole = (bytes.fromhex(decision.lineage), decision.iteration)
                shard.capacities = restart.capacities(decision)
        finally:
            restart.close()
        shard.lay_out(whole)
        self._dialogue.begin(self._lineage, whole)
        self._protection.lay_out(shard.capture, self._arenas.path)
        iteration, source = (decision.iteration, restart.source) if decision else (None, None)
        self._last = self._at = iteration if iteration is not None else -1
        secs = time.perf_counter() - begin
        told = {"iteration": iteration, "lineage": self._lineage.hex(), "source": source}
        self.events.emit("restored", **told, blocked_secs=secs)
        where = f"iteration {iteration} from {source}" if source else "nothing to restore, from the beginning"
        self.events.tell(f"job {self.config.job}, {len(self.topology.members)} ranks: {where}, in {secs:.1f} s")
        return iteration

    def fence(self) -> None:
        """Call before stepped state changes; returns at once unless a copy is unfinished."""
        self._proofs.stepped = True
        self._fence()

    def _fence(self) -> None:
        if self._off or self._closed:
            return
        self.phase("fence")
        if not self._dialogue.posted:
            begin = time.perf_counter()
            try:
                if self._capture is not None:
                    self._capture.fence(self.config.fence_timeout_secs)
            except Exception as error:  # noqa: BLE001 - promise 4: training goes on whatever a snapshot does
                self._failed(error)
            self._post_if_known()
            self.events.emit("fence", blocked_secs=time.perf_counter() - begin)
        self.phase("optimizer")

    def step(self, iteration: int) -> None:
        """The boundary of ``iteration``: optimizer, scheduler and counters have advanced, no batch is drawn.

        Raises:
            ConfigError: ``restore`` was not called.
            FtckptError: only under ``on_error: raise``.
        """
        if self._pacer is None:
            raise ConfigError("step() before restore(): call restore() once, on a first start too")
        if self._off or self._closed:
            return
        if iteration <= self._last:
            self._turn_off(f"iteration {iteration} after {self._last}: training went back; restart the job")
            self._protection.targets.forget()
            if self._capture is not None:
                self._capture.forget(iteration)
            return
        self._at = iteration
        since = time.perf_counter()
        self._fence()
        self._pacer.boundary()
        try:
            if self._interval.due(iteration):
                self._last = iteration
                self._take(iteration, since)
            else:
                self._pacer.learn()
        except Exception as error:  # noqa: BLE001 - promise 4: training goes on whatever a snapshot does
            self._failed(error)
        self.phase("start")

    def close(self, remove: bool | None = None) -> None:
        """End: when all ranks have come here the arenas are removed, otherwise they stay for a restart.

        They stay with ``remove=False`` and no other rank is waited for; that is the default while an exception is
        handled, as in a ``finally``, and ``remove=True`` otherwise. A second call does nothing.
        """
        if self._closed:
            return
        remove = sys.exc_info()[0] is None if remove is None else remove
        if not remove:
            self._fence()  # nothing more is trained: the last snapshot is good
        self._closed = True
        capture = self._capture
        for part in (capture, self._pacer, self._protection):
            if part is not None:
                part.close()
        if remove and self._shard is not None:
            try:
                self._arenas.leave(capture.arena if capture is not None else None, self._protection.smp.end)
            except RuntimeError as error:
                self.events.emit("close_incomplete", error=str(error))
        if capture is not None:
            capture.arena.close()
        self._arenas.release()
        self.events.emit("closed")
        self.events.close()

    @property
    def _capture(self) -> Capture | None:
        return self._shard.capture if self._shard is not None else None

    def _take(self, iteration: int, since: float) -> None:
        """Take the snapshot of ``iteration`` if all ranks do. A proof that is due is collective: every rank
        enters it, whatever it has heard."""
        shard, pacer = self._shard, self._pacer
        if shard is None or pacer is None:
            return
        was_off = self._off
        willing = self._hear()
        if not was_off and self._proofs.due(iteration, self._interval.number):
            late = willing is None or self._dialogue.posted  # posted: nothing was read, or ftckpt was turned off
            self._prove(shard, pacer, late or (shard.capture is not None and shard.capture.busy))
        pacer.learn()
        if willing is None:
            raise CaptureError(f"other ranks did not answer within {self.config.agree_timeout_secs} s")
        capture = shard.capture
        if willing != Agreement.GO or capture is None or self._off:
            return
        keep = self._protection.targets.keep(self._dialogue.whole)
        if not capture.has_room(keep):
            self.events.emit("skipped", reason="every slot is kept until the target is protected")
            return
        base = pacer.begin(capture.stepped_bytes, capture.unit_bytes)
        hashed = not self._protection.smp_alive
        slot = capture.begin((self._lineage, iteration), keep, self._state.save_objects(), base, hashed)
        pacer.follow(capture.flight, iteration)
        if self.config.schedule == "sync":
            capture.settle(self.config.fence_timeout_secs)
        self.events.emit("snapshot", iteration=iteration, slot=slot, blocked_secs=time.perf_counter() - since)

    def _hear(self) -> int | None:
        """Learn what is whole on all ranks, and how willing they are; None when answers are missing."""
        capture = self._capture
        try:
            if capture is not None:
                capture.settle(self.config.fence_timeout_secs)
        except CaptureError as error:
            self._failed(error)
        self._post_if_known()
        try:
            answer = self._dialogue.read()
        except RuntimeError as error:
            self._failed(error, alone=True)
            return Agreement.SKIP
        if answer is None:
            return None
        willing, whole = answer
        if whole is not None and capture is not None:
            capture.arena.control.mark_whole(*whole)
        if self._protection.supersedes(whole):
            self._arenas.remove_old()
        if self._shard is not None:
            self._shard.complete()
        if willing == Agreement.OFF:
            self._turn_off("a rank had too many failed snapshots in a row")
        elif willing == Agreement.SKIP:
            self.events.emit("skipped", reason="a rank is not ready")
        return willing

    def _post_if_known(self) -> None:
        """Say once per snapshot what this rank has, as soon as the host knows it."""
        capture = self._capture
        if self._dialogue.posted or self._off or (capture is not None and capture.flying):
            return
        spent = self._failures >= self.config.error_limit
        try:
            if self._dialogue.post(capture, spent, self._pacer.stretch if self._pacer is not None else 1):
                self._failures = 0
        except RuntimeError as error:
            self._failed(error, alone=True)

    def _prove(self, shard: Shard, pacer: Pacer, late: bool) -> None:
        """All ranks take the same snapshots, hence prove together."""
        number, stepped = self._interval.number, self._proofs.stepped
        weigh = number == WEIGH_AT and shard.capacities is None
        try:
            before = shard.layouts
            stepped = shard.prove(late, stepped, self._dialogue.whole, pacer.capacity_bytes if weigh else None)
            self._proofs.proved(number, stepped)
            if shard.layouts != before:
                self._protection.lay_out(shard.capture, self._arenas.path, anew=True)
        except FtckptError as error:
            self._turn_off(f"no new arena: {error}")

    def _failed(self, error: Exception, alone: bool = False) -> None:
        self._failures += 1
        self.events.emit("snapshot_error", error=repr(error), in_a_row=self._failures)
        if self.config.on_error == "raise":
            raise error
        if alone and self._failures >= self.config.error_limit:
            self._turn_off("other ranks cannot be reached")

    def _turn_off(self, reason: str) -> None:
        self._off = self._dialogue.posted = True
        self.events.emit("turned_off", reason=reason)
        if self._capture is not None:
            self._capture.close()
