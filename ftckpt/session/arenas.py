"""The arenas of this node: who may write which, which ones are old, and whether memory suffices."""

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
"""Allocating this much takes seconds: people are told."""


class NodeArenas:
    """This rank's view of its node's directory. ``open``, ``replace`` and ``leave`` are collective, behind
    ``entry.enter``.

    Old arenas, those that no rank of the node writes any more, are kept until a snapshot in the new ones is as safe
    as those in them: until then they may hold the only one. Each rank removes those of its own shard, so that it
    knows without asking when their memory is there for its new one, and a part of those of shards that no rank of the
    node holds.
    """

    def __init__(
        self, config: Config, topology: Topology, group: Group, events: Events, *, protects: bool = False
    ) -> None:
        self.entry = NodeJoin(config, topology, group, events)
        self.slots = config.slots
        """Of an arena."""
        self._protects = protects
        self.cores: Cores = None
        """Where threads run that allocate slots: a tmpfs takes memory of the NUMA node whose core asks for it."""
        self._config = config
        self._topology = topology
        self._group = group
        self._events = events
        self._leads = topology.is_node_leader
        self._old: list[Path] = []
        self._removing = False  # whether nobody needs the old ones any more
        self._own: Path | None = None
        self._made: Path | None = None  # by this start
        self._supply: SlotAllocator | None = None
        self.shortage = ""
        """Why a slot has no memory yet, though it was to have it; empty where it is not so."""
        self._supplies_start = False  # whether it is of the slots that training begins with
        self._opened = False  # and nothing was supplied since
        self._needed: frozenset[SnapshotId] = frozenset()  # of what old arenas hold
        self._most = 0  # slots of the arena beside old ones
        self.coming_bytes = 0
        """What the ranks of this node will take for slots beside old arenas, less what those will give up."""

    @property
    def path(self) -> Path:
        """The node's directory, from ``entry.enter`` on."""
        return self.entry.path

    def open(
        self, manifest: Manifest, keep: SnapshotId | None, use: Use | None = None,
        protection: Protection | None = None, lacking: bool = False,
    ) -> Arena:  # fmt: skip
        """The locked arena for ``manifest``: the one that is there, or a new one.

        ``keep`` is the snapshot in the arenas that are there from which the job would restart. The arena comes back
        with the slots that it has. Behind ``supply``, beside training, slots of old arenas are freed first that hold
        neither it nor what is protected; then it gets its others, or, as long as an old arena is left, as many as
        keep the sum of this rank's slots, old ones that are left to it among them, at what is configured; one that
        can be written at least.

        ``use`` is called with the arena, which is its to close where it fails; the error is that of all ranks. What
        ranks have to tell each other for ``protection`` goes with what is told here.

        ``lacking``: the node has no room. Old arenas give up what nobody needs; slots get memory when there is some.

        Raises:
            MemoryBudgetError: the node has no room for its ranks' new slots, or, ``lacking``, for none at all.
            ArenaError: held by another process, or not creatable.
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

        # Behind the check of the node's room: a change that has none must find all as it was.
        together(self._group, make)
        assert arena is not None, "``together`` raises where it failed"
        if keep is not None:
            arena.control.mark_whole(keep)  # without its old arena a rank would not know what was lost
        if protection is not None:
            protection.begin()
        return arena

    def replace(self, old: Arena, whole: SnapshotId | None, manifest: Manifest, use: Use | None = None) -> Arena:
        """Go over to another manifest while training: the locked arena for it, as ``open`` gives it.

        ``old`` is the arena that was written until now; it is closed. ``whole`` is the newest snapshot that is whole
        on all ranks: nothing else stays. No copy may run.

        Raises:
            MemoryBudgetError, ArenaError: the new arena cannot be had; what ``whole`` names is still there, and where
                the node has no room even for what would be left, all else is, too.
        """
        self._end_supply()
        try:
            # First of all: what is protected would be given up for nothing.
            _, posts = self._agree(lambda marks: self._foresee_change(marks, old, whole, manifest))
            self._require_room(posts)
            # A kill from here on must find the same on all ranks: what is not whole is gone from every arena
            # before the first of them goes.
            together(self._group, lambda: _void_others(old, whole))
        finally:
            old.close()
        return self.open(manifest, whole, use)

    def remove_old(self) -> None:
        """A snapshot in the new arenas is as safe as those in the old ones were: nobody needs these.

        One that resists, because the SMP makes a file there at this moment, is an event; ``complete`` tries it again.
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
        """Have old arenas give up what nobody needs, and the slots allocated that ``arena`` lacks, in the
        background, once all ranks have called it. Collective, and waits for nobody."""
        through, _ = self._group.start_minimum([0])
        self._begin_supply(arena, through.is_completed)

    @property
    def settled(self) -> bool:
        """Whether there are no old arenas, and nothing is being allocated."""
        return not self._old and not self._opened and self._supply is None

    def complete(self, arena: Arena, waits: bool = False) -> list[int]:
        """Have slots allocated in the background that ``arena`` lacks, once old arenas have gone; returns those that
        it has got since the last call.

        Call it at each boundary. It waits for nothing but, where ``waits``, for a slot of those that ``open`` has
        left to be allocated. A slot for which there is no room is an event, and is tried again.
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
                return []  # tried again at the next boundary
            if ended:
                self._supply, self._supplies_start = None, False
                self._old = [path for path in self._old if path.exists()]
        if allocated:
            self.shortage = ""
        # In the same call: what an old arena has just given back need not wait for the next boundary.
        if self._supply is None:
            self._begin_supply(arena)
        return allocated

    def _tell_lacking(self, arena: Arena, error: FtckptError) -> None:
        self._events.emit("arena_problem", path=str(arena.path), problems=[str(error)])
        if not self.shortage:  # once, however often it is tried again
            self._events.warn(f"a slot has no memory, and snapshots are skipped for that: {error}")
        self.shortage = str(error)

    def _begin_supply(self, arena: Arena, through: Callable[[], bool] | None = None) -> None:
        absent, first = absent_slots(arena), self._opened
        # An arena of an earlier start may have more slots than are configured: those stay absent.
        most = self._most if self._old and not (first and self._removing) else self.slots
        missing = absent[: max(0, most - (arena.control.slots - len(absent)))]
        free = partial(self._free, list(self._old)) if first and self._old else None
        if missing or free is not None:
            need_bytes = len(missing) * arena.image.file_bytes
            if first and need_bytes > _LARGE_BYTES:
                self._events.announce(
                    f"allocating {human(need_bytes)} of shared memory for each rank, beside training"
                )
            self._supply = SlotAllocator(arena, missing, self.cores, free, through)
        self._opened, self._supplies_start = False, first and bool(missing)

    def _free(self, old: Sequence[Path]) -> None:
        """What can be freed goes before anything is allocated: a node need not hold both."""
        if self._needed:
            give_up(old, self._needed)
            return
        for path in old:
            with suppress(OSError):  # ``remove_old`` tries it again, and tells it
                remove_arena(path)

    def leave(self, arena: Arena | None, agreed: Callable[[], object], end_smp: Callable[[], None]) -> None:
        """Remove what this rank has, once all ranks are here and each has called ``agreed``.

        ``end_smp`` is then called by the node's leader.

        Raises:
            RuntimeError: a rank did not come; nothing was removed.
        """
        self._group.barrier()  # the job is done on all ranks: none will restart from what is removed
        self._end_supply()
        agreed()
        self._group.barrier()  # that is known everywhere before the first snapshot goes
        self.remove_old()
        if arena is not None:
            arena.remove()
        elif self._own is not None:
            remove_arena(self._own)
        self._group.barrier()  # the last arena has gone, with it what the SMP guards
        if self.entry.is_held:
            end_smp()
            remove_job_if_empty(Path(self._config.arena), self._config.job, self._topology.me.node)

    def withdraw(self) -> None:
        """The start was refused: what it made goes, what was there before stays. The arena must be closed.

        Each rank does so by itself, as others may have gone: the last one leaves no directory.
        """
        self.release()
        try:
            if self._made is not None:
                remove_arena(self._made)
            remove_job_if_empty(Path(self._config.arena), self._config.job, self._topology.me.node)
        except (FtckptError, OSError) as error:  # the refusal says more than this
            self._events.emit("arena_problem", path=str(self._made), problems=[str(error)])

    def release(self) -> None:
        """Give the lock up; what is in the directory stays."""
        self._end_supply()
        self.entry.release()

    def _end_supply(self) -> None:
        if self._supply is not None:
            self._supply.close()
            self._supply, self._supplies_start = None, False

    def _in_use(self, own: Path) -> tuple[list[Path], Ledger]:
        """Old arenas that are left to this rank, and what lies in them; all ranks look before one removes any."""
        topology = self._topology
        local = topology.ranks_on(topology.me.node)
        shards = [topology.members[rank].shard for rank in local]
        old = share_of([p for p in list_arenas(self.path) if p != own], shards, local.index(topology.rank))
        return old, in_use(old)

    def _agree(
        self, foresee: Callable[[frozenset[SnapshotId]], MemoryForecast], name: str = "",
        protection: Protection | None = None,
    ) -> tuple[MemoryForecast, list[_Post]]:  # fmt: skip
        """What this rank needs, and what all tell of themselves; ``foresee`` gives it by what other ranks' old arenas
        call protected, too. Collective.

        Marks may differ by a verdict that some ranks had not read yet. One mark is proof enough for all: it was made
        of a verdict of all nodes.
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
        # An arena of an earlier start may have fewer, and ranks with more would take what that rank cannot.
        wanted, self.slots = self.slots, min(self.slots, *(one.slots for one in posts))
        # Known to all alike: a rank's old arenas may hold what only others call protected.
        if self.slots < wanted or any(one.marks is not None and not marks <= set(one.marks) for one in posts):
            posts = gather_all(self._group, lambda: post(marks), _Post)
        assert outlook is not None, "``gather_all`` raises where it failed"
        return outlook, posts

    def _foresee_change(
        self, marks: frozenset[SnapshotId], arena: Arena, keep: SnapshotId | None, manifest: Manifest
    ) -> MemoryForecast:
        """As ``foresee_arena`` when nothing but ``keep`` is left in ``arena``; nothing is changed."""
        path = arena_path(self.path, manifest)
        old, there = self._in_use(path)
        there = there.protecting(marks).without(arena.path.name, keep)
        try:
            existing = Arena.open(path)
        except ArenaError:  # none is there to use
            return foresee_arena(there, old, None, slots=self.slots, keep=keep, manifest=manifest)
        with closing(existing):
            return foresee_arena(there, old, existing, slots=self.slots, keep=keep, manifest=manifest)

    def _require_room(self, posts: Sequence[_Post], lacking: bool = False) -> None:
        """Raise MemoryBudgetError unless the node has room for what ranks need now and when old arenas have gone, or
        may lack it."""
        self.coming_bytes = 0
        remedies = ways_to_need_less(self._config, self.slots, self._protects)
        for node in dict.fromkeys(member.node for member in self._topology.members):  # all ranks come to the same
            slot_bytes = sum(posts[rank].slot_bytes for rank in self._topology.ranks_on(node))
            require_limit(
                self._config.memory_limit_bytes, node, self.slots * slot_bytes, remedies=remedies,
                is_all=not self._protects,
            )  # fmt: skip
        needs = [(post.now_bytes, post.later_bytes) for post in posts]
        if lacking or not any(map(any, needs)):
            return  # on all ranks: what is asked for below is asked for together
        local = [needs[rank] for rank in self._topology.ranks_on(self._topology.me.node)]
        self.coming_bytes = sum(now_bytes for now_bytes, _ in local)
        # Both sums must fit: at once beside old arenas, and in the end in their place.
        need_bytes = max(map(sum, zip(*local, strict=True)))
        together(self._group, lambda: require(self.path, need_bytes) if self._leads else None)

    def _create(self, manifest: Manifest, existing: Arena | None) -> Arena:
        """The arena for ``manifest``, locked, with the slots that it has."""
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
        """The arena at ``path`` with its damaged slots made new; None where nothing in it can be used."""
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
    """What a rank tells the others: bytes that it needs now and later, how many slots its arena can have, of how many
    bytes each, marks as in ``MemoryForecast``, and what else."""

    now_bytes: int
    later_bytes: int
    slots: int
    slot_bytes: int
    marks: tuple[SnapshotId, ...] | None
    report: RankReport | None


def share_of(old: Sequence[Path], shards: Sequence[str], place: int) -> list[Path]:
    """Those of ``old`` that are left to one rank: the arenas of its own shard, ``shards[place]``, and its part of
    those of shards that no rank of the node holds, of another layout or of ranks that are elsewhere now."""
    foreign = [path for path in old if _shard_at(path) not in shards]
    return [path for path in old if _shard_at(path) == shards[place]] + foreign[place :: len(shards)]


def _shard_at(path: Path) -> str:
    return path.name.rpartition(".")[0]


def _void_others(arena: Arena, keep: SnapshotId | None) -> None:
    for slot in range(arena.control.slots):
        if keep is None or arena.control.record(slot).snapshot != keep:
            arena.control.void(slot)
