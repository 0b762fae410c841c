"""The arenas of this node: who may write which, which ones are old, and whether memory suffices."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ftckpt.arena.image import SlotImage
from ftckpt.arena.leftovers import (
    Snapshot,
    holding,
    num_allocated,
    reclaim,
    refuse_renamed,
    remove_temporaries,
    share_of,
    trim,
    used_bytes,
    void_others,
    wait_for_straggler,
)
from ftckpt.arena.memory import check_budget, once_given_back
from ftckpt.arena.segment import (
    Arena,
    JobLock,
    arena_path,
    list_arenas,
    node_directory,
    remove_arena,
    remove_job_if_empty,
)
from ftckpt.comm import Group, together
from ftckpt.config import Config
from ftckpt.errors import ArenaError, FtckptError, MemoryBudgetError
from ftckpt.events import Events
from ftckpt.layout.topology import Topology
from ftckpt.state.manifest import Manifest

_LARGE_BYTES = 4 << 30
"""Allocating this much takes seconds: people are told."""


class NodeArenas:
    """This rank's view of its node's directory. ``enter``, ``open``, ``replace`` and ``leave`` are collective.

    Old arenas, those that no rank of the node writes any more, are kept until a snapshot in the new ones is
    whole: until then they may hold the only one. Each rank removes those of its own shard, so that it knows without
    asking when their memory is there for its new one, and a part of those of shards that no rank of the node holds.
    """

    def __init__(self, config: Config, topology: Topology, group: Group, events: Events) -> None:
        self.path = Path()
        self._config = config
        self._topology = topology
        self._group = group
        self._events = events
        self._leads = topology.is_node_leader
        self._job_lock: JobLock | None = None
        self._old: list[Path] = []
        self._replaced: list[Arena] = []  # closed, but views that somebody still holds keep memory of slots
        self._own: Path | None = None

    def enter(self) -> None:
        """Make sure that no other live process uses this job's arenas on this node.

        Raises:
            ArenaError: the directory cannot be used, or a live process holds the job or one of its arenas.
        """
        together(self._group, self._enter)

    def open(self, manifest: Manifest, holds_snapshot: bool, keep: Snapshot | None = None) -> Arena:
        """The locked arena for ``manifest``: the one that is there, or a new one.

        ``holds_snapshot``: the arenas that are there hold the snapshot that the job would restart from.
        ``keep`` is that snapshot. Where it is given, slots of old arenas are freed first that hold neither it nor
        what is protected, and the arena may come back with fewer slots allocated than configured (one that can be
        written at least): as many as keep the sum of this rank's slots, old ones that are left to it among them, at
        what is configured. ``complete`` allocates the others. Without it all slots are allocated.

        Raises:
            MemoryBudgetError: the node has no room for its ranks' new slots.
            ArenaError: held by another process, or not creatable.
        """
        path = arena_path(self.path, manifest)
        existing, old = together(self._group, lambda: (self._reuse(path), self._list_old(path)))
        self._own = path
        together(self._group, lambda: self._set_aside(old, holds_snapshot, keep))
        most = self._config.slots - (self._num_old_slots() if keep is not None else 0)
        slot_bytes = SlotImage.of(manifest).file_bytes
        new, absent = self._num_new(existing, most, keep)
        self._check_memory(new * slot_bytes, absent * slot_bytes - sum(map(used_bytes, self._old)))
        return together(self._group, lambda: self._have(manifest, existing, new))

    def replace(self, old: Arena, keep: Snapshot | None, manifest: Manifest) -> Arena:
        """Go over to another manifest while training: the locked arena for it.

        ``old`` is the arena that was written until now, ``keep`` the newest snapshot that is whole on all
        ranks. The slots of ``old`` that do not hold it are given back before new ones are allocated. The new
        arena has as many slots as keep the sum of this rank's slots at what is configured, one at least; the
        others follow from ``remove_old`` and ``complete``. ``keep`` is marked in it as whole. A rank whose
        manifest has not changed gets ``old``, void of all but ``keep``. No copy may run, and no view of a slot
        of ``old`` may be held.

        Raises:
            MemoryBudgetError: no room; nothing was freed, ``old`` is open, locked and can be used.
            ArenaError: the new arena cannot be had. ``old`` is closed; what ``keep`` names is still there.
        """
        path = arena_path(self.path, manifest)
        same = path == old.path
        existing = together(self._group, lambda: old if same else self._reuse(path))
        try:
            self._check_replacement(old, existing, keep, manifest)
        except BaseException:
            if existing is not None and not same:
                existing.close()
            raise
        # A kill from here on must find the same on all ranks: what is not whole is gone from every arena
        # before the first of them goes.
        together(self._group, lambda: void_others(old, keep))
        lingering = together(self._group, lambda: 0 if same else self._give_back(old, keep))
        self._own = path
        self._old = [other for other in self._old if other != path]
        most = self._config.slots - self._num_old_slots() - lingering
        new, _ = self._num_new(existing, most, keep)
        try:
            arena = together(self._group, lambda: old if same else self._have(manifest, existing, new))
        except MemoryBudgetError as error:
            raise ArenaError(f"no room any more after the old slots were freed: {error}") from None
        if keep is not None:
            arena.control.mark_whole(*keep)
        return arena

    def remove_old(self) -> None:
        """A snapshot in the new arenas is whole on all ranks: nobody needs the old ones."""
        for path in self._old:
            remove_arena(path)
        self._old.clear()

    def complete(self, arena: Arena) -> list[int]:
        """Allocate slots that ``arena`` lacks, once old arenas have gone; returns those that it has now.

        Cheap where nothing is to be done: call it at each boundary. A slot for which there is no room is an
        event, and the next call tries again. A slot that was given back counts while there are views of it.
        """
        slots = range(arena.control.slots)
        absent = [slot for slot in slots if not arena.allocated(slot)]
        if not absent or self._old:
            return []
        self._replaced = [replaced for replaced in self._replaced if replaced.lingering]
        lingering = sum(replaced.lingering for replaced in self._replaced)
        room = self._config.slots - (len(slots) - len(absent)) - lingering
        made: list[int] = []
        for slot in absent[: max(0, room)]:
            try:
                check_budget(self.path, arena.image.file_bytes)
                arena.allocate(slot)
            except FtckptError as error:
                self._events.emit("arena_problem", path=str(arena.path), problems=[str(error)])
                break
            made.append(slot)
        if made:
            self._events.emit("slots_allocated", path=str(arena.path), slots=made)
        return made

    def leave(self, arena: Arena | None, end_smp: Callable[[], None] | None = None) -> None:
        """Remove what this rank has, once all ranks are here; ``end_smp`` is then called by the node's leader.

        Raises:
            RuntimeError: a rank did not come; nothing was removed.
        """
        self._group.barrier()
        self.remove_old()
        if arena is not None:
            arena.remove()
        elif self._own is not None:
            remove_arena(self._own)
        self._group.barrier()
        if self._job_lock is not None:
            if end_smp is not None:
                end_smp()
            remove_job_if_empty(Path(self._config.arena), self._config.job, self._topology.me.node)

    def release(self) -> None:
        """Give the lock up; what is in the directory stays."""
        if self._job_lock is not None:
            self._job_lock.release()
            self._job_lock = None

    def _enter(self) -> None:
        self.path = node_directory(Path(self._config.arena), self._config.job, self._topology.me.node)
        if not self._leads:
            return
        refuse_renamed(self.path, {member.node for member in self._topology.members})
        deadline_secs = self._config.lock_timeout_secs
        self._job_lock = JobLock(self.path, deadline_secs)
        for path in list_arenas(self.path):
            wait_for_straggler(path, deadline_secs)
        remove_temporaries(self.path)

    def _list_old(self, own: Path) -> list[Path]:
        """Old arenas that are left to this rank. All ranks list them before one removes any."""
        topology = self._topology
        local = topology.ranks_on(topology.me.node)
        shards = [topology.members[rank].shard for rank in local]
        return share_of([p for p in list_arenas(self.path) if p != own], shards, local.index(topology.rank))

    def _set_aside(self, old: list[Path], holds_snapshot: bool, keep: Snapshot | None) -> None:
        self._old = old if keep is None or not holds_snapshot else [path for path in old if trim(path, keep)]
        if not holds_snapshot:
            self.remove_old()

    def _check_replacement(
        self, old: Arena, existing: Arena | None, keep: Snapshot | None, manifest: Manifest
    ) -> None:
        """Whether the new slots fit, both now and when the old arenas have gone."""
        if existing is old:
            self._check_memory(0, 0)
            return
        others = [path for path in self._old if path != arena_path(self.path, manifest)]
        kept, there = len(holding(old, keep)), num_allocated(old)
        most = self._config.slots - kept - self._num_old_slots(others)
        new, absent = self._num_new(existing, most, keep)
        slot_bytes, old_bytes = SlotImage.of(manifest).file_bytes, old.image.file_bytes
        self._check_memory(
            new * slot_bytes - (there - kept) * old_bytes,
            absent * slot_bytes - there * old_bytes - sum(map(used_bytes, others)),
        )

    def _give_back(self, old: Arena, keep: Snapshot | None) -> int:
        """Close ``old`` with nothing in it but ``keep``; the number of its slots whose memory is not back yet."""
        if reclaim(old, keep):
            self._old.append(old.path)
            self._replaced.append(old)
            lingering = old.lingering  # before the kept slot, which counts among the old ones, is closed
            old.close()
            return lingering
        self._replaced.append(old)
        old.close()
        return old.lingering

    def _num_new(self, existing: Arena | None, most: int, keep: Snapshot | None) -> tuple[int, int]:
        """How many slots to allocate now, and how many lack memory: at most ``most`` in all, but one to write."""
        if existing is None:
            return max(1, min(most, self._config.slots)), self._config.slots
        there = num_allocated(existing)
        absent = existing.control.slots - there
        least = 1 + len(holding(existing, keep))
        return min(absent, max(0, max(most, least) - there)), absent

    def _num_old_slots(self, paths: list[Path] | None = None) -> int:
        """Slots in old arenas that are left to this rank."""
        return sum(len(list(path.glob("slot*"))) for path in (self._old if paths is None else paths))

    def _check_memory(self, now_bytes: int, later_bytes: int) -> None:
        """Whether the node has room for what its ranks need more now, and when their old arenas have gone."""
        gathered = self._group.gather(json.dumps([now_bytes, later_bytes]).encode())
        needs = [json.loads(gathered[rank]) for rank in self._topology.ranks_on(self._topology.me.node)]
        total = max(sum(now for now, _ in needs), sum(later for _, later in needs))
        check = partial(once_given_back, self.path, lambda: check_budget(self.path, total))
        together(self._group, lambda: check() if self._leads and total > 0 else None)

    def _have(self, manifest: Manifest, existing: Arena | None, new: int) -> Arena:
        """The arena for ``manifest``, locked, with ``new`` slots more than it has."""
        need_bytes = new * SlotImage.of(manifest).file_bytes
        if need_bytes > _LARGE_BYTES:
            self._events.tell(f"allocating {need_bytes / 1e9:.1f} GB of shared memory for each rank")
        if existing is None:
            arena = once_given_back(self.path, lambda: Arena.create(self.path, manifest, self._config.slots, new))
        else:
            arena = existing
            for slot in [slot for slot in range(arena.control.slots) if not arena.allocated(slot)][:new]:
                once_given_back(self.path, partial(arena.allocate, slot))
        arena.lock(self._config.lock_timeout_secs)
        self._events.emit(
            "arena",
            path=str(arena.path),
            reused=existing is not None,
            slots=arena.control.slots,
            allocated=num_allocated(arena),
            slot_bytes=arena.image.file_bytes,
        )
        return arena

    def _reuse(self, path: Path) -> Arena | None:
        """The arena at ``path`` with its damaged slots made new; None where nothing in it can be used."""
        if not path.exists():
            return None
        try:
            arena = Arena.open(path, writable=True)
        except ArenaError as error:
            self._events.emit("arena_problem", path=str(path), problems=[str(error)])
            remove_arena(path)
            return None
        for slot in range(arena.control.slots):
            if arena.allocated(slot) and not arena.header_good(slot):
                arena.renew(slot)
        return arena
