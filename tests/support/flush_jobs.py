"""Two nodes whose SMPs flush snapshots: real tasks, in threads of the test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ftckpt.memory.arena import Arena
from ftckpt.memory.heartbeat import FlushState
from ftckpt.parity.modes import Modes
from ftckpt.persist.commit import checkpoints, claim, committed, folder_of
from ftckpt.persist.files import FileStorage
from ftckpt.persist.paths import Place
from ftckpt.persist.shard_file import ShardFile
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.persist.storage import Storage
from tests.support.smp_nodes import Node, Smp, describe
from tests.support.waiting import until

NODES = ("a", "b")


class Job:
    """Two nodes of two ranks, with the tasks of an SMP each, which know where storage is."""

    def __init__(self, root: Path, where: str, **settings: Any) -> None:
        self.where = where
        self.nodes = [Node(root, name, (2 * n, 2 * n + 1), 4) for n, name in enumerate(NODES)]
        self.smps = [Smp(node) for node in self.nodes]
        self.settings = {"persist": where, **settings}
        if Path(where).is_dir():
            claim(FileStorage(Place.of(where, settings.get("persist_format", "snapshot")).snapshots), "", "job")
        for smp in self.smps:
            self.configure(smp)

    def configure(self, smp: Smp) -> None:
        node = self.nodes[self.smps.index(smp)]
        smp.configure(describe(node, self.nodes, Modes(), {}, **self.settings))

    def snapshot(self, slot: int, iteration: int) -> None:
        for node in self.nodes:
            node.snapshot(slot, iteration)

    def flush(self, iteration: int) -> None:
        for node in self.nodes:
            node.flush(iteration)

    def request(self, slot: int, iteration: int) -> None:
        """A snapshot of both nodes, and the request to flush it."""
        self.snapshot(slot, iteration)
        self.flush(iteration)

    def persist(self, slot: int, iteration: int) -> None:
        """Flushes a snapshot of both nodes, to the end."""
        self.request(slot, iteration)
        self.settled(iteration)

    def wait_checked(self, iteration: int) -> None:
        until(lambda: all(node.checked(iteration) for node in self.nodes), "checksums")

    @property
    def arenas(self) -> list[Arena]:
        return [arena for node in self.nodes for arena in node.arenas]

    def start(self) -> None:
        for smp in self.smps:
            smp.start()

    def states(self, iteration: int) -> list[FlushState]:
        """How far both are with this snapshot."""
        found = [smp.tasks.flushes.current for smp in self.smps]
        return [state for snapshot, state in found if snapshot is not None and snapshot.iteration == iteration]

    def settled(self, iteration: int, state: FlushState = FlushState.DONE) -> None:
        until(lambda: self.states(iteration) == [state] * 2, lambda: f"{self.states(iteration)} {self.told()}")

    def told(self) -> list[Any]:
        return [one for smp in self.smps for one in smp.events.all if one[0] not in ("checked", "covered")]

    def check(self, storage: Storage, iteration: int) -> StoredSnapshot:
        """All that is on storage of a snapshot is what memory has of it."""
        name = f"{folder_of(iteration)}/manifest.json"
        manifest = storage.read(name)
        stored = StoredSnapshot.decode(manifest, name)
        assert stored.encode() == manifest
        for arena in self.arenas:
            slot = arena.find(stored.snapshot)
            entry = stored.shards[arena.manifest.shard]
            data = storage.read(f"{folder_of(iteration)}/{entry.file}")
            assert slot is not None and len(data) == entry.nbytes
            file = ShardFile(entry.file, arena.manifest.shard, entry, lambda at, n, data=data: data[at : at + n])
            image, begin = arena.image, arena.image.objects.begin
            with arena.slot(slot) as view:
                used = begin + entry.objects_used
                assert entry.frames is not None or data[:used] == bytes(view[:used])
                assert data[: len(image.header)] == image.header and bytes(file.objects()) == view[begin:used]
                for number, span in enumerate(image.chunks):
                    assert bytes(file.chunk(number)) == view[span.begin : span.end]
        return stored

    def close(self) -> None:
        for smp in self.smps:
            smp.close()
        for node in self.nodes:
            node.close()


def leftovers(where: str) -> list[str]:
    """Files that no checkpoint names."""
    storage = FileStorage(where)
    named = {"latest", "owner.json"}
    for one in checkpoints(storage):
        shards = stored.shards.values() if (stored := committed(storage, one)) is not None else ()
        named |= {one.manifest, *(f"{folder_of(one.iteration)}/{shard.file}" for shard in shards)}
    # Not by ``rglob``, which fails where a directory goes meanwhile.
    there = {os.path.relpath(Path(folder, name), where) for folder, _, names in os.walk(where) for name in names}
    return sorted(there - named)
