"""Storage as a source of a restart: shards that memory lacks are fetched to slots and verified.

After that they are ordinary slots of arenas, on any layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np

from ftckpt.errors import ArenaError, StorageError
from ftckpt.events import Events
from ftckpt.group import Group, gather_all, together
from ftckpt.memory.arena import Arena
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.directory import arena_path
from ftckpt.memory.package import Package
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import Topology, layouts_differ
from ftckpt.persist.shard_file import ShardFile
from ftckpt.restore.chunk_reader import ChunkReader, Job, ShardFiles, proven
from ftckpt.restore.decide import worth_keeping
from ftckpt.restore.inventory import Inventory
from ftckpt.restore.locations import OpenArenas, SlotAt
from ftckpt.restore.reconstruction_plan import NEW_SLOT, ShardRepair
from ftckpt.restore.repair import Need, make_room
from ftckpt.restore.shard_reconstruction import ShardReconstruction

_AHEAD_BYTES = 256 << 20
"""Bytes of each file to read ahead while slots are allocated: about as many as disks deliver in that time."""


class ShardFetch:
    """The fetch of the shards of one snapshot that memory lacks, from storage to slots; ``run`` once, collectively.

    Args:
        inventory: the inventory of all nodes; ``bad``: its slots that failed verification, with their corruption.
        slots: the number of slots of an arena that must be created.
    """

    def __init__(
        self, group: Group, topology: Topology, events: Events, arenas: OpenArenas, *,
        files: ShardFiles, inventory: Inventory, bad: Mapping[SlotAt, Corruption], slots: int,
    ) -> None:  # fmt: skip
        self._group = group
        self._topology = topology
        self._events = events
        self._arenas = arenas
        self._stored = files.stored
        self._inventory = inventory
        self._slots = slots
        self._bad = bad
        self._missing = sorted(self._stored.shards.keys() - inventory.good_shards(self._stored.snapshot, bad))
        self._builds: dict[str, ShardReconstruction] = {}
        self.files = files
        self.usage: dict[str, int] = {"chunks": 0, "bytes": 0}
        """Chunks and bytes that all ranks fetched; set by ``run``."""

    @property
    def is_all(self) -> bool:
        """Whether memory has no shard of the snapshot."""
        return len(self._missing) == len(self._stored.shards)

    def run(self) -> dict[str, SlotAt]:
        """Fetch the shards; returns their slots.

        Raises:
            StorageError: storage is corrupt or unavailable; incomplete slots stay invalid.
            MemoryBudgetError, ArenaError: a node has no room, or another process writes the arena.
        """
        self._arenas.close()  # files may be freed or replaced from here on, by any rank of the node
        reader = ChunkReader(self._group, reads(self._stored.snapshot))
        try:
            make_room(
                self._group, self._topology, self._arenas.node_dir, self._events, chosen=self._stored.snapshot,
                need=partial(self._look, reader), keep=self._keep(),
            )  # fmt: skip
            opened = gather_all(self._group, self._open, dict[str, SlotAt])
            # Nothing is sealed before every chunk of every rank has the right checksum.
            jobs = [job for build in self._builds.values() for job in self._jobs(build)]
            reader.bring(jobs)
            reader.tell(self._events, self._stored.snapshot.iteration, len(self._missing))
            together(self._group, self._seal)
        finally:
            reader.close()  # before the slots that it writes into
            for build in self._builds.values():
                build.close()
            self._arenas.close()
        self.usage = reader.usage
        return {shard: at for one in opened for shard, at in one.items()}

    def _look(self, reader: ChunkReader) -> Need:
        for shard in self._mine():
            self._builds[shard] = self._build(self.files.get(shard))
        # Read ahead while slots are allocated, but after the small reads above, which would wait for it.
        new = [shard for shard, build in self._builds.items() if not build.fix.in_place]
        reader.begin(lambda: self.files.read_ahead(new, _AHEAD_BYTES))
        return Need.of(self._builds.values())

    def _open(self) -> dict[str, SlotAt]:
        for build in self._builds.values():
            build.open()
        return {shard: build.at for shard, build in self._builds.items()}

    def _jobs(self, build: ShardReconstruction) -> Iterator[Job]:
        """The chunks to fetch for a slot, in ascending order."""
        file = self.files.get(build.fix.shard)
        for chunk in build.fix.chunks:
            yield Job(build.length(chunk), partial(_bring, file, build, chunk))

    def _seal(self) -> None:
        for shard, build in self._builds.items():
            if damage := build.finish():
                raise StorageError(f"{shard}: {', '.join(damage.names[:3])} is still corrupt", lasting=True)

    def _mine(self) -> Iterator[str]:
        """The shards that this rank fetches: the one that it continues or, in another layout, its share of all."""
        same, ranks = not layouts_differ(self._topology.layout, self._stored.layout), self._topology.rank_of
        for number, shard in enumerate(self._missing):
            if (ranks[shard] if same else number % len(ranks)) == self._group.rank:
                yield shard

    def _package(self, file: ShardFile) -> Package:
        """The package of a slot: everything but the optimizer-updated chunks."""
        image = file.image
        volatile = [file.chunk(number) for number in range(image.num_stepped_chunks, len(image.chunks))]
        hashes, objects = file.entry.chunk_hashes, bytes(file.objects())
        return Package(image.manifest, self._stored.snapshot, 1, hashes, objects, b"".join(volatile))

    def _build(self, file: ShardFile) -> ShardReconstruction:
        """The reconstruction of a shard: only its bad parts in place, if it has such a slot, or all in a new slot."""
        image, node_dir, package = file.image, self._arenas.node_dir, self._package(file)
        name = arena_path(node_dir, image.manifest).name
        fix = ShardRepair(
            package.shard, SlotAt(self._topology.me.node, name, NEW_SLOT), tuple(range(image.num_stepped_chunks))
        )
        for at, damage in self._bad.items():
            if (at.node, at.arena) == (fix.at.node, name) and self._is_of_file(at, damage, file):
                chunks = tuple(chunk for chunk in damage.chunks if chunk < image.num_stepped_chunks)
                fix = replace(fix, at=at, chunks=chunks, parts=damage.parts)
        return ShardReconstruction(node_dir, fix, package, self._slots, self._keep())

    def _is_of_file(self, at: SlotAt, damage: Corruption, file: ShardFile) -> bool:
        """Whether a slot has the content of the file, apart from its corruption."""
        if damage.useless:
            return False
        try:
            with closing(Arena.open(self._arenas.node_dir / at.arena)) as arena:
                hashes, snapshot = arena.hashes(at.slot), arena.control.record(at.slot).snapshot
        except ArenaError:
            return False
        same = hashes is not None and np.array_equal(hashes, file.entry.chunk_hashes)
        return same and snapshot == self._stored.snapshot

    def _keep(self) -> Sequence[Collection[SnapshotId]]:
        return worth_keeping(self._inventory, self._topology, self._stored.snapshot)


def reads(snapshot: SnapshotId) -> str:
    """The description of a read from storage, for progress logs."""
    return f"reads iteration {snapshot.iteration} from storage"


def _bring(file: ShardFile, build: ShardReconstruction, chunk: int) -> None:
    """Read and verify a chunk, and write it to its slot."""
    build.put(chunk, 0, np.frombuffer(proven(file, chunk), np.uint8))
