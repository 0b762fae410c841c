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
from ftckpt.session.attempt import NodeJoin
from ftckpt.session.protection import JoinedNodes, Protection, RankReport
from ftckpt.session.slot_allocator import MemoryForecast, SlotAllocator, absent_slots, foresee_arena

_LARGE_BYTES = 4 << 30
"""Size from which an allocation is logged: it takes seconds."""


class OldArenas:
    """The arenas that no rank of the node writes, as far as this rank removes them.

    They are kept until a snapshot in the new ones is as safe as theirs: until then they may have the only one. Each
    rank removes those of its own shard, so that it knows without a message when their memory is free, and a part of
    those of shards that no rank of the node has.

    Args:
        needed: the snapshots that they must keep.
        most: maximum of this rank's slots while they exist.
        is_obsolete: whether they can be removed now.
    """

    def __init__(
        self, paths: Sequence[Path] = (), needed: frozenset[SnapshotId] = frozenset(), most: int = 0,
        is_obsolete: bool = False,
    ) -> None:  # fmt: skip
        self.paths, self._needed = list(paths), needed
        self.most, self.is_obsolete = most, is_obsolete

    def give_up(self) -> None:
        """Free the slots that are not needed."""
        give_up(self.paths, self._needed)

    def free(self) -> None:
        """Free memory before an allocation: the node may not have room for both. Called by its thread."""
        if self._needed:
            self.give_up()
            return
        for path in list(self.paths):
            with suppress(OSError):  # ``remove`` retries and reports it
                remove_arena(path)

    def remove(self, events: Events) -> None:
        """Remove them. A failure, because the SMP creates a file there at this moment, is an event."""
        for path in list(self.paths):
            try:
                remove_arena(path)
            except OSError as error:
                events.emit("arena_problem", path=str(path), problems=[str(error)])
            else:
                self.paths.remove(path)

    def look_again(self) -> None:
        """Forget those that ``free`` has removed."""
        self.paths = [path for path in self.paths if path.exists()]


class NodeArenas:
    """One rank's access to its node's arenas. Call ``entry.enter`` first; ``open``, ``replace``, ``supply`` and
    ``leave`` are collective."""

    def __init__(
        self, config: Config, topology: Topology, group: Group, events: Events, *, protects: bool = False
    ) -> None:
        self.entry = NodeJoin(config, topology, group, events)
        self.slots = config.slots
        """The number of slots of an arena."""
        self._protects = protects
        self.cores: Cores = None
        """CPU cores for allocation: tmpfs places memory on the NUMA node of the core that first writes it."""
        self._config, self._topology = config, topology
        self._group, self._events = group, events
        self._old = OldArenas()
        self._own: Path | None = None
        self._made: Path | None = None  # created by this start
        self.allocator: SlotAllocator | None = None
        """The allocation under way."""
        self.shortage = ""
        """Why a slot could not be allocated; empty if none failed."""
        self._opened = False  # ``open`` was called, and no allocation has started since
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
        """Open and lock the arena for ``manifest``, with the slots that are allocated now, and join ``protection``.

        ``keep`` is the snapshot in existing arenas from which the job would restart. ``use`` is called with the
        arena, and must close it if it fails; the error is raised on all ranks. ``lacking``: the node has no room.
        Old arenas free unneeded slots; new ones are allocated when memory is free.

        Raises:
            MemoryBudgetError: ``memory_limit`` is exceeded, or, unless ``lacking``, the node has no room for slots.
            ArenaError: locked by another process, or not creatable.
        """
        path = arena_path(self.path, manifest)

        look = cache(lambda: (self._reuse(path), *self._in_use(path)))  # once

        def foresee(marks: frozenset[SnapshotId]) -> MemoryForecast:
            existing, old, there = look()
            return self._forecast(existing, old, there.protecting(marks), keep, manifest)

        forecast, posts = self._agree(foresee, path.name, protection)
        self._old = OldArenas(look()[1], forecast.needed, forecast.most, is_obsolete=keep is None)
        self._own, self._opened = path, True
        self._require_room(posts, lacking)

        def make() -> tuple[Arena, JoinedNodes | None]:
            arena = self._create(manifest, forecast.existing, use)
            return arena, self._join(arena, protection, posts, lacking)

        # After the check of the node's memory: if that fails, nothing may have changed.
        arena, joined = together(self._group, make)
        if keep is not None:
            arena.control.mark_whole(keep)  # if the old arena vanishes, a restart must know what was lost
        if protection is not None and joined is not None:
            protection.begin(arena, joined)
        return arena

    def _join(
        self, arena: Arena, protection: Protection | None, posts: Sequence[_Post], lacking: bool
    ) -> JoinedNodes | None:
        if protection is None:
            return None
        reports = [post.report for post in posts if post.report is not None]
        return protection.join(arena, reports, self.coming_bytes, self.slots, lacking)

    def replace(self, old: Arena, committed: SnapshotId | None, manifest: Manifest, use: Use | None = None) -> Arena:
        """Switch to another manifest during training; returns its locked arena, as ``open`` does.

        ``old`` is the current arena, which is closed. ``committed`` is the newest committed snapshot; all others are
        invalidated. No copy may run.

        Raises:
            MemoryBudgetError, ArenaError: the new arena cannot be allocated. ``committed`` is kept; if the memory
                check failed before anything was invalidated, all snapshots are.
        """
        self._end_supply()
        try:
            # First: without room, snapshots would be invalidated for nothing.
            _, posts = self._agree(lambda marks: self._foresee_change(marks, old, committed, manifest))
            self._require_room(posts)
            # A kill from here on must leave all ranks consistent: uncommitted snapshots are invalidated in every
            # arena before the first arena changes.
            together(self._group, lambda: _void_others(old, committed))
        finally:
            old.close()
        return self.open(manifest, committed, use)

    def remove_old(self) -> None:
        """Remove old arenas: a snapshot in the new ones is as safe as theirs. ``complete`` retries."""
        self._old.is_obsolete = True
        if self.allocator is None or self.allocator.ended:  # else it may be freeing slots there
            self._old.remove(self._events)

    def supply(self, arena: Arena) -> None:
        """Free slots of old arenas that have neither the kept nor a protected snapshot, and allocate the missing ones
        of ``arena``, in the background, once all ranks have called this. Collective, but does not wait.

        While an old arena exists, this rank's slots, its old ones included, stay within the configured number; at
        least one new slot is writable.
        """
        through, _ = self._group.start_minimum([0])
        self._begin_supply(arena, through.is_completed)

    @property
    def settled(self) -> bool:
        """Whether no old arena is left and no allocation is pending."""
        return not self._old.paths and not self._opened and self.allocator is None

    def complete(self, arena: Arena, waits: bool = False) -> list[int]:
        """Allocate the missing slots of ``arena`` in the background, once old arenas are removed; returns the slots
        that were added since the last call.

        Call it at each boundary. With ``waits`` it waits for a slot that ``open`` left to the background, else for
        nothing. A slot without room is an event, and is retried.
        """
        if self._old.paths and self._old.is_obsolete:
            self.remove_old()
        allocated: list[int] = []
        if (supply := self.allocator) is not None:
            if waits and supply.is_of_start:
                supply.wait(deadlines.FENCE_SECS)
            ended = supply.ended
            try:
                allocated = supply.take()
            except FtckptError as error:
                self.allocator = None
                self._report_shortage(arena, error)
                return []  # retried at the next boundary
            if ended:
                self.allocator = None
                self._old.look_again()
        if allocated:
            self.shortage = ""
        # In the same call: memory that an old arena has just freed is used without waiting for the next boundary.
        if self.allocator is None:
            self._begin_supply(arena)
        return allocated

    def _report_shortage(self, arena: Arena, error: FtckptError) -> None:
        self._events.emit("arena_problem", path=str(arena.path), problems=[str(error)])
        if not self.shortage:  # once, however often it is retried
            self._events.warn(f"a slot could not be allocated, and snapshots are skipped: {error}")
        self.shortage = str(error)

    def _begin_supply(self, arena: Arena, through: Callable[[], bool] | None = None) -> None:
        absent, first, old = absent_slots(arena), self._opened, self._old
        # An arena of an earlier start may have more slots than configured: those stay absent.
        most = old.most if old.paths and not (first and old.is_obsolete) else self.slots
        missing = absent[: max(0, most - (arena.control.slots - len(absent)))]
        free = old.free if first and old.paths else None
        if missing or free is not None:
            need_bytes = len(missing) * arena.image.file_bytes
            if first and need_bytes > _LARGE_BYTES:
                self._events.announce(f"allocating {human(need_bytes)} of shared memory per rank in the background")
            is_of_start = first and bool(missing)
            self.allocator = SlotAllocator(arena, missing, self.cores, free, through, is_of_start=is_of_start)
        self._opened = False

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
        if self.allocator is not None:
            self.allocator.close()
            self.allocator = None

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
        forecast: MemoryForecast | None = None

        def post(marks: frozenset[SnapshotId] = frozenset()) -> _Post:
            nonlocal forecast
            forecast = foresee(marks)
            now_bytes, later_bytes = forecast.needs.now_bytes - forecast.freed_bytes, forecast.needs.later_bytes
            report = protection.report(forecast.image, name, forecast.existing) if protection is not None else None
            slots = self.slots if forecast.existing is None else forecast.existing.control.slots
            return _Post(now_bytes, later_bytes, slots, forecast.image.file_bytes, forecast.marks, report)

        posts = gather_all(self._group, post, _Post)
        marks = frozenset(chain.from_iterable(one.marks or () for one in posts))
        # An arena of an earlier start may have fewer slots; ranks with more would take snapshots that it cannot.
        wanted, self.slots = self.slots, min(self.slots, *(one.slots for one in posts))
        # The same on all ranks. A rank's old arenas may have a snapshot that only others mark as protected.
        if self.slots < wanted or any(one.marks is not None and not marks <= set(one.marks) for one in posts):
            posts = gather_all(self._group, lambda: post(marks), _Post)
        assert forecast is not None, "``gather_all`` raises if it failed"
        return forecast, posts

    def _forecast(
        self, existing: Arena | None, old: Sequence[Path], there: Ledger, keep: SnapshotId | None, manifest: Manifest
    ) -> MemoryForecast:
        return foresee_arena(there, old, existing, slots=self.slots, keep=keep, manifest=manifest)

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
            return self._forecast(None, old, there, keep, manifest)
        with closing(existing):
            return self._forecast(existing, old, there, keep, manifest)

    def _require_room(self, posts: Sequence[_Post], lacking: bool = False) -> None:
        """Raise MemoryBudgetError unless the node has room for its ranks' needs, now and after the removal of old
        arenas. ``lacking``: free unneeded slots of old arenas, and check only the configured limit."""
        if lacking:
            self._old.give_up()
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
        leads = self._topology.is_node_leader
        together(self._group, lambda: require(self.path, need_bytes) if leads else None)

    def _create(self, manifest: Manifest, existing: Arena | None, use: Use | None) -> Arena:
        """Lock and use the arena for ``manifest``; creates it, without slots, unless it is ``existing``."""
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
        if use is not None:
            use(arena)
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
