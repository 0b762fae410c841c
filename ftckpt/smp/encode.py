"""A node's part in the protection of a snapshot: packages, parity, and mirrored packages of other nodes."""

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
"""Maximum size of packages that are requested or received and not stored yet; one is always allowed."""


def has_package(node_dir: Path, shard: str, snapshot: SnapshotId) -> bool:
    """Whether the package exists, valid or not."""
    return package.package_path(node_dir, shard, snapshot).is_file()


def has_sound_package(node_dir: Path, shard: str, snapshot: SnapshotId) -> bool:
    """Whether the package exists and is valid; reads all of it."""
    if not has_package(node_dir, shard, snapshot):
        return False
    try:
        stored = package.load(package.package_path(node_dir, shard, snapshot))
    except (CorruptError, MismatchError):
        return False
    return (stored.shard, stored.snapshot) == (shard, snapshot)


def store_package(sources: Sources, arena: MonitoredArena, checked: CheckedSlot) -> Work[None]:
    """Store the package of a slot that the caller leases; raises as ``package.pack`` and ``store``."""
    yield from sources.pace.memory(arena.mapped.image.volatile.nbytes)
    data = package.pack(arena.mapped, checked.slot)
    yield from in_thread(partial(package.store, sources.arenas.node_dir, data))


@dataclass(frozen=True)
class MirroredPackage:
    """A shard of another node whose package, of at most ``most_bytes``, this node mirrors."""

    node: str
    shard: str
    most_bytes: int


def pull_packages(sources: Sources, snapshot: SnapshotId, wanted: Sequence[MirroredPackage]) -> Work[None]:
    """Fetch and store packages, as many at a time as memory allows: each is buffered completely.

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
    """Before ``target`` is encoded: limit the retained packages, so that those of failed targets do not accumulate.

    Retained are the marked snapshots, the target, and the newest complete ones: one of them may be the only one that
    is protected on all nodes.

    Args:
        shards: the shards whose packages the node stores now. A snapshot with packages of others belongs to another
            layout and counts as complete, as that cannot be known. Without marks two of those are retained: the
            newest may be one whose protection was incomplete.
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
    """The error in a received package; "" if it is valid."""
    try:
        received = package.unpack(data)
    except (CorruptError, MismatchError) as error:
        return str(error)
    same = (received.shard, received.snapshot) == (shard, snapshot)
    return "" if same else f"a package of {received.shard} at {received.snapshot.iteration}"


def sealed_parity(
    sources: Sources, arena: MonitoredArena, group: ParityGroup, holder: int, *, snapshot: SnapshotId
) -> Path | None:
    """The file with all blocks that ``holder`` stores of ``group`` for ``snapshot``, or None."""
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
    """Compute and store the blocks of ``holder`` in ``group``, unless they are complete already.

    Args:
        keep: the protected snapshot, whose parity must not be overwritten.

    Raises:
        MemoryBudgetError: no room for the file.
        CorruptError, ArenaError, ProtectionUnavailableError: as ``make_block``.
    """
    blocks = num_blocks(group, holder)
    if blocks == 0 or sealed_parity(sources, arena, group, holder, snapshot=snapshot) is not None:
        return
    files = sources.arenas.parity
    # Two files per arena and mode: the protected snapshot's parity stays until the next one's is complete.
    path = parity_path(arena.path, group.mode, _index_to_write(sources, arena, group, holder, keep=keep))
    file = files.get(path)
    if file is None or not _belongs(file, group, holder):
        files.drop(path)
        path.unlink(missing_ok=True)
        file = files.add((yield from in_thread(lambda: ParityFile.create(path, group, holder))))
    # ``begin`` invalidates the file and ``seal`` follows the last block: a kill in between leaves a file of no
    # snapshot, never one with blocks of two.
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
    """The file to overwrite: never the only one of the protected snapshot."""
    ranks = []
    for index in range(PARITY_FILES):
        file = sources.arenas.parity.get(parity_path(arena.path, group.mode, index))
        snapshot = None if file is None else file.snapshot()
        if file is None or snapshot is None:
            # In this order: missing, of no snapshot, the oldest, the protected one's of another group, of this group.
            ranks.append((0, 0 if file is None else 1, index))
        elif keep is None or snapshot != keep:
            ranks.append((1, snapshot.iteration, index))
        else:
            ranks.append((3 if _belongs(file, group, holder) else 2, 0, index))
    return min(ranks)[2]


_POLL_SECS = 0.02


@dataclass(frozen=True)
class EncodeTask:
    """The work of this node: parity groups with a local member, and packages to mirror."""

    groups: tuple[ParityGroup, ...] = ()
    mirror_from: tuple[MirroredPackage, ...] = ()

    @classmethod
    def from_json(cls, description: Mapping[str, Any]) -> EncodeTask:
        """Parse a description for the SMP; raises ValueError, TypeError or AttributeError if it is invalid."""
        groups = tuple(ParityGroup.from_json(group) for group in description.get("groups", ()))
        mirrors = description.get("mirror_from", {})
        mirror_from = tuple(
            MirroredPackage(str(node), str(shard), int(nbytes))
            for node, shards in mirrors.items()
            for shard, nbytes in shards.items()
        )
        return cls(groups, mirror_from)

    def holders(self, sources: Sources) -> Iterator[tuple[MonitoredArena, ParityGroup, int]]:
        """Arenas of this node with their groups and index in each; groups that need no other node first."""
        for group in sorted(self.groups, key=lambda group: group.mode != "node"):
            for index, member in enumerate(group.members):
                arena = sources.arenas.by_shard.get(member.shard)
                if member.node == sources.node and arena is not None:
                    yield arena, group, index

    def shards(self, sources: Sources) -> list[str]:
        """The shards whose packages this node stores."""
        return [arena.shard for arena in sources.arenas.all] + [each.shard for each in self.mirror_from]

    def done(self, sources: Sources, snapshot: SnapshotId) -> bool:
        """Whether this node has its complete part for ``snapshot``. Packages are not read, and so may be invalid."""
        node_dir = sources.arenas.node_dir
        return all(has_package(node_dir, shard, snapshot) for shard in self.shards(sources)) and all(
            num_blocks(group, index) == 0
            or sealed_parity(sources, arena, group, index, snapshot=snapshot) is not None
            for arena, group, index in self.holders(sources)
        )


class SnapshotEncoder:
    """The work on one target snapshot. Existing valid parts are reused."""

    def __init__(self, sources: Sources, duty: EncodeTask, events: Events, snapshot: SnapshotId) -> None:
        self.snapshot = snapshot
        self._sources = sources
        self._duty = duty
        self._events = events

    def run(self) -> Work[None]:
        """Complete this node's part and store COVERED; ends at once if that is stored already.

        Raises:
            FtckptError, OSError: it failed; the text says why.
        """
        slots = yield from self._checked()
        if all(one.check.state == CheckState.COVERED for _, one in slots):
            return
        begun, received = time.monotonic(), self._sources.received_bytes
        marks = [mark for arena, _ in slots if (mark := arena.mapped.control.protected()) is not None]
        node_dir = self._sources.arenas.node_dir
        # A lease makes trainers prefer other slots. It is no lock: a trainer without a free slot takes a leased one,
        # so the slots are verified again before COVERED is stored.
        with ExitStack() as leases:
            for arena, one in slots:
                leases.enter_context(arena.lease(one.slot))
            prune_packages(node_dir, self._duty.shards(self._sources), set(marks), self.snapshot)
            yield from self._duties(slots, max(marks, default=None))
            if not self._store_covered(slots):
                return
        # Read again: trainers may have marked another snapshot as protected meanwhile.
        marks = [mark for arena, _ in slots if (mark := arena.mapped.control.protected()) is not None]
        # Without a mark all stays: until all nodes have encoded the target, a lost node is reconstructed from a
        # snapshot of another layout or other shares, which these arenas do not name.
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
        """Wait until every arena of the node has the snapshot CHECKED."""
        while True:
            slots = [(arena, arena.find(self.snapshot)) for arena in self._sources.arenas.all]
            ready = [(arena, one) for arena, one in slots if one is not None]
            if self._sources.arenas.complete and len(ready) == len(slots):
                return ready
            yield _POLL_SECS

    def _duties(self, slots: Sequence[tuple[MonitoredArena, CheckedSlot]], keep: SnapshotId | None) -> Work[None]:
        """Create all parts. ``keep``: the protected snapshot for arenas without a mark of their own."""
        # Packages first: they are small and other nodes wait for them.
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
        """Store COVERED if all slots still hold the snapshot; returns whether they do.

        Raises:
            ProtectionUnavailableError: a created part is missing.
        """
        if not all(arena.still_holds(one.slot, one.record) for arena, one in slots):
            return False
        if not self._duty.done(self._sources, self.snapshot):
            iteration = self.snapshot.iteration
            raise ProtectionUnavailableError(
                f"iteration {iteration}: a package or a parity file was replaced or deleted"
            )
        # To trainers COVERED in the arenas of all nodes means protected: it is stored last.
        for arena, one in slots:
            arena.checks.store_covered(one.slot, one.check.seal_id)
        return True

    def prove(self) -> Work[None]:
        """Store COVERED if all parts exist from an earlier run and are valid."""
        slots = [(arena, one) for arena in self._sources.arenas.all if (one := arena.find(self.snapshot)) is not None]
        for shard in self._duty.shards(self._sources):
            if not (yield from self._has_sound(shard)):
                reason = f"the package of {shard} from before does not verify"
                self._events.emit("not_covered", iteration=self.snapshot.iteration, reason=reason)
                return
        if self._duty.done(self._sources, self.snapshot):
            self._store_covered(slots)


def covered_slots(sources: Sources) -> dict[SnapshotId, list[tuple[MonitoredArena, CheckedSlot]]]:
    """The COVERED snapshots of this node, with their slots."""
    covered: dict[SnapshotId, list[tuple[MonitoredArena, CheckedSlot]]] = {}
    for arena in sources.arenas.all:
        for slot in range(arena.mapped.control.slots):
            check = arena.checks.read(slot)
            if check is not None and check.state == CheckState.COVERED:
                checked = arena.find(check.snapshot)
                # If two slots hold one snapshot, ``find`` returns the last sealed one, and only that counts.
                if checked is not None and checked.slot == slot:
                    covered.setdefault(check.snapshot, []).append((arena, checked))
    return covered


def take_back(slots: Iterable[tuple[MonitoredArena, CheckedSlot]]) -> None:
    """Degrade COVERED ``slots`` to CHECKED."""
    for arena, one in slots:
        arena.checks.uncover(one.slot)


def uncover(sources: Sources, duty: EncodeTask) -> None:
    """Revoke COVERED of snapshots that are incomplete, by other groups or missing parts."""
    for snapshot, slots in covered_slots(sources).items():
        if not duty.done(sources, snapshot):
            take_back(slots)


def claims(sources: Sources) -> list[SnapshotId]:
    """Revoke COVERED everywhere and return the snapshots: an earlier SMP's claims count once they are verified."""
    covered = covered_slots(sources)
    for slots in covered.values():
        take_back(slots)
    return list(covered)


PIECE_BYTES = 512 << 10
"""Unit of encoding: it stays in a core's cache with the sum, and amortizes the Python calls."""
STEP_BYTES = 16 << 20
"""Maximum read between two waits for the throttle; at least one piece of each chunk."""


def make_block(
    sources: Sources, feed: Feed, group: ParityGroup, stripe: Stripe, *, row: int, out: Bytes
) -> Work[int]:
    """Compute block ``row`` of a stripe into ``out``, of its length; returns the block's checksum, xxh3-64.

    The data is verified only when it returns: before that, or if it raises, ``out`` is invalid.

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
