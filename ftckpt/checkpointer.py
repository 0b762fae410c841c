"""The six lines of Python: construct, ``restore``, then ``fence`` and ``step`` in each iteration, ``close``."""

from __future__ import annotations

import time

import torch

from ftckpt.capture.capture import Capture, SnapshotId
from ftckpt.capture.copier import make_copier
from ftckpt.capture.node_arenas import NodeArenas
from ftckpt.capture.prepare import Assignment, assign
from ftckpt.capture.windows import Windows
from ftckpt.comm import Agreement, Group, together
from ftckpt.config import Config
from ftckpt.errors import CaptureError, ConfigError, FtckptError
from ftckpt.events import Events
from ftckpt.layout.topology import Topology
from ftckpt.restore.restart import Restart
from ftckpt.state.piece import Description, TrainingState


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
        self._state = state
        self._windows = windows
        self._group = group or Group(config.start_timeout_secs)
        self._agreement = Agreement(Group(config.start_timeout_secs))
        self._arenas = NodeArenas(config, topology, self._group, self.events)
        self._capture: Capture | None = None
        self._assignment: Assignment | None = None
        self._described: Description | None = None
        self._lineage = b""
        self._whole: SnapshotId | None = None
        self._newest = -1
        self._last = -1
        self._posted = True
        self._failures = 0
        self._first = -1
        self._off = False
        self._closed = False

    def restore(self, newer_than: int = -1) -> int | None:
        """Bring back the newest whole snapshot; returns its iteration, or None for a start from the beginning.

        Must be called once before the first ``step``, on a first start too: it allocates the arena. A snapshot
        older than ``newer_than``, an iteration that was loaded from storage before, is given up.

        Raises:
            LostError, MismatchError, MemoryBudgetError, ArenaError, UnsupportedError: on all ranks together.
        """
        if self._described is not None:
            raise ConfigError("restore() was called twice")
        begin = time.perf_counter()
        self.events.emit("joined", job=self.config.job, node=self.topology.me.node)
        self._arenas.enter()
        described = self._described = together(self._group, self._state.describe)
        restart = Restart(self._group, self.topology, self._arenas.path, self.events)
        try:
            decision = restart.choose(self.config.on_lost)
            if decision is not None and decision.iteration < newer_than:
                self.events.emit("older_than_storage", in_memory=decision.iteration, loaded=newer_than)
                decision = None
            self._lineage = restart.void_newer(decision)
            if decision is not None:
                restart.load(decision, self._state, described)
                self._whole = (bytes.fromhex(decision.lineage), decision.iteration)
        finally:
            restart.close()
        self._lay_out(described, self._assign(described))
        iteration = decision.iteration if decision else None
        self._last = iteration if iteration is not None else -1
        secs = time.perf_counter() - begin
        self.events.emit("restored", iteration=iteration, lineage=self._lineage.hex(), blocked_secs=secs)
        where = f"iteration {iteration} from memory" if decision else "nothing to restore, from the beginning"
        self.events.tell(f"job {self.config.job}, {len(self.topology.members)} ranks: {where}, in {secs:.1f} s")
        return iteration

    def fence(self) -> None:
        """Call before stepped state changes; returns at once unless a copy is unfinished."""
        if self._posted:
            return
        begin = time.perf_counter()
        try:
            if self._capture is not None:
                self._capture.fence(self.config.fence_timeout_secs)
        except Exception as error:  # noqa: BLE001 - promise 4: training goes on whatever a snapshot does
            self._failed(error)
        self._post_if_known()
        self.events.emit("fence", blocked_secs=time.perf_counter() - begin)

    def step(self, iteration: int) -> None:
        """The boundary of ``iteration``: optimizer, scheduler and counters have advanced, no batch is drawn.

        Raises:
            ConfigError: ``restore`` was not called.
            FtckptError: only under ``on_error: raise``.
        """
        if self._described is None:
            raise ConfigError("step() before restore(): call restore() once, on a first start too")
        if self._off or self._closed or iteration % self.config.interval:
            return
        if iteration <= self._last:
            self._turn_off(f"iteration {iteration} after {self._last}: training went back; restart the job")
            return
        self._last = iteration
        self._first = iteration if self._first < 0 else self._first
        begin = time.perf_counter()
        self.fence()
        try:
            self._take(iteration, begin)
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
                self._arenas.leave(capture.arena if capture is not None else None)
            except RuntimeError as error:
                self.events.emit("close_incomplete", error=str(error))
        if capture is not None:
            capture.arena.close()
        self._arenas.release()
        self.events.emit("closed")
        self.events.close()

    def _assign(self, described: Description) -> Assignment:
        config = self.config
        return assign(self._group, self.topology, described, config.objects_mib << 20, config.chunk_bytes)

    def _lay_out(self, described: Description, assignment: Assignment) -> None:
        """Have an arena for what this rank copies; raises on all ranks together."""
        if assignment.differing:
            names = assignment.differing
            self.events.emit("replicas_differ", fragments=names[:5], num=len(names))
        arena = self._arenas.open(assignment.manifest, holds_snapshot=self._whole is not None)
        if self._whole is not None:
            arena.control.mark_whole(*self._whole)
        device = next((p.tensor.device for p in described.stepped if p.tensor.is_cuda), torch.device("cpu"))
        self._capture = Capture(arena, assignment.pieces, assignment.parts, make_copier(device), self._windows)
        self._assignment = assignment
        derived_bytes = sum(piece.fragment.nbytes for piece in assignment.derived)
        copied_bytes = self._capture.stepped_bytes
        self.events.emit("plan", copied_bytes=copied_bytes, derived_bytes=derived_bytes)
        host_bytes = arena.image.file_bytes * arena.control.slots
        self.events.tell(
            f"a snapshot every {self.config.interval} iteration(s) copies {copied_bytes / 1e6:.1f} MB from rank 0 "
            f"into {host_bytes / 1e6:.1f} MB at {arena.path}; survives killed processes, not yet lost nodes"
        )

    def _take(self, iteration: int, since: float) -> None:
        """Take the snapshot of ``iteration`` if all ranks do. A proof that is due is collective: every rank
        enters it, whatever it has heard."""
        willing = self._hear()
        if not self._off and self._proof_due(iteration):
            self._prove(late=willing is None)
        if willing is None:
            raise CaptureError(f"other ranks did not answer within {self.config.agree_timeout_secs} s")
        if willing != Agreement.GO or self._capture is None or self._off:
            return
        slot = self._capture.begin((self._lineage, iteration), self._whole, self._state.save_objects())
        secs = time.perf_counter() - since
        self.events.emit("snapshot", iteration=iteration, slot=slot, blocked_secs=secs)

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
            answer = self._agreement.read(self.config.agree_timeout_secs)
        except RuntimeError as error:
            self._failed(error, alone=True)
            return Agreement.SKIP
        self._posted = False
        if answer is None:
            return None
        newest, willing = answer
        if newest >= 0 and (self._whole is None or newest > self._whole[1]):
            self._whole = (self._lineage, newest)
            if capture is not None:
                capture.arena.control.mark_whole(*self._whole)
            self._arenas.remove_old()
        if willing == Agreement.OFF:
            self._turn_off("a rank had too many failed snapshots in a row")
        elif willing == Agreement.SKIP:
            self.events.emit("skipped", reason="a rank is not ready")
        return willing

    def _post_if_known(self) -> None:
        """Say once per snapshot what this rank has, as soon as the host knows it."""
        capture = self._capture
        if self._posted or self._off or (capture is not None and capture.flying):
            return
        sealed = capture.newest if capture is not None else None
        newest = sealed[1] if sealed is not None and sealed[0] == self._lineage else -1
        if newest > self._newest:
            self._newest, self._failures = newest, 0
        willing = Agreement.SKIP if capture is not None and capture.busy else Agreement.GO
        if capture is None or self._failures >= self.config.error_limit:
            willing = Agreement.OFF
        try:
            self._agreement.post(newest, willing)
            self._posted = True
        except RuntimeError as error:
            self._failed(error, alone=True)

    def _proof_due(self, iteration: int) -> bool:
        """A function of the iteration alone: every rank must come to the same answer, late or not."""
        interval = self.config.replica_check_interval
        number = (iteration - self._first) // self.config.interval + 1
        return number == 1 or (bool(interval) and (number & (number - 1) == 0 or iteration % interval == 0))

    def _prove(self, late: bool) -> None:
        """Look again whether derived pieces and replicas are what they were taken for; else lay out anew.

        What a configuration makes differ shows in the first steps that move weights, so the proofs are close
        together at first: snapshots 1, 2, 4, 8 and so on. All ranks take the same snapshots, hence prove
        together.
        """
        assignment, described, capture = self._assignment, self._described, self._capture
        if assignment is None or described is None or capture is None:
            return
        checked = self._assign(described)
        still = {piece.fragment.key for piece in checked.derived}
        broken = [piece.fragment.key for piece in assignment.derived if piece.fragment.key not in still]
        if broken:
            self.events.emit("not_derived", keys=broken[:5], num=len(broken))
        changed = b"changed" if checked.manifest != assignment.manifest else b""
        told = self._group.gather(b"late" if late else changed)
        if b"late" in told or b"changed" not in told:
            return  # a rank that has not read the last answer must not take its arena for an old one
        self._capture = None
        capture.close()
        capture.arena.close()
        try:
            self._lay_out(described, checked)
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
        self._off, self._posted = True, True
        self.events.emit("turned_off", reason=reason)
        if self._capture is not None:
            self._capture.close()
