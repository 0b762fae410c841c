"""Locations of a snapshot's bytes, and this node's arenas and parity files, each opened once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ftckpt.errors import ArenaError
from ftckpt.memory.arena import Arena
from ftckpt.memory.package import mirror_dir
from ftckpt.memory.parity_file import ParityFile
from ftckpt.memory.slot_file import SlotFile, SlotShard
from ftckpt.model import codec


@dataclass(frozen=True, order=True)
class SlotAt:
    """One slot of one arena of one node."""

    node: str
    arena: str
    slot: int


@dataclass(frozen=True, order=True)
class ChunkAt:
    """One chunk of a slot of one arena of one node."""

    node: str
    arena: str
    slot: int
    chunk: int


@dataclass(frozen=True, order=True)
class BlockAt:
    """One block of a parity file of one node."""

    node: str
    arena: str
    file: str
    block: int


@dataclass(frozen=True, order=True)
class PackageAt:
    """A package file of one node, by its name."""

    node: str
    file: str


Location = SlotAt | ChunkAt | BlockAt | PackageAt


def location_of(value: Any) -> Location:
    """Inverse of ``codec.to_json`` for a location; raises ValueError for anything else."""
    location: Location = codec.from_json(value, Location)  # type: ignore[arg-type]
    return location


class OpenArenas:
    """Arenas and parity files of this node, opened for reading once each; ``close`` unmaps them.

    All stages of a restart share one. Close it before files are freed or replaced: tmpfs frees memory only when
    nothing maps it, and a mapping still shows a replaced file. Later calls open files again. Arenas in ``borrowed``,
    by directory name, are open already and stay open.
    """

    def __init__(self, node_dir: Path, borrowed: Mapping[str, Arena] = MappingProxyType({})) -> None:
        self.node_dir = node_dir
        self._borrowed = borrowed
        self._arenas: dict[str, Arena] = {}
        self._files: dict[SlotAt, SlotFile] = {}
        self._shards: dict[SlotAt, SlotShard] = {}
        self._parity: dict[tuple[str, str], ParityFile] = {}

    def get(self, name: str) -> Arena:
        """The arena in directory ``name`` of this node."""
        if name in self._borrowed:
            return self._borrowed[name]
        if name not in self._arenas:
            self._arenas[name] = Arena.open(self.node_dir / name)
        return self._arenas[name]

    def file(self, at: SlotAt) -> SlotFile:
        """The file of a slot of this node, for reads without the mapping; raises ArenaError."""
        if at not in self._files:
            self._files[at] = SlotFile(self.get(at.arena), at.slot)
        return self._files[at]

    def shard(self, at: SlotAt) -> SlotShard:
        """The shard in a verified slot of this node; its chunks are not verified again. Raises ArenaError."""
        if at not in self._shards:
            self._shards[at] = SlotShard(self.get(at.arena), at.slot, self.file(at))
        return self._shards[at]

    def parity(self, arena: str, file: str) -> ParityFile:
        """The parity file ``file`` in directory ``arena`` of this node."""
        if (arena, file) not in self._parity:
            self._parity[arena, file] = ParityFile.open(self.node_dir / arena / file)
        return self._parity[arena, file]

    def view(self, location: Location) -> memoryview:
        """The bytes of a slot, a chunk, a block or a package of this node.

        Raises:
            ArenaError: it does not exist, or is damaged and unreadable.
        """
        if isinstance(location, SlotAt):
            return self.get(location.arena).slot(location.slot)
        if isinstance(location, ChunkAt):
            arena = self.get(location.arena)
            span = arena.image.chunks[location.chunk]
            return arena.slot(location.slot)[span.begin : span.end]
        if isinstance(location, BlockAt):
            # Not verified: a repair verifies all blocks that it needs before it reads one.
            return self.parity(location.arena, location.file).block(location.block).data
        try:
            return memoryview((mirror_dir(self.node_dir) / location.file).read_bytes())
        except OSError as error:
            raise ArenaError(f"package {location.file}: cannot be read: {error.strerror}") from None

    def close(self) -> None:
        """Unmap all; existing views keep their memory mapped."""
        for file in self._files.values():
            file.close()
        for arena in self._arenas.values():
            arena.close()
        for parity in self._parity.values():
            parity.close()
        self._files.clear()
        self._shards.clear()
        self._arenas.clear()
        self._parity.clear()
