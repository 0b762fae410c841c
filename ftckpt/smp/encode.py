"""A node's part in the protection of a snapshot: packages, parity, and mirrored packages of other nodes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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

# As ``task_queue`` scans for seals: a slot is checked no earlier.
_POLL_SECS = 0.02
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


def store_package(sources: Sources, slot: CheckedSlot) -> Work[None]:
    """Store the package of a slot; raises as ``package.pack`` and ``store``."""
    yield from sources.pace.memory(slot.arena.mapped.image.volatile.nbytes)
    data = package.pack(slot.arena.mapped, slot.slot)
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


@dataclass(frozen=True)
class ProtectionPart:
    """This node's part in protection: parity groups with a local member, and packages to mirror."""

    groups: tuple[ParityGroup, ...] = ()
    mirror_from: tuple[MirroredPackage, ...] = ()

    @classmethod
    def from_json(cls, description: Mapping[str, Any]) -> ProtectionPart:
        """Parse a description for the SMP; raises ValueError, TypeError or AttributeError if it is invalid."""
        groups = tuple(ParityGroup.from_json(group) for group in description.get("groups", ()))
        mirrors = description.get("mirror_from", {})
        mirror_from = tuple(
            MirroredPackage(str(node), str(shard), int(nbytes))
            for node, shards in mirrors.items()
            for shard, nbytes in shards.items()
        )
        return cls(groups, mirror_from)


class ParityHolder(NamedTuple):
    """An arena of this node that stores the parity blocks of ``member``, an index in ``group``."""

    arena: MonitoredArena
    group: ParityGroup
    member: int

    @property
    def paths(self) -> list[Path]:
        """Two files per arena and mode: the protected snapshot's parity stays until the next one's is complete."""
        return [parity_path(self.arena.path, self.group.mode, number) for number in range(PARITY_FILES)]

    def owns(self, file: ParityFile) -> bool:
        """Whether the file is of this member and group."""
        return file.group.name == self.group.name and file.holder == self.member


class Encoder:
    """Encodes this node's ``part`` in the protection of snapshots. Existing valid parts are reused."""

    def __init__(self, sources: Sources, part: ProtectionPart, events: Events) -> None:
        self.sources = sources
        self.part = part
        self._events = events

    def encode(self, snapshot: SnapshotId) -> Work[None]:
        """Complete this node's part for ``snapshot`` and mark its slots encoded; ends at once if they are already.

        Raises:
            FtckptError, OSError: it failed; the text says why.
        """
        while (slots := self.sources.arenas.find_all(snapshot)) is None:
            yield _POLL_SECS
        if all(slot.check.state == CheckState.ENCODED for slot in slots):
            return
        started_secs, received_bytes = time.monotonic(), self.sources.received_bytes
        marks = _protected(slots)
        node_dir = self.sources.arenas.node_dir
        prune_packages(node_dir, self._shards(), marks, snapshot)
        yield from self._make_parts(snapshot, slots, max(marks, default=None))
        # Trainers that have given the target up may have taken a slot over, without a lock.
        if not self._mark_encoded(snapshot, slots):
            return
        # Read again: trainers may have marked another snapshot as protected meanwhile. Without a mark all stays:
        # until all nodes have encoded the target, a lost node is reconstructed from a snapshot of another layout or
        # other shares, which these arenas do not name.
        if marks := _protected(slots):
            package.prune(node_dir, {*marks, snapshot})
        self._events.emit(
            "covered",
            iteration=snapshot.iteration,
            secs=round(time.monotonic() - started_secs, 4),
            bytes=sum(slot.arena.mapped.image.file_bytes for slot in slots),
            received_bytes=self.sources.received_bytes - received_bytes,
        )

    def is_complete(self, snapshot: SnapshotId) -> bool:
        """Whether this node has its complete part for ``snapshot``. Packages are not read, and so may be invalid."""
        node_dir = self.sources.arenas.node_dir
        return all(has_package(node_dir, shard, snapshot) for shard in self._shards()) and all(
            num_blocks(holder.group, holder.member) == 0 or self._has_parity(holder, snapshot)
            for holder in self._holders()
        )

    def encoded(self) -> dict[SnapshotId, list[CheckedSlot]]:
        """The snapshots that are marked encoded on this node, with their slots."""
        found: dict[SnapshotId, list[CheckedSlot]] = {}
        for arena in self.sources.arenas.all:
            for slot in arena.checked():
                if slot.check.state == CheckState.ENCODED:
                    found.setdefault(slot.snapshot, []).append(slot)
        return found

    def revoke(self, snapshot: SnapshotId) -> None:
        """Degrade the slots of ``snapshot`` from encoded to checked."""
        for slot in self.encoded().get(snapshot, ()):
            slot.arena.checks.drop_encoded(slot.slot)

    def revoke_incomplete(self) -> None:
        """Revoke snapshots of other groups, or with missing parts."""
        for snapshot in self.encoded():
            if not self.is_complete(snapshot):
                self.revoke(snapshot)

    def revoke_all(self) -> None:
        """Revoke all: the claims of an earlier SMP count once they are verified."""
        for snapshot in self.encoded():
            self.revoke(snapshot)

    def _shards(self) -> list[str]:
        """The shards whose packages this node stores."""
        return [*self.sources.arenas.by_shard, *(each.shard for each in self.part.mirror_from)]

    def _holders(self) -> Iterator[ParityHolder]:
        """Groups that need no other node come first."""
        for group in sorted(self.part.groups, key=lambda group: group.mode != "node"):
            for index, member in enumerate(group.members):
                arena = self.sources.arenas.by_shard.get(member.shard)
                if member.node == self.sources.node and arena is not None:
                    yield ParityHolder(arena, group, index)

    def _make_parts(
        self, snapshot: SnapshotId, slots: Sequence[CheckedSlot], protected: SnapshotId | None
    ) -> Work[None]:
        """Create all parts. ``protected``: for arenas without a mark of their own."""
        # Packages first: they are small and other nodes wait for them.
        for slot in slots:
            if not (yield from self._has_sound_package(slot.arena.shard, snapshot)):
                yield from store_package(self.sources, slot)
            yield 0.0
        for holder in self._holders():
            keep = holder.arena.mapped.control.protected() or protected
            yield from self._write_parity(holder, snapshot, keep)
        missing = []
        for each in self.part.mirror_from:
            if not (yield from self._has_sound_package(each.shard, snapshot)):
                missing.append(each)
        yield from pull_packages(self.sources, snapshot, missing)

    def _has_sound_package(self, shard: str, snapshot: SnapshotId) -> Work[bool]:
        node_dir = self.sources.arenas.node_dir
        if not has_package(node_dir, shard, snapshot):
            return False
        return (yield from in_thread(lambda: has_sound_package(node_dir, shard, snapshot)))

    def _has_parity(self, holder: ParityHolder, snapshot: SnapshotId) -> bool:
        """Whether a file has all blocks of ``holder`` for ``snapshot``."""
        files = map(self.sources.arenas.parity.get, holder.paths)
        return any(file is not None and holder.owns(file) and file.snapshot() == snapshot for file in files)

    def _write_parity(self, holder: ParityHolder, snapshot: SnapshotId, keep: SnapshotId | None) -> Work[None]:
        """Compute and store the blocks of ``holder``, unless they are complete already.

        Args:
            keep: the protected snapshot, whose parity must not be overwritten.

        Raises:
            MemoryBudgetError: no room for the file.
            CorruptError, ArenaError, ProtectionUnavailableError: as ``make_block``.
        """
        group, member, blocks = holder.group, holder.member, num_blocks(holder.group, holder.member)
        if blocks == 0 or self._has_parity(holder, snapshot):
            return
        files, path = self.sources.arenas.parity, self._path_to_write(holder, keep)
        file = files.get(path)
        if file is None or not holder.owns(file):
            files.drop(path)
            path.unlink(missing_ok=True)
            file = files.add((yield from in_thread(lambda: ParityFile.create(path, group, member))))
        # ``begin`` invalidates the file and ``seal`` follows the last block: a kill in between leaves a file of no
        # snapshot, never one with blocks of two.
        file.begin(snapshot)
        own = [stripe(group, stripe_of_block(group, member, block)) for block in range(blocks)]
        with closing(Feed(self.sources, group, own, snapshot)) as feed:
            for block, one in enumerate(own):
                row = one.blocks.index((member, block))
                out = file.block(block)
                file.put(block, out, (yield from make_block(self.sources, feed, group, one, row=row, out=out)))
                yield 0.0
        file.seal()

    def _path_to_write(self, holder: ParityHolder, keep: SnapshotId | None) -> Path:
        """The file to overwrite: never the only one of the protected snapshot ``keep``."""

        def order(path: Path) -> tuple[int, int]:
            file = self.sources.arenas.parity.get(path)
            snapshot = None if file is None else file.snapshot()
            # In this order: missing, of no snapshot, the oldest, the protected one's of another group, of this group.
            if file is None or snapshot is None:
                return 0, 0 if file is None else 1
            if snapshot != keep:
                return 1, snapshot.iteration
            return 3 if holder.owns(file) else 2, 0

        return min(holder.paths, key=order)

    def _mark_encoded(self, snapshot: SnapshotId, slots: Sequence[CheckedSlot]) -> bool:
        """Mark ``slots`` encoded if all still hold the snapshot; returns whether they do.

        Raises:
            ProtectionUnavailableError: a created part is missing.
        """
        if not all(slot.still_holds() for slot in slots):
            return False
        if not self.is_complete(snapshot):
            raise ProtectionUnavailableError(
                f"iteration {snapshot.iteration}: a package or a parity file was replaced or deleted"
            )
        # To trainers this mark in the arenas of all nodes means protected: it is stored last.
        for slot in slots:
            slot.arena.checks.store_encoded(slot.slot, slot.check.seal_id)
        return True


def _protected(slots: Sequence[CheckedSlot]) -> set[SnapshotId]:
    """The snapshots that trainers have marked as protected."""
    return {mark for slot in slots if (mark := slot.arena.mapped.control.protected()) is not None}


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
    fold, made = encoder(len(chunks), row, group.losses), xxhash.xxh3_64()
    step = max(1, STEP_BYTES // PIECE_BYTES // (len(chunks) + 1)) * PIECE_BYTES
    for begin in range(0, stripe.length, step):
        end = min(begin + step, stripe.length)
        yield from sources.pace.memory(sum(len(chunk.data[begin:end]) for chunk in local) + end - begin)
        for at in range(begin, end, PIECE_BYTES):
            piece = out[at : min(at + PIECE_BYTES, end)]
            fold((chunk.read(at, at + len(piece)) if chunk is not None else None for chunk in chunks), piece)
            made.update(piece.data)
    for chunk in local:
        chunk.verify()
    return made.intdigest()
