"""What this node's memory holds, opened for reading once each."""

from __future__ import annotations

from pathlib import Path

from ftckpt.arena.package import mirror_dir
from ftckpt.arena.segment import Arena
from ftckpt.errors import ArenaError
from ftckpt.protect.parity_file import ParityFile
from ftckpt.restore.source import BlockAt, ChunkAt, Place, Source


class OpenArenas:
    """Arenas and parity files of this node, opened for reading once each; ``close`` unmaps them."""

    def __init__(self, node_dir: Path) -> None:
        self._node_dir = node_dir
        self._open: dict[str, Arena] = {}
        self._parity: dict[tuple[str, str], ParityFile] = {}

    def get(self, name: str) -> Arena:
        """The arena in directory ``name`` of this node."""
        if name not in self._open:
            self._open[name] = Arena.open(self._node_dir / name)
        return self._open[name]

    def parity(self, arena: str, file: str) -> ParityFile:
        """The parity file ``file`` in directory ``arena`` of this node."""
        if (arena, file) not in self._parity:
            self._parity[arena, file] = ParityFile.open(self._node_dir / arena / file)
        return self._parity[arena, file]

    def view(self, place: Place) -> memoryview:
        """The bytes of a slot, a chunk, a block or a package of this node.

        Raises:
            ArenaError: not there, or damaged so that it cannot be read.
        """
        if isinstance(place, Source):
            return self.get(place.arena).slot(place.slot)
        if isinstance(place, ChunkAt):
            arena = self.get(place.arena)
            span = arena.image.chunks[place.chunk]
            return arena.slot(place.slot)[span.begin : span.end]
        if isinstance(place, BlockAt):
            return self.parity(place.arena, place.file).block(place.block).data
        try:
            return memoryview((mirror_dir(self._node_dir) / place.file).read_bytes())
        except OSError as error:
            raise ArenaError(f"package {place.file}: cannot be read: {error.strerror}") from None

    def close(self) -> None:
        """Unmap all."""
        for arena in self._open.values():
            arena.close()
        for parity in self._parity.values():
            parity.close()
        self._open.clear()
        self._parity.clear()
