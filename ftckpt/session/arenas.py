"""The arenas of a node, new and old, and the memory that they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ftckpt.capture.affinity import run_on
from ftckpt.capture.copier import Cores
from ftckpt.config import Config
from ftckpt.errors import ArenaError, FtckptError
from ftckpt.events import Events
from ftckpt.group import Group, gather_all, together
from ftckpt.memory.arena import Arena, clear_arena
from ftckpt.memory.directory import arena_path, list_arenas, remove_arena, remove_job_if_empty
from ftckpt.memory.ledger import Ledger, give_up, in_use, require, require_limit
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import human
from ftckpt.model.topology import Topology
from ftckpt.parity.modes import ways_to_need_less
from ftckpt.session import deadlines
from ftckpt.session.memory_forecast import MemoryForecast, absent_slots, foresee_arena
from ftckpt.session.node_join import NodeJoin
from ftckpt.session.protection import Protection, RankReport
from ftckpt.session.slot_allocator import SlotAllocator

_LARGE_BYTES = 4 << 30
"""Size from which an allocation is logged: it takes seconds."""


class NodeArenas:
    """One rank's access to its node's arenas. Call ``entry.enter`` first; ``open``, ``replace``, ``supply`` and
    ``leave`` are collective.

    Old arenas are those that no rank of the node writes. They are kept until a snapshot in the new ones is as safe as
    theirs: until then they may have the only one. Each rank removes those of its own shard, so that it knows without
    a message when their memory is free, and a part of those of shards that no rank of the node has.
    """

    def __init__(
        self, config: Config, topology: Topology, group: Group, events: Events, *, protects: bool = False
    ) -> None:
        self.entry = NodeJoin(config, topology, group, events)
        self.slots = config.slots
        """The number of slots of an arena."""
        self._protects = protects
        self.cores: Cores = None
        """CPU cores for allocation: tmpfs places memory on the NUMA node of the core that first writes it."""
        self._config = config
        self._topology = topology
        self._group = group
        self._events = events
        self._leads = topology.is_node_leader
        self._old: list[Path] = []
        self._removing = False  # the old arenas are obsolete
        self._own: Path | None = None
        self._made: Path | None = None  # created by this start
        self._supply: SlotAllocator | None = None
        self.shortage = ""
        """Why a slot could not be allocated; empty if none failed."""
        self._supplies_start = False  # the allocation under way includes slots that ``open`` left
        self._opened = False  # ``open`` was called, and no allocation has started since
        self._needed: frozenset[SnapshotId] = frozenset()  # snapshots that old arenas must keep
        self._most = 0  # maximum of slots while old arenas exist
        self.coming_bytes = 0
        """Memory that this node's ranks will allocate next to old arenas, minus what those will free."""

    @property
    def path(self) -> Path:
        """The node's directory; valid after ``entry.enter``."""
        return self.entry.path

    def open(
        self, manifest: Manifest, keep: SnapshotId | None, use: Use | None = None,
        protection: Protection | None = None, lacking: bool = False,
    ) -> Arena:  # fmt: skip
        """Open and lock the arena for ``manifest``: the existing one, or a new one.

        ``keep`` is the snapshot in existing arenas from which the job would restart. The arena has the slots that
        are allocated now. ``supply`` then starts, in the background, to free slots of old arenas with neither
        ``keep`` nor a protected snapshot, and to allocate the others. While an old arena exists, this rank's slots,
        its old ones included, stay within the configured number; at least one new slot is writable.

        ``use`` is called with the arena, and must close it if it fails; the error is raised on all ranks. The gather
        carries what ``protection`` needs from other ranks.

        ``lacking``: the node has no room. Old arenas free unneeded slots; new ones are allocated when memory is free.

        Raises:
            MemoryBudgetError: ``memory_limit`` is exceeded, or, unless ``lacking``, the node has no room for slots.
            ArenaError: locked by another process, or not creatable.
        """
        path = arena_path(self.path, manifest)

        @cache
        def look() -> tuple[Arena | None, list[Path], Ledger]:
            existing = self._reuse(path)
            return existing, *self._in_use(path)

        def foresee(marks: frozenset[SnapshotId]) -> MemoryForecast:
            existing, old, there = look()
            return foresee_arena(
                there.protecting(marks), old, existing, slots=self.slots, keep=keep, manifest=manifest
            )

        outlook, posts = self._agree(foresee, path.name, protection)
        self._old = look()[1]
        self._own, self._removing, self._opened = path, keep is None, True
        self._needed, self._most = outlook.needed, outlook.most
        if lacking:
            give_up(self._old, self._needed)
        self._require_room(posts, lacking)
        arena: Arena | None = None

        def make() -> None:
            nonlocal arena
            arena = self._create(manifest, outlook.existing)
            if use is not None:
                use(arena)
            if protection is not None:
                reports = [post.report for post in posts if post.report is not None]
                protection.join(arena, reports, self.coming_bytes, self.slots, lacking)

        # After the check of the node's memory: if that fails, nothing may have changed.
        together(self._group, make)
        assert arena is not None, "``together`` raises if it failed"
        if keep is not None:
            arena.control.mark_whole(keep)  # if the old arena vanishes, a restart must know what was lost
        if protection is not None:
            protection.begin()
        return arena

    def replace(self, old: Arena, whole: SnapshotId | None, manifest: Manifest, use: Use | None = None) -> Arena:
        """Switch to another manifest during training; returns its locked arena, as ``open`` does.

        ``old`` is the current arena, which is closed. ``whole`` is the newest committed snapshot; all others are
        invalidated. No copy may run.

        Raises:
            MemoryBudgetError, ArenaError: the new arena cannot be allocated. ``whole`` is kept; if the memory check
                failed before anything was invalidated, all snapshots are.
        """
        self._end_supply()
        try:
            # First: without room, snapshots would be invalidated for nothing.
            _, posts = self._agree(lambda marks: self._foresee_change(marks, old, whole, manifest))
            self._require_room(posts)
            # A kill from here on must leave all ranks consistent: uncommitted snapshots are invalidated in every
            # arena before the first arena changes.
            together(self._group, lambda: _void_others(old, whole))
        finally:
            old.close()
        return self.open(manifest, whole, use)

    def remove_old(self) -> None:
        """Remove old arenas: a snapshot in the new ones is as safe as theirs.

        A failure, because the SMP creates a file there at this moment, is an event; ``complete`` retries.
        """
        self._removing = True
        if self._supply is not None and not self._supply.ended:
            return  # it may be freeing slots there
        for path in list(self._old):
            try:
                remove_arena(path)
            except OSError as error:
                self._events.emit("arena_problem", path=str(path), problems=[str(error)])
            else:
                self._old.remove(path)

    def supply(self, arena: Arena) -> None:
        """Free unneeded slots of old arenas and allocate the missing ones of ``arena``, in the background, once all
        ranks have called this. Collective, but does not wait."""
        through, _ = self._group.start_minimum([0])
        self._begin_supply(arena, through.is_completed)

    @property
    def settled(self) -> bool:
        """Whether no old arena is left and no allocation is pending."""
        return not self._old and not self._opened and self._supply is None

    def complete(self, arena: Arena, waits: bool = False) -> list[int]:
        """Allocate the missing slots of ``arena`` in the background, once old arenas are removed; returns the slots
        that were added since the last call.

        Call it at each boundary. With ``waits`` it waits for a slot that ``open`` left to the background, else for
        nothing. A slot without room is an event, and is retried.
        """
        if self._old and self._removing:
            self.remove_old()
        allocated: list[int] = []
        if self._supply is not None:
            if waits and self._supplies_start:
                self._supply.wait(deadlines.FENCE_SECS)
            ended = self._supply.ended
            try:
                allocated = self._supply.take()
            except FtckptError as error:
                self._supply, self._supplies_start = None, False
                self._tell_lacking(arena, error)
                return []  # retried at the next boundary
            if ended:
                self._supply, self._supplies_start = None, False
                self._old = [path for path in self._old if path.exists()]
        if allocated:
            self.shortage = ""
        # In the same call: memory that an old arena has just freed is used without waiting for the next boundary.
        if self._supply is None:
            self._begin_supply(arena)
        return allocated

    def _tell_lacking(self, arena: Arena, error: FtckptError) -> None:
        self._events.emit("arena_problem", path=str(arena.path), problems=[str(error)])
        if not self.shortage:  # once, however often it is retried
            self._events.warn(f"a slot could not be allocated, and snapshots are skipped: {error}")
        self.shortage = str(error)

    def _begin_supply(self, arena: Arena, through: Callable[[], bool] | None = None) -> None:
        absent, first = absent_slots(arena), self._opened
        # An arena of an earlier start may have more slots than configured: those stay absent.
        most = self._most if self._old and not (first and self._removing) else self.slots
        missing = absent[: max(0, most - (arena.control.slots - len(absent)))]
        free = partial(self._free, list(self._old)) if first and self._old else None
        if missing or free is not None:
            need_bytes = len(missing) * arena.image.file_bytes
            if first and need_bytes > _LARGE_BYTES:
                self._events.announce(f"allocating {human(need_bytes)} of shared memory per rank in the background")
            self._supply = SlotAllocator(arena, missing, self.cores, free, through)
        self._opened, self._supplies_start = False, first and bool(missing)

    def _free(self, old: Sequence[Path]) -> None:
        """Free memory of old arenas before the allocation: the node may not have room for both."""
        if self._needed:
            give_up(old, self._needed)
            return
        for path in old:
            with suppress(OSError):  # ``remove_old`` retries and reports it
                remove_arena(path)

    def leave(self, arena: Arena | None, agreed: Callable[[], object], end_smp: Callable[[], None]) -> None:
        """Remove this rank's arenas, after all ranks have called this and then ``agreed``.

        The node's leader then calls ``end_smp``.

        Raises:
            RuntimeError: a rank is missing; nothing was removed.
        """
        self._group.barrier()  # the job is done on all ranks: none will restart from what is removed
        self._end_supply()
        agreed()
        self._group.barrier()  # every rank has recorded the end before the first snapshot is removed
        self.remove_old()
        if arena is not None:
            arena.remove()
        elif self._own is not None:
            remove_arena(self._own)
        self._group.barrier()  # all arenas are removed: the SMP has nothing left to protect
        if self.entry.is_held:
            end_smp()
            remove_job_if_empty(Path(self._config.arena), self._config.job, self._topology.me.node)

    def withdraw(self) -> None:
        """Undo a refused start: remove what it created, keep the rest. The arena must be closed.

        Not collective, as other ranks may have exited; the last one removes the directory if it is empty.
        """
        self.release()
        try:
            if self._made is not None:
                remove_arena(self._made)
            remove_job_if_empty(Path(self._config.arena), self._config.job, self._topology.me.node)
        except (FtckptError, OSError) as error:  # the error of the start matters more
            self._events.emit("arena_problem", path=str(self._made), problems=[str(error)])

    def release(self) -> None:
        """Release the job's lock; the directory's content stays."""
        self._end_supply()
        self.entry.release()

    def _end_supply(self) -> None:
        if self._supply is not None:
            self._supply.close()
            self._supply, self._supplies_start = None, False

    def _in_use(self, own: Path) -> tuple[list[Path], Ledger]:
        """The old arenas that this rank removes, and their ledger; all ranks read before one removes any."""
        topology = self._topology
        local = topology.ranks_on(topology.me.node)
        shards = [topology.members[rank].shard for rank in local]
        old = share_of([p for p in list_arenas(self.path) if p != own], shards, local.index(topology.rank))
        return old, in_use(old)

    def _agree(
        self, foresee: Callable[[frozenset[SnapshotId]], MemoryForecast], name: str = "",
        protection: Protection | None = None,
    ) -> tuple[MemoryForecast, list[_Post]]:  # fmt: skip
        """Gather the needs of all ranks; returns this rank's forecast and all posts. ``foresee`` takes the snapshots
        that any rank's old arenas mark as protected. Collective.

        Marks may differ by a vote result that some ranks had not read. One mark suffices: it follows from the votes
        of all nodes.
        """
        outlook: MemoryForecast | None = None

        def post(marks: frozenset[SnapshotId] = frozenset()) -> _Post:
            nonlocal outlook
            outlook = foresee(marks)
            now_bytes, later_bytes = outlook.needs.now_bytes - outlook.freed_bytes, outlook.needs.later_bytes
            report = protection.tell(outlook.image, name, outlook.existing) if protection is not None else None
            slots = self.slots if outlook.existing is None else outlook.existing.control.slots
            return _Post(now_bytes, later_bytes, slots, outlook.image.file_bytes, outlook.marks, report)

        posts = gather_all(self._group, post, _Post)
        marks = frozenset(chain.from_iterable(one.marks or () for one in posts))
        # An arena of an earlier start may have fewer slots; ranks with more would take snapshots that it cannot.
        wanted, self.slots = self.slots, min(self.slots, *(one.slots for one in posts))
        # The same on all ranks. A rank's old arenas may have a snapshot that only others mark as protected.
        if self.slots < wanted or any(one.marks is not None and not marks <= set(one.marks) for one in posts):
            posts = gather_all(self._group, lambda: post(marks), _Post)
        assert outlook is not None, "``gather_all`` raises if it failed"
        return outlook, posts

    def _foresee_change(
        self, marks: frozenset[SnapshotId], arena: Arena, keep: SnapshotId | None, manifest: Manifest
    ) -> MemoryForecast:
        """As ``foresee_arena``, as if only ``keep`` were left in ``arena``; changes nothing."""
        path = arena_path(self.path, manifest)
        old, there = self._in_use(path)
        there = there.protecting(marks).without(arena.path.name, keep)
        try:
            existing = Arena.open(path)
        except ArenaError:  # no usable one exists
            return foresee_arena(there, old, None, slots=self.slots, keep=keep, manifest=manifest)
        with closing(existing):
            return foresee_arena(there, old, existing, slots=self.slots, keep=keep, manifest=manifest)

    def _require_room(self, posts: Sequence[_Post], lacking: bool = False) -> None:
        """Raise MemoryBudgetError unless the node has room for its ranks' needs, now and after the removal of old
        arenas. ``lacking``: check only the configured limit."""
        self.coming_bytes = 0
        remedies = ways_to_need_less(self._config, self.slots, self._protects)
        for node in dict.fromkeys(member.node for member in self._topology.members):  # the same on all ranks
            slot_bytes = sum(posts[rank].slot_bytes for rank in self._topology.ranks_on(node))
            require_limit(
                self._config.memory_limit_bytes, node, self.slots * slot_bytes, remedies=remedies,
                is_all=not self._protects,
            )  # fmt: skip
        needs = [(post.now_bytes, post.later_bytes) for post in posts]
        if lacking or not any(map(any, needs)):
            return  # on all ranks: the check below is collective
        local = [needs[rank] for rank in self._topology.ranks_on(self._topology.me.node)]
        self.coming_bytes = sum(now_bytes for now_bytes, _ in local)
        # Both sums must fit: now, next to old arenas, and later, in their place.
        need_bytes = max(map(sum, zip(*local, strict=True)))
        together(self._group, lambda: require(self.path, need_bytes) if self._leads else None)

    def _create(self, manifest: Manifest, existing: Arena | None) -> Arena:
        """Lock the arena for ``manifest``; creates it, without slots, unless it is ``existing``."""
        if existing is None:
            self._made = arena_path(self.path, manifest)
        arena = existing or Arena.create(self.path, manifest, self.slots, allocate=0)
        arena.lock(deadlines.LOCK_SECS)
        self._events.emit(
            "arena",
            path=str(arena.path),
            reused=existing is not None,
            slots=arena.control.slots,
            allocated=arena.control.slots - len(absent_slots(arena)),
            slot_bytes=arena.image.file_bytes,
        )
        return arena

    def _reuse(self, path: Path) -> Arena | None:
        """Open the arena at ``path`` and reset its corrupt slots; None if there is none or it is unusable."""
        if not path.exists():
            return None
        try:
            arena = Arena.open(path, writable=True)
        except ArenaError as error:
            self._events.emit("arena_problem", path=str(path), problems=[str(error)])
            clear_arena(path)
            return None
        for slot in range(arena.control.slots):
            if arena.allocated(slot) and not arena.header_good(slot):
                run_on(self.cores, partial(arena.renew, slot))
        return arena


Use = Callable[[Arena], object]


class _Post(NamedTuple):
    """A rank's post to the others: bytes that it needs now and later, the maximum and the size of its arena's slots,
    ``marks`` as in ``MemoryForecast``, and its report for protection."""

    now_bytes: int
    later_bytes: int
    slots: int
    slot_bytes: int
    marks: tuple[SnapshotId, ...] | None
    report: RankReport | None


def share_of(old: Sequence[Path], shards: Sequence[str], place: int) -> list[Path]:
    """The arenas of ``old`` that one rank removes: those of its own shard, ``shards[place]``, and its part of those
    of shards that no rank of the node has, because of another layout or of ranks that moved to other nodes."""
    foreign = [path for path in old if _shard_at(path) not in shards]
    return [path for path in old if _shard_at(path) == shards[place]] + foreign[place :: len(shards)]


def _shard_at(path: Path) -> str:
    return path.name.rpartition(".")[0]


def _void_others(arena: Arena, keep: SnapshotId | None) -> None:
    for slot in range(arena.control.slots):
        if keep is None or arena.control.record(slot).snapshot != keep:
            arena.control.void(slot)
