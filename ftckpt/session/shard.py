"""What this rank copies and where to: decided at start, and decided anew when a proof asks for it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from ftckpt.array_types import Integers
from ftckpt.capture.affinity import Locality
from ftckpt.capture.assignment import Assignment, assign, gather_sharing
from ftckpt.capture.capture import Capture
from ftckpt.capture.copier import TellCopying
from ftckpt.capture.device_copier import make_copier
from ftckpt.capture.redundancy import NO_REDUNDANCY, Redundancy
from ftckpt.capture.sample import Sampler
from ftckpt.config import Config
from ftckpt.errors import MemoryBudgetError, UnsupportedError
from ftckpt.events import Events
from ftckpt.group import Group, gather_bytes
from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import PINNING_NAME
from ftckpt.model import codec
from ftckpt.model.replicas import ReplicaMap
from ftckpt.model.sampled import Comparison
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import listed
from ftckpt.model.topology import Topology
from ftckpt.model.training_state import Description
from ftckpt.schedule.window_scheduler import WindowScheduler
from ftckpt.session.arenas import NodeArenas
from ftckpt.session.protection import Protection

_MIN_SLOTS = 2
"""Slots with which snapshots go on: one is written while the other keeps the newest."""

_MOST_NAMED = 5
"""Fragments in an event, or in what ranks tell each other."""


class Proof(NamedTuple):
    """What a proof came to, the same on all ranks.

    ``stepped``: stepped state may have changed on some rank since the start. ``changed``: some rank must copy other
    things than it does. ``new_arenas``: the arenas were laid out anew for that. ``differing``: names of fragments
    whose holders were taken to have the same bits, and have not; ``odd_ranks`` hold others than most of them.
    ``parted``: there are such fragments, or pieces that have ceased to follow from others. ``ends``: a rank was told
    to end the job for that.
    """

    stepped: bool
    changed: bool
    new_arenas: bool
    differing: tuple[str, ...] = ()
    odd_ranks: tuple[int, ...] = ()
    parted: bool = False
    ends: bool = False


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
        pacer: WindowScheduler,
        locality: Locality,
        tell_copying: TellCopying,
        redundancy: Redundancy = NO_REDUNDANCY,
    ) -> None:
        self._config = config
        self._topology = topology
        self._group = group
        self._arenas = arenas
        self._events = events
        self._described: Description | None = described
        self._pacer = pacer
        self._locality = locality
        self._tell_copying = tell_copying
        self._redundancy = redundancy
        self.capacities: list[int] | None = None
        self.capture: Capture | None = None
        self._assignment: Assignment | None = None
        self._sampler: Sampler | None = None
        self._sharing: ReplicaMap | None = None
        self._told: set[str] = set()  # differing fragments: a proof that is late comes to the same ones again
        self.num_differing = 0
        """Fragments that proofs have found to differ from what other ranks hold, which had held the same."""

    def lay_out(
        self, whole: SnapshotId | None, protection: Protection | None = None, cast: Collection[str] = ()
    ) -> None:
        """Have an arena for what this rank copies; raises on all ranks together.

        ``whole`` is the snapshot that the arenas hold and the job goes on from. ``protection``: see
        ``NodeArenas.open``, ``cast``: see ``assign``.
        """
        assignment = self._assign(cast)
        self._tell_differing(assignment.differing)
        lacking = False
        while True:
            try:
                use = partial(self._use, assignment)
                arena = self._arenas.open(assignment.manifest, whole, use, protection, lacking)
                break
            except MemoryBudgetError as error:
                self._leave_arena()
                if protection is not None and protection.lessen(error):
                    continue
                # What memory has is loaded: the job goes on with that, whatever else there is no room for.
                if whole is None or lacking:
                    raise
                lacking = True
        slots = self._arenas.slots
        host_bytes = arena.image.file_bytes * slots
        copied = self.capture.stepped_bytes if self.capture is not None else 0
        interval = self._config.interval
        often = "as often as the budget allows" if interval == "auto" else f"every {interval} iteration(s)"
        self._events.announce(
            f"a snapshot {often} copies {copied / 1e6:.1f} MB from rank 0 "
            f"into {slots} slots, {host_bytes / 1e6:.1f} MB, at {arena.path}"
        )

    def note_capacity(self) -> None:
        """Leave what this rank's windows take to the next start, where shares were cut without knowing."""
        if self.capacities is None and self.capture is not None:
            self.capture.arena.control.mark_capacity(self._pacer.capacity_bytes)

    def prove(self, late: bool, stepped: bool, whole: SnapshotId | None) -> Proof:
        """Look again whether derived pieces and replicas are what they were taken for; else lay out anew.

        Tells all ranks whether stepped state may have changed on this one.

        Raises:
            FtckptError: what the ranks copy must change and no arena can be had for it.
        """
        assignment, capture = self._assignment, self.capture
        if assignment is None or capture is None:
            return Proof(stepped, changed=False, new_arenas=False)
        if not assignment.belief.needed:  # on any rank: nobody waits for anybody
            return Proof(True, changed=False, new_arenas=False)
        stepped, holds = self._look(assignment, stepped)
        if holds:
            return Proof(stepped, changed=False, new_arenas=False)
        checked = self._assign()
        changed = checked.manifest != assignment.manifest
        broken = self._tell_broken(assignment, checked)
        found = {name: odd for name, odd in checked.differing.items() if name not in assignment.differing}
        self.num_differing += self._tell_differing(found)
        ends = bool(found) and self._config.on_corruption == "abort"
        names = list(found)[:_MOST_NAMED]
        post = json.dumps([stepped, late, changed, broken, ends, names, odd_ranks(found)]).encode()
        posts = [json.loads(data) for data in self._group.gather(post)]
        steps, lates, changes, breaks, all_ends, all_names, odd = zip(*posts, strict=True)
        differing = tuple(dict.fromkeys(chain.from_iterable(all_names)))
        # A rank that has not read the last verdict must not take its arena for an old one. And where the job is to
        # end, on all ranks whatever each was told, what it has in memory stays as it is.
        ends = any(all_ends)
        new_arenas = any(changes) and not any(lates) and not ends
        if new_arenas:
            self._lay_out_anew(capture, checked, whole)
        all_odd = tuple(sorted({*chain.from_iterable(odd)}))
        parted = bool(differing) or any(breaks)
        return Proof(any(steps), any(changes), new_arenas, differing, all_odd, parted, ends)

    def _look(self, assignment: Assignment, stepped: bool) -> tuple[bool, bool]:
        """Whether state may have changed on some rank, and what is believed still holds on all. Collective."""

        def look() -> bytes:
            follows, digests = assignment.belief.look()
            return bytes([stepped, follows]) + digests

        seen = gather_bytes(self._group, look)
        holds = all(one[1] for one in seen) and assignment.belief.agree([one[2:] for one in seen])
        return any(one[0] for one in seen), holds

    @property
    def positions(self) -> int:
        """Snapshots whose samples compare everything once, the same on all ranks; 0: nothing is compared."""
        return self._sampler.positions if self._sampler is not None else 0

    def sample(self, number: int) -> None:
        """Sample what other ranks hold, too, for snapshot ``number``."""
        if self._sampler is not None:
            self._sampler.take(number)

    def sampled(self, number: int) -> tuple[Integers | None, Comparison | None]:
        """This rank's words for snapshot ``number``, and how those of all ranks are compared."""
        if self._sampler is None:
            return None, None
        words = self._sampler.words(number)
        return words, self._sampler.comparison if words is not None else None

    def proves(self) -> bool:
        """Whether derived pieces and replicas are on all ranks what they were taken for. Collective."""
        assignment = self._assignment
        same = assignment is not None and self._assign().manifest == assignment.manifest
        return all(codec.gather(self._group, same, bool))

    def supply(self) -> None:
        """Have slots allocated that the arena lacks, behind the last look at the memory of the node."""
        if self.capture is not None:
            self._arenas.supply(self.capture.arena)

    def complete(self, keep: Collection[SnapshotId]) -> None:
        """Take into use the slots that the arena still lacks, as they get their memory. Where none is free beside
        those that ``keep`` their snapshots, what a start has left to be allocated is waited for, if it is of use."""
        if self.capture is not None and (self.capture.lacks_slots or not self._arenas.settled):
            lacks = self.capture.lacks_slots and not self.capture.has_room(keep)
            waits = lacks and self.capture.takes_fresh_slots
            self.capture.use_slots(self._arenas.complete(self.capture.arena, waits))

    @property
    def shortage(self) -> str:
        """Why this rank can take no snapshots: one slot keeps the newest, and no other has memory; else empty."""
        few = self.capture is not None and self.capture.num_slots < _MIN_SLOTS
        return self._arenas.shortage if few else ""

    def let_go(self) -> bool:
        """ftckpt is off, and no proof follows: nothing of training's is held any more; whether anything was."""
        held = self._described is not None
        self._described = self._assignment = self._sampler = self._sharing = None
        return held

    def _leave_arena(self) -> None:
        """What could be used of it before another rank had no room."""
        capture, self.capture, self._sampler = self.capture, None, None
        if capture is not None:
            capture.close()
            capture.arena.close()

    def _lay_out_anew(self, capture: Capture, checked: Assignment, whole: SnapshotId | None) -> None:
        # First: if no arena can be had nothing is left that copies into one that is closed.
        self.capture = self._sampler = None
        capture.close()
        self._arenas.replace(capture.arena, whole, checked.manifest, partial(self._use, checked))

    def _use(self, assignment: Assignment, arena: Arena) -> None:
        pacer, own_stream = self._pacer, self._config.schedule != "thread"
        copier = make_copier(
            pacer.clock, own_stream, self._tell_copying, locality=self._locality,
            turns=self._arenas.path / PINNING_NAME, tell_far=self._tell_far, pins=self._config.pin == "on",
        )  # fmt: skip
        self._assignment = assignment
        try:
            self.capture = Capture(arena, assignment.pieces, assignment.parts, copier, pacer.windows)
        except BaseException:  # nobody else knows of it
            arena.close()
            raise
        limit = self._config.replica_check_interval
        self._sampler = Sampler(assignment, self._group.rank, self._group.size, limit)
        derived_bytes = sum(piece.fragment.nbytes for piece in assignment.derived)
        copied_bytes = self.capture.stepped_bytes
        spill = dict(zip(("equal", "chosen"), assignment.spill_bytes or (), strict=False))
        self._events.emit("plan", copied_bytes=copied_bytes, derived_bytes=derived_bytes, spill_bytes=spill)

    def _assign(self, cast: Collection[str] = ()) -> Assignment:
        config, described = self._config, self._described
        assert described is not None, "let go of"
        room = config.objects_bytes + described.objects_bytes
        if self._sharing is None:
            self._sharing = gather_sharing(self._group, described)
        return assign(
            self._group, self._topology, described, room, config.chunk_bytes, self.capacities, self._redundancy,
            self._sharing, cast,
        )  # fmt: skip

    def _tell_far(self, node: int, pages: Mapping[int, int]) -> None:
        found = ", ".join(f"{num} on {other}" for other, num in pages.items())
        self._events.emit(
            "environment", name="far slots",
            text=f"of a sample of a slot's pages {found}, and the device is on NUMA node {node}: copies are slower",
            remedy="bind each rank to the cores and the memory of its device's NUMA node",
        )  # fmt: skip

    def _tell_differing(self, found: Mapping[str, tuple[int, ...]]) -> int:
        """Returns how many were not told before."""
        fresh = {name: odd for name, odd in found.items() if name not in self._told}
        if fresh:
            names, odd = list(fresh)[:_MOST_NAMED], self._topology.named(odd_ranks(fresh))
            self._events.emit("replicas_differ", fragments=names, num=len(fresh), odd_ranks=odd)
        self._told.update(fresh)
        return len(fresh)

    def _tell_broken(self, assignment: Assignment, checked: Assignment) -> bool:
        """Whether any of what was derived does not follow any more."""
        still = {piece.fragment.key for piece in checked.derived}
        broken = [piece.fragment.key for piece in assignment.derived if piece.fragment.key not in still]
        if broken:
            self._events.emit("not_derived", keys=broken[:_MOST_NAMED], num=len(broken))
        return bool(broken)


def odd_ranks(found: Mapping[str, Iterable[int]]) -> list[int]:
    """Of all of these fragments."""
    return sorted({*chain.from_iterable(found.values())})


def corruption_text(topology: Topology, proof: Proof, iteration: int, trusted: int) -> str:
    """What ranks that must hold the same and do not are to be told; ``trusted``: when they did for the last time."""
    odd = topology.named(proof.odd_ranks)
    who = f"{listed(odd)} hold(s) other bits than most" if odd else "nobody can say which rank is right"
    since, back = "the start", "from a checkpoint"
    if trusted >= 0:
        since = f"iteration {trusted}"
        back = f"with --ftckpt-rollback-before {trusted + 1}: newer snapshots may hold those bits, on storage, too"
    return (
        f"replicas of {listed(proof.differing[:_MOST_NAMED])} differ at iteration {iteration}: {who}; they were the "
        f"same at {since}: have that hardware tested, then start again {back}; where the script lets them drift, "
        "--ftckpt-on-corruption report goes on"
    )


def device_of(described: Description) -> torch.device:
    """Where training is, by its state.

    Raises:
        UnsupportedError: that is on several devices, or on another than the current one.
    """
    # Weights that an offloaded optimizer keeps in host memory are copied by the device's copier too.
    tensors = (piece.tensor for piece in (*described.stepped, *described.volatile))
    devices = sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
    if not devices:
        return torch.device("cpu")
    if len(devices) > 1:
        raise UnsupportedError(
            f"this rank's training state lies on {listed([str(one) for one in devices])}: one rank, one device; move "
            "it to one of them, or start a rank for each"
        )
    current = torch.cuda.current_device()
    if devices[0].index != current:
        # Masks of a restart would be drawn by a generator that no snapshot has.
        raise UnsupportedError(
            f"this rank's training state lies on {devices[0]}, and the current device, whose RNG is saved, is "
            f"cuda:{current}: call torch.cuda.set_device({devices[0].index}) before the model is built"
        )
    return devices[0]
