"""Storage as a source of a restart: the files of a snapshot's shards, read directly or fetched to slots.

Fetched shards are ordinary slots of arenas, on any layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TypeVar

import numpy as np

from ftckpt.errors import CorruptError, DamagedError, StorageError
from ftckpt.events import Events
from ftckpt.group import gather_all
from ftckpt.memory.destinations import LoadTarget, TargetPart, scratch
from ftckpt.memory.directory import arena_path
from ftckpt.memory.inventory import Inventory
from ftckpt.memory.locations import SlotAt
from ftckpt.memory.package import Package
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import Topology, layouts_differ
from ftckpt.persist.commit import CheckpointName, folder_of
from ftckpt.persist.shard_file import ShardFile
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.persist.storage import Storage
from ftckpt.restore.chunk_reads import finish_together
from ftckpt.restore.context import Counts, RestoreContext, total_of
from ftckpt.restore.decide import Decision, worth_keeping
from ftckpt.restore.load import progress_of
from ftckpt.restore.reconstruction_plan import NEW_SLOT, ShardRepair
from ftckpt.restore.redistribute import MESSAGE_BYTES
from ftckpt.restore.room import Keep, open_slots
from ftckpt.restore.shard_reconstruction import ShardReconstruction
from ftckpt.restore.storage_catalog import ask
from ftckpt.restore.threads import in_order
from ftckpt.restore.verify import slots_read_by

READERS = 4
"""Chunks of a rank in flight: storage has a high latency and a high bandwidth."""

T = TypeVar("T")


class ShardFiles:
    """The files of one snapshot's shards, each opened once."""

    def __init__(self, storage: Storage, stored: StoredSnapshot) -> None:
        self.stored = stored
        self._checkpoint = CheckpointName.parse(stored.name) or CheckpointName(stored.snapshot.iteration)
        self._storage = storage
        self._open: dict[str, ShardFile] = {}

    def shard(self, at: SlotAt) -> ShardFile:
        """The file of the shard that a placeholder stands for, see ``decision``; raises as ``get``."""
        return self.get(at.arena)

    def decision(self, topology: Topology) -> Decision:
        """The decision to restore all shards from here: placeholder slots, each on the node of the rank that opens
        it."""
        stored, nodes = self.stored, [member.node for member in topology.members]
        if not layouts_differ(topology.layout, stored.layout):
            places = {member.shard: member.node for member in topology.members}
            ranks = topology.rank_of
        else:
            places = {shard: nodes[number % len(nodes)] for number, shard in enumerate(sorted(stored.shards))}
            ranks = {}
        sources = {shard: SlotAt(node, shard, NEW_SLOT) for shard, node in places.items()}
        return Decision(stored.snapshot, sources, layout=stored.layout, ranks=ranks)

    def get(self, shard: str) -> ShardFile:
        """The file of a shard; raises StorageError if it is missing or not as expected."""
        if shard not in self._open:
            self._open[shard] = self._opened(shard)
        return self._open[shard]

    def _ask(self, action: Callable[[], T]) -> T:
        """Asks as ``ask`` does; the error is lasting if the manifest is readable, so that only this file is not."""
        try:
            return ask(action)
        except StorageError as error:
            try:
                self._storage.read(self._checkpoint.manifest)
            except StorageError:
                raise StorageError(str(error)) from None
            raise StorageError(str(error), lasting=True) from None

    def _name(self, shard: str) -> str:
        return f"{folder_of(self.stored.snapshot.iteration)}/{self.stored.shards[shard].file}"

    def _opened(self, shard: str) -> ShardFile:
        entry, name = self.stored.shards[shard], self._name(shard)
        where = f"{self._storage.where}/{name}"
        if self._ask(lambda: self._storage.size(name)) != entry.nbytes:
            raise DamagedError(f"{where}: is missing, or does not have its {entry.nbytes} bytes")

        def read(begin: int, nbytes: int) -> bytes:
            return self._ask(lambda: self._storage.read(name, begin, nbytes))

        def read_into(begin: int, memories: Sequence[memoryview]) -> None:
            self._ask(lambda: self._storage.read_into(name, begin, memories))

        return ShardFile(where, shard, entry, read, read_into)


class ShardFetch:
    """The fetch of the shards of one snapshot that memory lacks, from storage to slots; ``run`` once, collectively.

    Args:
        inventory: the inventory of all nodes; ``bad``: its slots that failed verification.
        slots: the number of slots of an arena that must be created.
    """

    def __init__(
        self, context: RestoreContext, files: ShardFiles, inventory: Inventory, bad: Collection[SlotAt],
        slots: int,
    ) -> None:  # fmt: skip
        self._context = context
        self._inventory, self._slots = inventory, slots
        self._missing = set(files.stored.shards.keys() - inventory.good_shards(files.stored.snapshot, bad))
        self.files = files

    @property
    def is_all(self) -> bool:
        """Whether memory has no shard of the snapshot."""
        return len(self._missing) == len(self.files.stored.shards)

    def run(self) -> tuple[dict[str, SlotAt], Counts]:
        """Fetch the shards; returns their slots, and the chunks and bytes that all ranks fetched.

        Raises:
            StorageError: storage is corrupt or unavailable; incomplete slots stay invalid.
            MemoryBudgetError, ArenaError: a node has no room, or another process writes the arena.
        """
        context, snapshot, begin = self._context, self.files.stored.snapshot, time.perf_counter()
        keep = worth_keeping(self._inventory, context.topology, snapshot)
        mine = slots_read_by(context, self.files.decision(context.topology))
        builds: dict[str, ShardReconstruction] = {}

        def make() -> Mapping[str, ShardReconstruction]:
            builds.update(
                {shard: self._build(self.files.get(shard), keep) for shard in mine if shard in self._missing}
            )
            return builds

        with ExitStack() as undo:
            opened = open_slots(context, snapshot, keep, make, undo)
            chunks = [(build, chunk) for build in builds.values() for chunk in build.fix.chunks]
            # Nothing is sealed before every chunk of every rank has the right checksum.
            with closing(in_order(self._fetch, chunks, READERS)) as fetched:
                finish_together(context.group, map(self._progress(chunks), fetched))
            nbytes = [build.length(chunk) for build, chunk in chunks]
            usage = {"chunks": len(nbytes), "bytes": sum(nbytes)}
            total = total_of(gather_all(context.group, lambda: _seal(builds, usage), dict[str, int]))
        report_fetched(context.events, snapshot, len(self._missing), total, time.perf_counter() - begin)
        return opened, total

    def _fetch(self, job: tuple[ShardReconstruction, int]) -> int:
        """Read and verify a chunk, write it to its slot, and verify it there; returns its size."""
        build, chunk = job
        file = self.files.get(build.fix.shard)
        span = file.image.chunks[chunk]

        def parts() -> Iterator[TargetPart]:
            for piece in span.cut(MESSAGE_BYTES):
                memory = scratch(piece.nbytes, "staging")
                yield TargetPart(piece, [LoadTarget(piece.begin, memory)])
                build.put(chunk, piece.begin - span.begin, np.frombuffer(memory, np.uint8))

        file.scatter(chunk, parts)
        if not build.check(chunk):
            raise CorruptError(
                f"{build.fix.shard}: chunk {chunk} is correct on storage, and corrupt in memory after the copy: "
                "check this node's memory, and start again"
            )
        return span.nbytes

    def _progress(self, chunks: Sequence[tuple[ShardReconstruction, int]]) -> Callable[[int], None]:
        what = f"rank {self._context.group.rank} {reads(self.files.stored.snapshot)}"
        return progress_of(what, sum(build.length(chunk) for build, chunk in chunks))

    def _package(self, file: ShardFile) -> Package:
        """The package of a slot: everything but the optimizer-updated chunks."""
        image = file.image
        volatile = [file.chunk(number) for number in range(image.num_stepped_chunks, len(image.chunks))]
        hashes, objects = file.entry.chunk_hashes, bytes(file.objects())
        return Package(image.manifest, self.files.stored.snapshot, 1, hashes, objects, b"".join(volatile))

    def _build(self, file: ShardFile, keep: Keep) -> ShardReconstruction:
        """The reconstruction of a shard in a new slot."""
        image, node_dir, package = file.image, self._context.arenas.node_dir, self._package(file)
        new = SlotAt(self._context.topology.me.node, arena_path(node_dir, image.manifest).name, NEW_SLOT)
        fix = ShardRepair(package.shard, new, tuple(range(image.num_stepped_chunks)))
        return ShardReconstruction(node_dir, fix, package, self._slots, keep)


def reads(snapshot: SnapshotId) -> str:
    """The description of a read from storage, for progress logs."""
    return f"reads iteration {snapshot.iteration} from storage"


def report_fetched(events: Events, snapshot: SnapshotId, num_shards: int, usage: Counts, secs: float) -> None:
    """Report that shards were read from storage, by all ranks together."""
    events.emit("fetched", iteration=snapshot.iteration, shards=num_shards, bytes=usage["bytes"], secs=secs)


def _seal(builds: Mapping[str, ShardReconstruction], usage: Counts) -> Counts:
    for shard, build in builds.items():
        if damage := build.finish():
            raise CorruptError(
                f"{shard}: {', '.join(damage.names[:3])} is correct on storage, and corrupt in memory after the "
                "copy: check this node's memory, and start again"
            )
    return usage
