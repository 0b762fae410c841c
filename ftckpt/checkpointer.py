"""The six lines of Python: construct, ``restore``, then ``fence`` and ``step`` in each iteration, ``close``."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from ftckpt.arena.memory import check_budget
from ftckpt.arena.segment import (
    Arena,
    JobLock,
    arena_path,
    list_arenas,
    node_directory,
    remove_arena,
    remove_job_if_empty,
)
from ftckpt.capture.capture import Capture, SnapshotId
from ftckpt.capture.copier import make_copier
from ftckpt.capture.prepare import Assignment, assign, rule_holds
from ftckpt.capture.windows import Windows
from ftckpt.comm import Agreement, Group, together
from ftckpt.config import Config
from ftckpt.errors import ArenaError, CaptureError, ConfigError, FtckptError
from ftckpt.events import Events
from ftckpt.layout.topology import Topology
from ftckpt.restore.session import Session
from ftckpt.state.piece import Description, TrainingState

_STRAGGLER_SECS = 20.0
"""How long processes of a previous attempt may take to disappear."""


class Checkpointer:
    """Snapshots of one rank, agreed with all others. Every method is called by the training thread.

    Construction, ``restore``, ``step`` and ``close`` are collective. The order of calls is ``restore`` once,
    then per iteration ``fence`` before the first write to stepped state and ``step`` at the boundary, then
    ``close`` when training is done (not after an error: the snapshots are needed then).

    Args:
        config: ``job`` and ``node`` must be names.
        state: what to save; see TrainingState for who calls what.
        topology: the place and node of every rank.
        windows: when chunks may be copied; at once if not given.
        group: all ranks; a new one if not given.

    Raises:
        ConfigError: ``job`` or ``node`` is empty.
    """

    def __init__(
        self,
        config: Config,
        state: TrainingState,
        topology: Topology,
        windows: Windows | None = None,
        group: Group | None = None,
    ) -> None:
        if not config.job or not config.node:
            raise ConfigError("job and node: both need a name")
        self.config = config
        self.topology = topology
        self.events = Events(config.events_dir, topology.rank)
        self.iteration: int | None = None
        self._state = state
        self._windows = windows
        self._group = group or Group(config.start_timeout_secs)
        self._agreement = Agreement(self._group)
        self._job_lock: JobLock | None = None
        self._capture: Capture | None = None
        self._assignment: Assignment | None = None
        self._described: Description | None = None
        self._node_dir = Path()
        self._lineage = b""
        self._whole: SnapshotId | None = None
        self._posted = True
        self._failures = 0
        self._num_snapshots = 0
        self._retired: list[Path] = []
        self._off = False
        self._closed = False

    def restore(self) -> int | None:
        """Bring back the newest whole snapshot; returns its iteration, or None for a start from the beginning.

        Must be called once before the first ``step``, on a first start too: it allocates the arena.

        Raises:
            LostError, MismatchError, MemoryBudgetError, ArenaError, UnsupportedError: on all ranks together.
        """
        if self._described is not None:
            raise ConfigError("restore() was called twice")
        begin = time.perf_counter()
        self.events.emit("joined", job=self.config.job, node=self.topology.me.node)
        together(self._group, self._enter_node)
        described = self._described = together(self._group, self._state.describe)
        session = Session(self._group, self.topology, self._node_dir, self.events)
        try:
            decision = session.choose(self.config.on_lost)
            self._lineage = session.void_newer(decision)
            if decision is not None:
                session.load(decision, self._state, described)
                self._whole = (bytes.fromhex(decision.lineage), decision.iteration)
        finally:
            session.close()
        self._open_arena(described)
        self.iteration = decision.iteration if decision else None
        secs = time.perf_counter() - begin
        self.events.emit("restored", iteration=self.iteration, lineage=self._lineage.hex(), blocked_secs=secs)
        return self.iteration

    def fence(self) -> None:
        """Call before stepped state changes; returns at once unless a copy is unfinished."""
        if self._capture is None or self._posted:
            return
        begin = time.perf_counter()
        failure: Exception | None = None
        try:
            self._capture.fence(self.config.fence_timeout_secs)
        except CaptureError as error:
            failure = error
        if failure is not None or not self._capture.busy:
            self._post()
        self.events.emit("fence", blocked_secs=time.perf_counter() - begin)
        if failure is not None:
            self._failed(failure)

    def step(self, iteration: int) -> None:
        """The boundary of ``iteration``: optimizer, scheduler and counters have advanced, no batch is drawn.

        Raises:
            ConfigError: ``restore`` was not called.
            FtckptError: only under ``on_error: raise``.
        """
        if self._described is None:
            raise ConfigError("step() before restore(): call restore() once, on a first start too")
        if self._off or iteration % self.config.interval:
            return
        begin = time.perf_counter()
        try:
            if self._may_take() and self._capture is not None:
                self._prove(iteration)
                self._posted = False
                slot = self._capture.begin((self._lineage, iteration), self._whole, self._state.save_objects())
                blocked = time.perf_counter() - begin
                self.events.emit("snapshot", iteration=iteration, slot=slot, blocked_secs=blocked)
        except Exception as error:  # noqa: BLE001 - promise 4: training goes on whatever a snapshot does
            self._failed(error)

    def close(self, remove: bool = True) -> None:
        """End: when all ranks have come here the arenas are removed, otherwise they stay for a restart.

        With ``remove=False`` they stay in any case, for a later start of the same job. A second call does
        nothing.
        """
        if self._closed:
            return
        self._closed = True
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.close()
        if remove and self._described is not None:
            try:
                self._group.barrier()
                self._remove(capture)
                self._group.barrier()
                if self._job_lock is not None:
                    self._job_lock.release()
                    remove_job_if_empty(Path(self.config.arena), self.config.job, self.topology.me.node)
            except RuntimeError as error:
                self.events.emit("close_incomplete", error=str(error))
        if capture is not None:
            capture.arena.close()
        if self._job_lock is not None:
            self._job_lock.release()
        self._off = True
        self.events.emit("closed")
        self.events.close()

    def _enter_node(self) -> None:
        self._node_dir = node_directory(Path(self.config.arena), self.config.job, self.topology.me.node)
        if not self.topology.is_node_leader:
            return
        self._job_lock = JobLock(self._node_dir, _STRAGGLER_SECS)
        for path in list_arenas(self._node_dir):
            _wait_for_straggler(path)

    def _open_arena(self, described: Description) -> None:
        """Decide what to copy and have an arena for it; raises on all ranks together."""
        config = self.config
        assignment = assign(
            self._group, self.topology, described, config.objects_mib << 20, config.chunk_bytes
        )
        if assignment.differing:
            self.events.emit("replicas_differ", fragments=assignment.differing[:5], num=len(assignment.differing))
        path = arena_path(self._node_dir, assignment.manifest)
        existing = together(self._group, lambda: _reusable(path, config.slots))
        self._retire(path)
        need = 0 if existing else _arena_bytes(assignment, config.slots)
        self._check_memory(need)
        arena = together(
            self._group,
            lambda: existing or Arena.create(self._node_dir, assignment.manifest, config.slots),
        )
        together(self._group, lambda: arena.lock(_STRAGGLER_SECS))
        if self._whole is not None:
            arena.control.mark_whole(*self._whole)
        device = assignment.pieces[0].tensor.device if assignment.pieces else torch.device("cpu")
        self._capture = Capture(
            arena, assignment.pieces, assignment.parts, make_copier(device), self._windows
        )
        self._assignment = assignment
        self.events.emit(
            "arena", path=str(path), reused=existing is not None, slots=config.slots,
            slot_bytes=arena.image.file_bytes, copied_bytes=self._capture.stepped_bytes,
            derived_bytes=sum(p.fragment.nbytes for p in assignment.derived),
        )  # fmt: skip

    def _retire(self, own: Path) -> None:
        """Arenas that no rank of this node writes any more: removed once a snapshot of this lineage is whole.

        Without a restored snapshot they hold nothing and go at once. Collective.
        """
        kept = set(self._group.gather(str(own).encode()))
        if not self.topology.is_node_leader:
            return
        self._retired = [p for p in list_arenas(self._node_dir) if str(p).encode() not in kept]
        if self._whole is None:
            self._remove_retired()

    def _check_memory(self, need_bytes: int) -> None:
        needs = [int(data) for data in self._group.gather(str(need_bytes).encode())]
        total = sum(needs[rank] for rank in self.topology.ranks_on(self.topology.me.node))
        leader = self.topology.is_node_leader
        together(self._group, lambda: check_budget(self._node_dir, total) if leader and total else None)

    def _may_take(self) -> bool:
        """Whether all ranks take the next snapshot; learns which one is whole on all of them."""
        capture = self._capture
        if capture is None:
            return False
        self.fence()
        if not self._posted:
            capture.settle(self.config.fence_timeout_secs)
            self._post()
        answer = self._agreement.read(self.config.agree_timeout_secs)
        if answer is None:
            self._posted = False
            raise CaptureError(f"other ranks did not answer within {self.config.agree_timeout_secs} s")
        newest, willing = answer
        if newest >= 0 and (self._whole is None or newest > self._whole[1]):
            self._whole = (self._lineage, newest)
            capture.arena.control.mark_whole(*self._whole)
            self._remove_retired()
        if willing == Agreement.OFF:
            self._turn_off("another rank turned ftckpt off")
            return False
        if willing == Agreement.SKIP:
            self._posted = False
            self.events.emit("skipped", reason="a rank is not ready")
        return willing == Agreement.GO

    def _post(self) -> None:
        """Say once per snapshot what this rank has."""
        if self._capture is None:
            return
        newest = self._capture.newest
        willing = Agreement.SKIP if self._capture.busy else Agreement.GO
        limit_reached = self._failures >= self.config.error_limit
        self._agreement.post(newest[1] if newest else -1, Agreement.OFF if limit_reached else willing)
        self._posted = True

    def _prove(self, iteration: int) -> None:
        """Look again whether derived pieces and replicas are what they were taken for; else lay out anew.

        What a configuration makes differ shows in the first steps that move weights, so the proofs are close
        together at first: snapshots 1, 2, 4, 8 and so on.
        """
        assignment, described = self._assignment, self._described
        if assignment is None or described is None:
            return
        self._num_snapshots += 1
        early = self._num_snapshots & (self._num_snapshots - 1) == 0
        interval = self.config.replica_check_interval
        if not (interval and (early or iteration % interval == 0)) and self._num_snapshots > 1:
            return
        broken = [p.fragment.key for p in assignment.derived if not rule_holds(p)]
        if broken:
            self.events.emit("not_derived", keys=broken[:5], num=len(broken))
        checked = assign(
            self._group, self.topology, described, self.config.objects_mib << 20, self.config.chunk_bytes
        )
        changed = checked.manifest != assignment.manifest
        if any(self._group.gather(b"changed" if changed else b"")):
            old, self._capture = self._capture, None
            if old is not None:
                old.close()
                old.arena.close()
            self._open_arena(described)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self.events.emit("snapshot_error", error=repr(error), in_a_row=self._failures)
        if self.config.on_error == "raise":
            raise error

    def _turn_off(self, reason: str) -> None:
        self._off = True
        self.events.emit("turned_off", reason=reason)
        if self._capture is not None:
            self._capture.close()

    def _remove_retired(self) -> None:
        for path in self._retired:
            remove_arena(path)
        self._retired.clear()

    def _remove(self, capture: Capture | None) -> None:
        self._remove_retired()
        if capture is not None:
            capture.arena.remove()


def _wait_for_straggler(path: Path) -> None:
    """An arena that a process of an earlier attempt still writes cannot be read."""
    try:
        arena = Arena.open(path)
    except FtckptError:
        return  # the inventory reports it
    try:
        arena.lock(_STRAGGLER_SECS)
    finally:
        arena.close()


def _reusable(path: Path, slots: int) -> Arena | None:
    """The arena at ``path`` if it is sound and has as many slots; a damaged one is removed."""
    if not path.exists():
        return None
    try:
        arena = Arena.open(path, writable=True)
    except ArenaError:
        remove_arena(path)
        return None
    if arena.control.slots == slots and not any(arena.slot_error(i) for i in range(slots)):
        return arena
    arena.close()
    remove_arena(path)
    return None


def _arena_bytes(assignment: Assignment, slots: int) -> int:
    from ftckpt.arena.image import SlotImage

    return SlotImage.of(assignment.manifest).file_bytes * slots
