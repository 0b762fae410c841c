"""A shard in a slot of this node, chunk by chunk, each proven on its way to where it belongs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ftckpt.errors import CorruptError
from ftckpt.model.snapshot import SnapshotId
from ftckpt.restore.slot_file import SlotFile
from ftckpt.store.arena import Arena
from ftckpt.store.damage import Damage
from ftckpt.store.landings import Landing


class SlotShard:
    """What ``slot`` of ``arena`` holds of ``snapshot``; ``file`` is its file. Any thread may read chunks.

    Args:
        expected: the checksums of its chunks; those that are not there are not proven.

    Raises:
        ArenaError: it holds something else by now, or all but its chunks is bad.
    """

    def __init__(
        self, arena: Arena, slot: int, snapshot: SnapshotId, file: SlotFile, expected: Mapping[int, int]
    ) -> None:
        record = arena.control.record(slot)
        damage = Damage(reason="record") if record.snapshot != snapshot else arena.damage(slot, record, ())
        if damage:
            raise CorruptError(f"{arena.path}: slot {slot}: {', '.join(damage.names)}")
        self.image = arena.image
        self._arena, self._slot, self._file, self._expected = arena, slot, file, expected

    def stored_bytes(self, number: int) -> int:
        """What is read for a chunk."""
        return self.image.chunks[number].nbytes

    def scatter(self, number: int, landings: Sequence[Landing]) -> None:
        """Fill ``landings``, ascending and apart from each other, from a chunk.

        Raises:
            CorruptError: the chunk is not what it was when its checksum was taken; the landings have what it is.
            ArenaError: it cannot be read.
        """
        found = self._file.take(number, landings)
        if found != self._expected.get(number, found):
            raise CorruptError(f"{self._arena.path}: slot {self._slot}: chunk {number} does not match its checksum")

    def objects(self) -> bytes:
        """The encoded objects, proven when this was made."""
        with self._arena.read_objects(self._slot) as objects:
            return bytes(objects)
