"""What a node owes to the protection of one snapshot: packages, parity, packages of other nodes' shards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from ftckpt.array_types import Bytes
from ftckpt.errors import CorruptError, MismatchError, ProtectionUnavailableError
from ftckpt.events import Events
from ftckpt.memory import package
from ftckpt.memory.checks import CheckState
from ftckpt.memory.parity_file import ParityFile, parity_path
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.codecs import encoder
from ftckpt.parity.groups import ParityGroup
from ftckpt.parity.modes import PARITY_FILES
from ftckpt.parity.stripes import Stripe, num_blocks, stripe, stripe_of_block
from ftckpt.parity.table import MAX_SETS
from ftckpt.smp.arenas import CheckedSlot, MonitoredArena
from ftckpt.smp.chunk_source import Feed, LocalChunk, Sources
from ftckpt.smp.peers import Fetch
from ftckpt.smp.requests import PackageRequest
from ftckpt.smp.work import Work, in_thread

PULLED_BYTES = 64 << 20
"""Packages that are requested, or have come, and are not stored yet: no more than these, but one."""


def has_package(node_dir: Path, shard: str, snapshot: SnapshotId) -> bool:
    """Whether there is a package of that name, sound or not."""
    return package.package_path(node_dir, shard, snapshot).is_file()


def has_sound_package(node_dir: Path, shard: str, snapshot: SnapshotId) -> bool:
    """Whether the package is there and sound; all of it is read."""
    if not has_package(node_dir, shard, snapshot):
        return False
    try:
        stored = package.load(package.package_path(node_dir, shard, snapshot))
    except (CorruptError, MismatchError):
        return False
    return (stored.shard, stored.snapshot) == (shard, snapshot)


def store_package(sources: Sources, arena: MonitoredArena, checked: CheckedSlot) -> Work[None]:
    """Store the package of a slot on which the caller has a lease; raises as ``package.pack`` and ``store``."""
    yield from sources.pace.memory(arena.mapped.image.volatile.nbytes)
    data = package.pack(arena.mapped, checked.slot)
    yield from in_thread(partial(package.store, sources.arenas.node_dir, data))


@dataclass(frozen=True)
class MirroredPackage:
    """A shard of another node, whose package, of ``most_bytes`` or less, this node keeps."""

    node: str
    shard: str
    most_bytes: int


def pull_packages(sources: Sources, snapshot: SnapshotId, wanted: Sequence[MirroredPackage]) -> Work[None]:
    """Fetch and store packages, as many at a time as memory allows: each is held whole.

    Raises:
        ProtectionUnavailableError: a node has failed for too long.
        ArenaError, MemoryBudgetError: as ``package.store``.
    """
    todo, requested = deque(wanted), deque[tuple[MirroredPackage, Fetch]]()
    try:
        while todo or requested:
            held = sum(each.most_bytes for each, _ in requested)
            if todo and (not requested or held + todo[0].most_bytes <= PULLED_BYTES):
                each = todo.popleft()
                request = PackageRequest(snapshot, each.shard)
                requested.append((each, (yield from sources.request(each.node, request, each.most_bytes))))
                continue
            each, fetch = requested[0]
            wrong = partial(_problem, shard=each.shard, snapshot=snapshot)
            data = yield from sources.take(each.node, fetch, wrong)
            yield from in_thread(partial(package.store, sources.arenas.node_dir, data))
            requested.popleft()
    finally:
        for _, fetch in requested:
            fetch.cancel()


def prune_packages(
    node_dir: Path, shards: Collection[str], marks: Collection[SnapshotId], target: SnapshotId
) -> None:
    """Before ``target`` is covered: bound what stays, so that targets given up one after another do not add up.

    What is marked and the target stay, and the newest older ones that are complete: one of them may be the only
    one that is protected on all nodes.

    Args:
        shards: of which the node keeps packages now. A snapshot with packages of others is one of another
            layout; whether it is complete cannot be known, and it counts as such. Without marks two of those are
            retained: the newest may be one that was being protected.
        marks: snapshots marked as protected.
    """
    keep = {*marks, target}
    sets: dict[SnapshotId, set[str]] = {}
    for name in package.list_packages(node_dir):
        sets.setdefault(name.snapshot, set()).add(name.shard)
    complete = [snapshot for snapshot, of in sets.items() if snapshot not in keep and not of < set(shards)]
    most = MAX_SETS if marks else MAX_SETS - 1
    newest = sorted(complete, reverse=True)
    retained = keep | set(newest[: max(0, most - len(keep))])
    foreign = [snapshot for snapshot in newest if not sets[snapshot] <= set(shards)] if not marks else []
    package.prune(node_dir, retained | set(foreign[: MAX_SETS - 1]))


def _problem(data: bytearray, shard: str, snapshot: SnapshotId) -> str:
    """What is wrong with what came as a package; "" if nothing is."""
    try:
        received = package.unpack(data)
    except (CorruptError, MismatchError) as error:
        return str(error)
    same = (received.shard, received.snapshot) == (shard, snapshot)
    return "" if same else f"a package of {received.shard} at {received.snapshot.iteration}"


def sealed_parity(
    sources: Sources, arena: MonitoredArena, group: ParityGroup, holder: int, *, snapshot: SnapshotId
) -> Path | None:
    """The file with all blocks that ``holder`` keeps of ``group`` for ``snapshot``, or None."""
    for index in range(PARITY_FILES):
        path = parity_path(arena.path, group.mode, index)
        file = sources.arenas.parity.get(path)
        if file is not None and _belongs(file, group, holder) and file.snapshot() == snapshot:
            return path
    return None


def write_parity(
    sources: Sources,
    arena: MonitoredArena,
    group: ParityGroup,
    holder: int,
    *,
    snapshot: SnapshotId,
    keep: SnapshotId | None,
) -> Work[None]:
    """Compute and store what ``holder`` keeps of ``group``, if it is not there already.

    Args:
        keep: the protected snapshot, whose parity is not overwritten.

    Raises:
        MemoryBudgetError: no room for the file.
        CorruptError, ArenaError, ProtectionUnavailableError: as ``make_block``.
    """
    blocks = num_blocks(group, holder)
    if blocks == 0 or sealed_parity(sources, arena, group, holder, snapshot=snapshot) is not None:
        return
    files = sources.arenas.parity
    # Two files an arena and mode: the protected snapshot's parity stays until that of the next one is complete.
    path = parity_path(arena.path, group.mode, _index_to_write(sources, arena, group, holder, keep=keep))
    file = files.get(path)
    if file is None or not _belongs(file, group, holder):
        files.drop(path)
        path.unlink(missing_ok=True)
        file = files.add((yield from in_thread(lambda: ParityFile.create(path, group, holder))))
    # ``begin`` voids what the file has, ``seal`` comes when all blocks are there: a kill in between leaves a file of
    # no snapshot, never one with blocks of two.
    file.begin(snapshot)
    own = [stripe(group, stripe_of_block(group, holder, block)) for block in range(blocks)]
    with closing(Feed(sources, group, own, snapshot)) as feed:
        for block, one in enumerate(own):
            row = one.blocks.index((holder, block))
            out = file.block(block)
            file.put(block, out, (yield from make_block(sources, feed, group, one, row=row, out=out)))
            yield 0.0
    file.seal()


def _belongs(file: ParityFile, group: ParityGroup, holder: int) -> bool:
    return file.group.name == group.name and file.holder == holder


def _index_to_write(
    sources: Sources, arena: MonitoredArena, group: ParityGroup, holder: int, *, keep: SnapshotId | None
) -> int:
    """The file that loses least: never the only one of the protected snapshot."""
    ranks = []
    for index in range(PARITY_FILES):
        file = sources.arenas.parity.get(parity_path(arena.path, group.mode, index))
        snapshot = None if file is None else file.snapshot()
        if file is None or snapshot is None:
            # No file, one of no snapshot, the oldest; at last the protected one's, of other groups first.
            ranks.append((0, 0 if file is None else 1, index))
        elif keep is None or snapshot != keep:
            ranks.append((1, snapshot.iteration, index))
        else:
            ranks.append((3 if _belongs(file, group, holder) else 2, 0, index))
    return min(ranks)[2]


_POLL_SECS = 0.02


@dataclass(frozen=True)
class EncodeTask:
    """What this node is to do: groups with a member here, and of which nodes' shards it keeps packages."""

    groups: tuple[ParityGroup, ...] = ()
    mirror_from: tuple[MirroredPackage, ...] = ()

    @classmethod
    def from_json(cls, description: Mapping[str, Any]) -> EncodeTask:
        """What a description for the SMP says; raises ValueError, TypeError or AttributeError if it is unusable."""
        groups = tuple(ParityGroup.from_json(group) for group in description.get("groups", ()))
        mirrors = description.get("mirror_from", {})
        mirror_from = tuple(
            MirroredPackage(str(node), str(shard), int(nbytes))
            for node, shards in mirrors.items()
            for shard, nbytes in shards.items()
        )
        return cls(groups, mirror_from)

    def holders(self, sources: Sources) -> Iterator[tuple[MonitoredArena, ParityGroup, int]]:
        """Arenas of this node, and what they are in each group; groups that need no other node first."""
        for group in sorted(self.groups, key=lambda group: group.mode != "node"):
            for index, member in enumerate(group.members):
                arena = sources.arenas.by_shard.get(member.shard)
                if member.node == sources.node and arena is not None:
                    yield arena, group, index

    def shards(self, sources: Sources) -> list[str]:
        """Those of which this node keeps packages."""
        return [arena.shard for arena in sources.arenas.all] + [each.shard for each in self.mirror_from]

    def done(self, sources: Sources, snapshot: SnapshotId) -> bool:
        """Whether everything that this node owes to ``snapshot`` is there; packages may be unsound: none is read."""
        node_dir = sources.arenas.node_dir
        return all(has_package(node_dir, shard, snapshot) for shard in self.shards(sources)) and all(
            num_blocks(group, index) == 0
            or sealed_parity(sources, arena, group, index, snapshot=snapshot) is not None
            for arena, group, index in self.holders(sources)
        )


class SnapshotEncoder:
    """The work on one target snapshot. Whatever is there already, and sound, is not done again."""

    def __init__(self, sources: Sources, duty: EncodeTask, events: Events, snapshot: SnapshotId) -> None:
        self.snapshot = snapshot
        self._sources = sources
        self._duty = duty
        self._events = events

    def run(self) -> Work[None]:
        """Do it all and store COVERED; ends at once where that is stored already.

        Raises:
            FtckptError, OSError: it cannot be done; the text says why.
        """
        slots = yield from self._checked()
        if all(one.check.state == CheckState.COVERED for _, one in slots):
            return
        begun, received = time.monotonic(), self._sources.received_bytes
        marks = [mark for arena, _ in slots if (mark := arena.mapped.control.protected()) is not None]
        node_dir = self._sources.arenas.node_dir
        # A lease keeps trainers from the slot while others are free. It is no lock: who needs the slot takes it, and
        # whether all still hold the snapshot is looked at again before anything is claimed.
        with ExitStack() as leases:
            for arena, one in slots:
                leases.enter_context(arena.lease(one.slot))
            prune_packages(node_dir, self._duty.shards(self._sources), set(marks), self.snapshot)
            yield from self._duties(slots, max(marks, default=None))
            if not self._store_covered(slots):
                return
        # Asked again: trainers may have marked another one as protected meanwhile.
        marks = [mark for arena, _ in slots if (mark := arena.mapped.control.protected()) is not None]
        # Without a mark all stays: until all nodes have covered the target, what a lost node would be brought back to
        # is a snapshot of another layout or of other shares, which these arenas do not name.
        if marks:
            package.prune(node_dir, {*marks, self.snapshot})
        self._events.emit(
            "covered",
            iteration=self.snapshot.iteration,
            secs=round(time.monotonic() - begun, 4),
            bytes=sum(arena.mapped.image.file_bytes for arena, _ in slots),
            received_bytes=self._sources.received_bytes - received,
        )

    def _checked(self) -> Work[list[tuple[MonitoredArena, CheckedSlot]]]:
        """Waits until every arena of the node holds the snapshot and is CHECKED."""
        while True:
            slots = [(arena, arena.find(self.snapshot)) for arena in self._sources.arenas.all]
            ready = [(arena, one) for arena, one in slots if one is not None]
            if self._sources.arenas.complete and len(ready) == len(slots):
                return ready
            yield _POLL_SECS

    def _duties(self, slots: Sequence[tuple[MonitoredArena, CheckedSlot]], keep: SnapshotId | None) -> Work[None]:
        """``keep``: a protected snapshot, where an arena's own mark names none."""
        # Packages first: they are small, and other nodes wait for them.
        for arena, one in slots:
            if not (yield from self._has_sound(arena.shard)):
                yield from store_package(self._sources, arena, one)
            yield 0.0
        for arena, group, index in self._duty.holders(self._sources):
            protected = arena.mapped.control.protected() or keep
            yield from write_parity(self._sources, arena, group, index, snapshot=self.snapshot, keep=protected)
        missing = []
        for each in self._duty.mirror_from:
            if not (yield from self._has_sound(each.shard)):
                missing.append(each)
        yield from pull_packages(self._sources, self.snapshot, missing)

    def _has_sound(self, shard: str) -> Work[bool]:
        node_dir = self._sources.arenas.node_dir
        if not has_package(node_dir, shard, self.snapshot):
            return False
        return (yield from in_thread(lambda: has_sound_package(node_dir, shard, self.snapshot)))

    def _store_covered(self, slots: Sequence[tuple[MonitoredArena, CheckedSlot]]) -> bool:
        """Whether all slots still hold the snapshot; only then is anything claimed.

        Raises:
            ProtectionUnavailableError: something that was made is not there any more.
        """
        if not all(arena.still_holds(one.slot, one.record) for arena, one in slots):
            return False
        if not self._duty.done(self._sources, self.snapshot):
            iteration = self.snapshot.iteration
            raise ProtectionUnavailableError(
                f"iteration {iteration}: a package or a parity file was replaced or deleted"
            )
        # COVERED in the arenas of all nodes means protected to trainers: it is stored when everything is in place.
        for arena, one in slots:
            arena.checks.store_covered(one.slot, one.check.seal_id)
        return True

    def prove(self) -> Work[None]:
        """Store COVERED where all is there from before, and sound, and nothing is to be done."""
        slots = [(arena, one) for arena in self._sources.arenas.all if (one := arena.find(self.snapshot)) is not None]
        for shard in self._duty.shards(self._sources):
            if not (yield from self._has_sound(shard)):
                reason = f"the package of {shard} from before does not verify"
                self._events.emit("not_covered", iteration=self.snapshot.iteration, reason=reason)
                return
        if self._duty.done(self._sources, self.snapshot):
            self._store_covered(slots)


def covered_slots(sources: Sources) -> dict[SnapshotId, list[tuple[MonitoredArena, CheckedSlot]]]:
    """What is COVERED on this node, and where."""
    covered: dict[SnapshotId, list[tuple[MonitoredArena, CheckedSlot]]] = {}
    for arena in sources.arenas.all:
        for slot in range(arena.mapped.control.slots):
            check = arena.checks.read(slot)
            if check is not None and check.state == CheckState.COVERED:
                checked = arena.find(check.snapshot)
                # Where two slots hold one snapshot only the one that was sealed last is found, and counts.
                if checked is not None and checked.slot == slot:
                    covered.setdefault(check.snapshot, []).append((arena, checked))
    return covered


def take_back(slots: Iterable[tuple[MonitoredArena, CheckedSlot]]) -> None:
    """What is COVERED in ``slots`` is only CHECKED again."""
    for arena, one in slots:
        arena.checks.uncover(one.slot)


def uncover(sources: Sources, duty: EncodeTask) -> None:
    """Take back COVERED where it is not true any more: other duties, or something that is gone."""
    for snapshot, slots in covered_slots(sources).items():
        if not duty.done(sources, snapshot):
            take_back(slots)


def claims(sources: Sources) -> list[SnapshotId]:
    """Take back all that is COVERED, and name it: what an SMP before this one claimed counts when it is proven."""
    covered = covered_slots(sources)
    for slots in covered.values():
        take_back(slots)
    return list(covered)


PIECE_BYTES = 512 << 10
"""What is used at a time: with the sum it stays in a core's own cache, and calls of Python cost little beside it."""
STEP_BYTES = 16 << 20
"""What is read at most between two looks at the limit and at ranks that copy; a piece of each chunk at least."""


def make_block(
    sources: Sources, feed: Feed, group: ParityGroup, stripe: Stripe, *, row: int, out: Bytes
) -> Work[int]:
    """Make block ``row`` of a stripe in ``out``, of its length; returns the block's checksum, xxh3-64.

    Only when it returns was all of the data verified: before, and where it raises, ``out`` means nothing.

    Raises:
        CorruptError: data in a slot of this node does not match its checksum.
        ArenaError, ProtectionUnavailableError: as ``Feed.next``.
    """
    chunks = yield from feed.next(stripe)
    local = [chunk for chunk in chunks if isinstance(chunk, LocalChunk)]
    fold, made = encoder(group.code, len(chunks), row, group.losses), xxhash.xxh3_64()
    step = max(1, STEP_BYTES // PIECE_BYTES // (len(chunks) + 1)) * PIECE_BYTES
    for begin in range(0, stripe.length, step):
        end = min(begin + step, stripe.length)
        yield from sources.pace.memory(sum(len(chunk.data[begin:end]) for chunk in local) + end - begin)
        for chunk in local:
            chunk.renew()
        for at in range(begin, end, PIECE_BYTES):
            piece = out[at : min(at + PIECE_BYTES, end)]
            fold((chunk.read(at, at + len(piece)) if chunk is not None else None for chunk in chunks), piece)
            made.update(piece.data)
    for chunk in local:
        chunk.verify()
    return made.intdigest()
