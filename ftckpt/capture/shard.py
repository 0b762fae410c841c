"""What this rank copies and where to: decided at start, and decided anew when proofs or windows ask for it."""

from __future__ import annotations

from ftckpt.arena.segment import Arena
from ftckpt.capture.capture import Capture, SnapshotId
from ftckpt.capture.copier import make_copier
from ftckpt.capture.node_arenas import NodeArenas
from ftckpt.capture.pacer import Pacer
from ftckpt.capture.prepare import Assignment, assign
from ftckpt.capture.sections import NO_REDUNDANCY, Redundancy
from ftckpt.comm import Group
from ftckpt.config import Config
from ftckpt.errors import MemoryBudgetError
from ftckpt.events import Events
from ftckpt.layout.topology import Topology
from ftckpt.state.piece import Description


class Shard:
    """This rank's part of each snapshot. ``lay_out`` and ``prove`` are collective.

    ``capture`` is None only where no arena could be had. ``capacities[rank]`` in bytes weight the shares of
    replica sets; None means equal shares.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        group: Group,
        *,
        arenas: NodeArenas,
        events: Events,
        described: Description,
        pacer: Pacer,
        redundancy: Redundancy = NO_REDUNDANCY,
    ) -> None:
        self._config = config
        self._topology = topology
        self._group = group
        self._arenas = arenas
        self._events = events
        self._described = described
        self._pacer = pacer
        self._redundancy = redundancy
        self.capacities: list[int] | None = None
        self.capture: Capture | None = None
        self.layouts = 0
        """How often all ranks have laid out their arenas."""
        self._assignment: Assignment | None = None

    def lay_out(self, whole: SnapshotId | None) -> None:
        """Have an arena for what this rank copies; raises on all ranks together.

        ``whole`` is the snapshot that the arenas hold and the job goes on from.
        """
        assignment = self._assign()
        arena = self._arenas.open(assignment.manifest, holds_snapshot=whole is not None, keep=whole)
        if whole is not None:
            arena.control.mark_whole(*whole)
        self._use(assignment, arena)
        host_bytes = arena.image.file_bytes * arena.control.slots
        copied = self.capture.stepped_bytes if self.capture is not None else 0
        self._events.tell(
            f"a snapshot every {self._config.interval} iteration(s) copies {copied / 1e6:.1f} MB from rank 0 "
            f"into {host_bytes / 1e6:.1f} MB at {arena.path}"
        )

    def prove(self, late: bool, stepped: bool, whole: SnapshotId | None, capacity: int | None) -> bool:
        """Look again whether derived pieces and replicas are what they were taken for; else lay out anew.

        Tells all ranks whether stepped state may have changed on this one; returns whether it may have on any.
        ``capacity``, where it is given (on all ranks or on none), is what this rank's windows take per
        iteration: from then on shares follow the capacities, where that makes less of the state spill.

        Raises:
            FtckptError: what the ranks copy must change and no arena can be had for it.
        """
        if capacity is not None:
            told = [int(data) for data in self._group.gather(str(capacity).encode())]
            self.capacities = told if any(told) else None
        assignment, capture = self._assignment, self.capture
        if assignment is None or capture is None:
            return stepped
        checked = self._assign()
        change = _change(assignment, checked)
        if change == _BROKEN:
            self._tell_broken(assignment, checked)
        mine = (b"+" if stepped else b"-") + (b"late" if late else change)
        words = self._group.gather(mine)
        answers = [word[1:] for word in words]
        # A rank that has not read the last answer must not take its arena for an old one.
        if b"late" not in answers and any(answers):
            self._lay_out_anew(assignment, checked, whole, must=_BROKEN in answers)
        return any(word.startswith(b"+") for word in words)

    def complete(self) -> None:
        """Take into use the slots that the arena still lacks, once older arenas have made room for them."""
        if self.capture is not None:
            self.capture.use_slots(self._arenas.complete(self.capture.arena))

    def close(self) -> None:
        """Stop copying."""
        if self.capture is not None:
            self.capture.close()

    def _lay_out_anew(
        self, assignment: Assignment, checked: Assignment, whole: SnapshotId | None, must: bool
    ) -> None:
        capture, self.capture = self.capture, None
        if capture is None:
            return
        capture.close()
        try:
            arena = self._arenas.replace(capture.arena, whole, checked.manifest)
        except MemoryBudgetError as error:  # nothing was freed yet
            if must:
                raise
            self._events.emit("shares_kept", error=str(error))
            self.capacities = None
            self._use(assignment, capture.arena)
        else:
            self._use(checked, arena)

    def _use(self, assignment: Assignment, arena: Arena) -> None:
        self.layouts += 1
        if assignment.differing:
            names = assignment.differing
            self._events.emit("replicas_differ", fragments=names[:5], num=len(names))
        pacer, own_stream = self._pacer, self._config.schedule != "thread"
        copier = make_copier(pacer.clock, pacer.budget, own_stream, pacer.cores)
        self._assignment = assignment
        self.capture = Capture(arena, assignment.pieces, assignment.parts, copier, pacer.windows)
        derived_bytes = sum(piece.fragment.nbytes for piece in assignment.derived)
        copied_bytes = self.capture.stepped_bytes
        spill = dict(zip(("equal", "chosen"), assignment.spill_bytes or (), strict=False))
        self._events.emit("plan", copied_bytes=copied_bytes, derived_bytes=derived_bytes, spill_bytes=spill)

    def _assign(self) -> Assignment:
        config, room = self._config, self._config.objects_mib << 20
        return assign(
            self._group, self._topology, self._described, room, config.chunk_bytes, self.capacities, self._redundancy
        )

    def _tell_broken(self, assignment: Assignment, checked: Assignment) -> None:
        still = {piece.fragment.key for piece in checked.derived}
        broken = [piece.fragment.key for piece in assignment.derived if piece.fragment.key not in still]
        if broken:
            self._events.emit("not_derived", keys=broken[:5], num=len(broken))


_SHARES, _BROKEN = b"shares", b"broken"
"""Why what a rank copies must change: only who copies how much, or what was believed of the state is not so."""


def _change(now: Assignment, checked: Assignment) -> bytes:
    if checked.manifest == now.manifest:
        return b""
    same = checked.differing == now.differing and [p.fragment for p in checked.derived] == [
        p.fragment for p in now.derived
    ]
    return _SHARES if same else _BROKEN
