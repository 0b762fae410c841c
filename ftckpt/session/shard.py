"""This rank's part of each snapshot, and its arena: laid out at start, and again when a proof requires it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from ftckpt.array_types import Integers
from ftckpt.capture.assignment import Assignment, assign, gather_sharing
from ftckpt.capture.capture import Capture
from ftckpt.capture.device_copier import make_copier
from ftckpt.capture.sample import Sampler
from ftckpt.errors import MemoryBudgetError, UnsupportedError
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
from ftckpt.session.rank_context import RankContext

_MIN_SLOTS = 2
"""Minimum of slots for snapshots: one is written while the other keeps the newest."""

_MOST_NAMED = 5
"""Maximum of fragments named in an event, or in a gather."""


class Proof(NamedTuple):
    """The outcome of a proof, the same on all ranks.

    ``stepped``: optimizer-updated state may have changed on some rank since the start. ``changed``: some rank's copy
    plan is stale. ``new_arenas``: the arenas were rebuilt for that. ``differing``: names of fragments whose replicas
    were assumed to be identical, and differ; ``odd_ranks`` differ from the majority. ``parted``: there are such
    fragments, or pieces that can no longer be derived from others. ``ends``: some rank's settings end the job then.
    """

    stepped: bool
    changed: bool = False
    new_arenas: bool = False
    differing: tuple[str, ...] = ()
    odd_ranks: tuple[int, ...] = ()
    parted: bool = False
    ends: bool = False


class Shard:
    """This rank's part of each snapshot. ``lay_out``, ``prove`` and ``proves`` are collective.

    ``capture`` is None only if no arena could be allocated.
    """

    def __init__(self, rank: RankContext, described: Description, scheduler: WindowScheduler) -> None:
        self._rank, self._scheduler = rank, scheduler
        self._described: Description | None = described
        self.capture: Capture | None = None
        self._assignment: Assignment | None = None
        self._sampler: Sampler | None = None
        self._sharing: ReplicaMap | None = None
        self._reported: set[str] = set()  # differing fragments: a repeated proof finds the same ones again
        self.num_differing = 0
        """Fragments that proofs have found to differ between replicas, which were identical before."""

    @property
    def state(self) -> Description:
        """The training state as described at start; not after ``release``."""
        assert self._described is not None, "let go of"
        return self._described

    def lay_out(self, committed: SnapshotId | None, cast: Collection[str] = ()) -> None:
        """Decide what this rank copies, and open an arena and protection for it; raises on all ranks together.

        ``committed`` is the snapshot in the arenas from which the job resumes. ``cast``: see ``assign``.
        """
        arenas, protection = self._rank.arenas, self._rank.protection
        assignment = self._assign(cast)
        self._report_differing(assignment.differing)
        for lacking in (False, True):
            try:
                use = partial(self._use, assignment)
                arena = arenas.open(assignment.manifest, committed, use, protection, lacking)
                break
            except MemoryBudgetError:
                self._leave_arena()
                # The state is loaded from memory: the job continues, and slots are allocated when there is room.
                if committed is None or lacking:
                    raise
        copied = self.capture.stepped_bytes if self.capture is not None else 0
        interval = self._rank.config.interval
        often = "as often as the budget allows" if interval == "auto" else f"every {interval} iteration(s)"
        self._rank.events.announce(
            f"a snapshot {often} copies {copied / 1e6:.1f} MB from rank 0 into {arenas.slots} slots, "
            f"{arena.image.file_bytes * arenas.slots / 1e6:.1f} MB, at {arena.path}"
        )

    def prove(self, late: bool, stepped: bool, committed: SnapshotId | None) -> Proof:
        """Verify the assumptions about derived pieces and replicas; rebuild the arenas if they do not hold.

        ``late``: this rank may lack vote results, or its copies run. ``stepped``: optimizer-updated state may have
        changed on this rank.

        Raises:
            FtckptError: the copy plan must change, and no arena can be allocated for it.
        """
        assignment, capture = self._assignment, self.capture
        if assignment is None or capture is None:
            return Proof(stepped)
        if not assignment.assumption.needed:  # the same on all ranks: nothing collective follows
            return Proof(True)
        checked = self._assign()
        changed = checked.manifest != assignment.manifest
        broken = self._report_broken(assignment, checked)
        found = {name: odd for name, odd in checked.differing.items() if name not in assignment.differing}
        self.num_differing += self._report_differing(found)
        ends = bool(found) and self._rank.config.on_corruption == "abort"
        names = list(found)[:_MOST_NAMED]
        post = json.dumps([stepped, late, changed, broken, ends, names, odd_ranks(found)]).encode()
        posts = [json.loads(data) for data in self._rank.group.gather(post)]
        steps, lates, changes, breaks, all_ends, all_names, odd = zip(*posts, strict=True)
        differing = tuple(dict.fromkeys(chain.from_iterable(all_names)))
        # A late rank must not treat its arena as an old one. If the job is to end, on any rank's settings, memory
        # stays as it is.
        ends = any(all_ends)
        new_arenas = any(changes) and not any(lates) and not ends
        if new_arenas:
            self._lay_out_anew(capture, checked, committed)
        all_odd = tuple(sorted({*chain.from_iterable(odd)}))
        parted = bool(differing) or any(breaks)
        return Proof(any(steps), any(changes), new_arenas, differing, all_odd, parted, ends)

    @property
    def positions(self) -> int:
        """Number of snapshots whose samples together cover everything, the same on all ranks; 0: no samples."""
        return self._sampler.positions if self._sampler is not None else 0

    def sample(self, number: int) -> None:
        """Sample this rank's replicated state for snapshot ``number``."""
        if self._sampler is not None:
            self._sampler.take(number)

    def sampled(self, number: int) -> tuple[Integers | None, Comparison | None]:
        """This rank's sample for snapshot ``number``, and the comparison of all ranks' samples."""
        if self._sampler is None:
            return None, None
        words = self._sampler.words(number)
        return words, self._sampler.comparison if words is not None else None

    def proves(self) -> bool:
        """Whether the assumptions about derived pieces and replicas hold on all ranks. Collective."""
        assignment = self._assignment
        same = assignment is not None and self._assign().manifest == assignment.manifest
        return all(codec.gather(self._rank.group, same, bool))

    def supply(self) -> None:
        """Start to allocate the missing slots of the arena; call it after the last check of the node's memory."""
        if self.capture is not None:
            self._rank.arenas.supply(self.capture.arena)

    def complete(self, keep: Collection[SnapshotId]) -> None:
        """Add the slots that have been allocated since. If all others are in ``keep``, this waits for a slot that the
        start left to the background."""
        if self.capture is not None and (self.capture.lacks_slots or not self._rank.arenas.settled):
            lacks = self.capture.lacks_slots and not self.capture.has_room(keep)
            waits = lacks and self.capture.takes_fresh_slots
            self.capture.use_slots(self._rank.arenas.complete(self.capture.arena, waits))

    @property
    def shortage(self) -> str:
        """Why this rank can take no snapshots: all its memory is one slot, which keeps the newest; else empty."""
        few = self.capture is not None and self.capture.num_slots < _MIN_SLOTS
        return self._rank.arenas.shortage if few else ""

    def release(self) -> bool:
        """Drop all references to training state, once ftckpt is off; returns whether there were any."""
        held = self._described is not None
        self._described = self._assignment = self._sampler = self._sharing = None
        return held

    def _leave_arena(self) -> None:
        """Close the arena that was opened before another rank had no room."""
        capture, self.capture, self._sampler = self.capture, None, None
        if capture is not None:
            capture.close()
            capture.arena.close()

    def _lay_out_anew(self, capture: Capture, checked: Assignment, committed: SnapshotId | None) -> None:
        # First: if no arena can be allocated, no capture may refer to the closed one.
        self.capture = self._sampler = None
        capture.close()
        self._rank.arenas.replace(capture.arena, committed, checked.manifest, partial(self._use, checked))

    def _use(self, assignment: Assignment, arena: Arena) -> None:
        config, scheduler = self._rank.config, self._scheduler
        copier = make_copier(
            scheduler.clock, config.schedule != "thread", self._rank.protection.report_copying,
            cores=self._rank.arenas.cores, turns=self._rank.arenas.path / PINNING_NAME, pins=config.pin == "on",
        )  # fmt: skip
        self._assignment = assignment
        try:
            self.capture = Capture(arena, assignment.pieces, assignment.parts, copier, scheduler.windows)
        except BaseException:  # it has no other owner
            arena.close()
            raise
        group = self._rank.group
        self._sampler = Sampler(assignment, group.rank, group.size, config.replica_check_interval)
        derived_bytes = sum(piece.fragment.nbytes for piece in assignment.derived)
        copied_bytes = self.capture.stepped_bytes
        self._rank.events.emit("plan", copied_bytes=copied_bytes, derived_bytes=derived_bytes)

    def _assign(self, cast: Collection[str] = ()) -> Assignment:
        config, described, group = self._rank.config, self.state, self._rank.group
        room = config.objects_bytes + described.objects_bytes
        if self._sharing is None:
            self._sharing = gather_sharing(group, described)
        return assign(
            group, self._rank.topology, described, room, config.chunk_bytes,
            redundancy=self._rank.protection.redundancy, sharing=self._sharing, cast=cast,
        )  # fmt: skip

    def _report_differing(self, found: Mapping[str, tuple[int, ...]]) -> int:
        """Report differing fragments once; returns how many are new."""
        fresh = {name: odd for name, odd in found.items() if name not in self._reported}
        if fresh:
            names, odd = list(fresh)[:_MOST_NAMED], self._rank.topology.named(odd_ranks(fresh))
            self._rank.events.emit("replicas_differ", fragments=names, num=len(fresh), odd_ranks=odd)
        self._reported.update(fresh)
        return len(fresh)

    def _report_broken(self, assignment: Assignment, checked: Assignment) -> bool:
        """Report pieces that can no longer be derived; returns whether there are any."""
        still = {piece.fragment.key for piece in checked.derived}
        broken = [piece.fragment.key for piece in assignment.derived if piece.fragment.key not in still]
        if broken:
            self._rank.events.emit("not_derived", keys=broken[:_MOST_NAMED], num=len(broken))
        return bool(broken)


def odd_ranks(found: Mapping[str, Iterable[int]]) -> list[int]:
    """The ranks that differ in any of these fragments."""
    return sorted({*chain.from_iterable(found.values())})


def corruption_text(topology: Topology, proof: Proof, iteration: int, trusted: int) -> str:
    """The error message for differing replicas; ``trusted``: the last iteration at which they were identical."""
    odd = topology.named(proof.odd_ranks)
    who = f"{listed(odd)} differ(s) from the majority" if odd else "no majority shows which rank is right"
    since, back = "the start", "from a checkpoint"
    if trusted >= 0:
        since = f"iteration {trusted}"
        back = f"with --ftckpt-rollback-before {trusted + 1}: newer snapshots, stored ones too, may be corrupt"
    return (
        f"replicas of {listed(proof.differing[:_MOST_NAMED])} differ at iteration {iteration}: {who}; they were the "
        f"same at {since}: have that hardware tested, then restart {back}; if the script lets replicas drift, use "
        "--ftckpt-on-corruption report"
    )


def device_of(described: Description) -> torch.device:
    """The device of the training state.

    Raises:
        UnsupportedError: the state is on several devices, or not on the current one.
    """
    # CPU tensors of an offloaded optimizer do not count: the device's copier handles them, too.
    tensors = (piece.tensor for piece in (*described.stepped, *described.volatile))
    devices = sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
    if not devices:
        return torch.device("cpu")
    if len(devices) > 1:
        raise UnsupportedError(
            f"this rank's training state is on {listed([str(one) for one in devices])}: a rank has one device; move "
            "it to one of them, or start a rank for each"
        )
    current = torch.cuda.current_device()
    if devices[0].index != current:
        # Snapshots save only the current device's RNG: a restart would draw other dropout masks.
        raise UnsupportedError(
            f"this rank's training state is on {devices[0]}, but the current device, whose RNG is saved, is "
            f"cuda:{current}: call torch.cuda.set_device({devices[0].index}) before the model is built"
        )
    return devices[0]
