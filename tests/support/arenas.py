"""Ranks of one node as threads of this process, each with its NodeArenas: no trainer, no torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from ftckpt.config import Config
from ftckpt.memory.arena import Arena
from ftckpt.memory.checks import Checks
from ftckpt.memory.directory import list_arenas
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.restore.decide import Decision
from ftckpt.session.arenas import NodeArenas
from tests.support.choosing import decided, inventory_of
from tests.support.smp_nodes import Seen
from tests.support.waiting import until

T = TypeVar("T")
SHARE = 40_000


class ThreadGroup:
    """A Group of threads, as far as NodeArenas uses one."""

    def __init__(self, rank: int, shared: tuple[list[bytes], threading.Barrier]) -> None:
        self.rank = rank
        self._parts, self._barrier = shared
        self.size = len(self._parts)

    def gather(self, data: bytes) -> list[bytes]:
        self._parts[self.rank] = bytes(data)
        self._barrier.wait(30)
        parts = list(self._parts)
        self._barrier.wait(30)
        return parts

    def barrier(self) -> None:
        self.gather(b"")

    def start_minimum(self, values: Sequence[int]) -> tuple[Any, None]:
        """Completed at once: the others are through."""
        return SimpleNamespace(is_completed=lambda: True), None


class Rank:
    """One rank: its NodeArenas and the arena it writes."""

    def __init__(
        self, rank: int, root: Path, slots: int, shared: tuple[list[bytes], threading.Barrier], *,
        protects: bool = False, memory_limit: str = "0",
    ) -> None:  # fmt: skip
        members = tuple(RankPlace({"dp": index}, "node") for index in range(len(shared[0])))
        self.topology = Topology(rank, members, {"dp": len(members)})
        self.group = ThreadGroup(rank, shared)
        self.events = Seen()
        config = Config(enabled=True, job="job", node="node", arena=str(root), slots=slots, memory_limit=memory_limit)
        group: Any = self.group
        self.arenas = NodeArenas(config, self.topology, group, self.events, protects=protects)
        self.rank = rank
        self.shard = self.topology.me.shard
        self.arena: Arena | None = None

    def manifest(self, share: int = SHARE) -> Manifest:
        """The manifest of this rank; manifests differ by ``share``, in bytes."""
        weights = Fragment("w", "U8", (1 << 20,), Box((0,), (1 << 20,)), 0, share)
        return Manifest({"dp": self.rank}, self.topology.layout, (weights,), (), 1000, 16384)

    @property
    def have(self) -> Arena:
        assert self.arena is not None
        return self.arena


def ranks(root: Path, number: int, slots: int = 2, **settings: Any) -> list[Rank]:
    shared: tuple[list[bytes], threading.Barrier] = ([b""] * number, threading.Barrier(number))
    return [Rank(rank, root, slots, shared, **settings) for rank in range(number)]


def on_all(members: Sequence[Rank], action: Callable[[Rank], T]) -> list[T]:
    """Run ``action`` for all ranks at the same time; the first error, if there is one, is raised."""
    with ThreadPoolExecutor(len(members)) as pool:
        return [future.result() for future in [pool.submit(action, member) for member in members]]


def complete(member: Rank) -> list[int]:
    """The slots that a rank's arena gets when it asks for those that it lacks, at one boundary after the other."""
    slots: list[int] = []

    def over() -> bool:
        slots.extend(member.arenas.complete(member.have))
        return member.arenas.allocator is None

    until(over, "slots")
    return slots


def settle(member: Rank) -> list[int]:
    """Finish what ``open`` and ``replace`` leave to be done concurrently with training."""
    member.arenas.supply(member.have)
    return complete(member)


def start(member: Rank, share: int = SHARE, keep: SnapshotId | None = None) -> list[int]:
    """Start as a job does, up to the slots that ``open`` leaves for later; returns those."""
    member.arenas.entry.enter()
    member.arena = member.arenas.open(member.manifest(share), keep)
    return settle(member)


def stop(members: Sequence[Rank]) -> None:
    """Leaves what a kill does: arenas that nobody has open."""
    for member in members:
        member.have.close()
        member.arenas.release()


def end(members: Sequence[Rank]) -> None:
    """The end of a job, which removes its arenas."""
    on_all(members, lambda member: member.arenas.leave(member.arena, lambda: None, lambda: None))
    on_all(members, lambda member: member.arenas.release())


def check_all(*node_dirs: Path) -> None:
    """Checksums of all sealed slots, as SMPs compute them after their trainers have ended."""
    for path in chain.from_iterable(map(list_arenas, node_dirs)):
        with closing(Arena.open(path)) as arena:
            control = arena.control
            checks = Checks.create_or_open(path, control.slots, control.num_chunks, control.digest, writable=True)
            with closing(checks):
                for slot in arena.snapshots().values():
                    seal_id = control.record(slot).seal_id
                    assert seal_id is not None
                    hashes = [arena.hash_chunk(slot, chunk) for chunk in range(control.num_chunks)]
                    checks.store_checked(slot, seal_id, np.array(hashes, np.uint64), 0.25)


def choose(root: Path, number: int) -> Decision | None:
    """The decision of a restart; every byte of it must be good, and nothing must look damaged."""
    node_dir = root / "ftckpt-job" / "node"
    reports = inventory_of(node_dir).arenas
    assert [report.problems for report in reports if report.problems] == []
    members = ranks(root, number)
    decision = decided(reports, members[0].topology)
    for source in decision.sources.values() if decision is not None else []:
        arena = Arena.open(node_dir / source.arena)
        assert not arena.verify(source.slot)
        arena.close()
    return decision


def used_bytes(root: Path, shard: str) -> int:
    """Memory of the slots of ``shard``: files, also under temporary names, and deleted ones that are mapped."""
    files: list[Path] = []
    for folder in root.glob(f"ftckpt-job/node/*{shard}.*"):
        with suppress(FileNotFoundError):  # it was renamed meanwhile
            files += [path for path in folder.iterdir() if "slot" in path.name]
    mapped = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        name = fields[5] if len(fields) > 5 else ""
        if f"{shard}." in name and str(root) in name and "slot" in name and name.endswith("(deleted)"):
            begin, end = (int(word, 16) for word in fields[0].split("-"))
            mapped[fields[4]] = end - begin
    return sum(_blocks(path) for path in files) + sum(mapped.values())


def _blocks(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
