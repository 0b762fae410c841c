"""Parity files: the parity blocks of one member of a group for one snapshot; ``FORMAT.md`` has the byte map.

A record file (``record``) with one record, whose words are the checksums of the blocks. Its text is the group, its
first number the member that has the file, its body the blocks. Only the node's SMP writes: each block before its
checksum, the seal last.
"""

from __future__ import annotations

import json
import re
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ftckpt.array_types import Bytes
from ftckpt.config import PAGE_BYTES
from ftckpt.errors import ArenaError, CorruptError, MismatchError
from ftckpt.memory.atomic_files import fresh_name, remove_unfinished
from ftckpt.memory.corruption import HEADER, RECORD, Corruption
from ftckpt.memory.directory import list_arenas
from ftckpt.memory.mapping import Mapping, create_mapping, open_mapping
from ftckpt.memory.record import WRITING, Format, Header, Records, Stores
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.groups import ParityGroup
from ftckpt.parity.stripes import num_blocks, stripes
from ftckpt.setting_checks import MODES

FORMAT = Format("parity file", b"FTCKPTPF", 1)
MAX_GROUP_BYTES = 16 << 20
"""Maximum size of a group's JSON."""

_NAME = re.compile(rf"parity\.({'|'.join(MODES)})\.([01])")


@dataclass(frozen=True, order=True)
class ParityName:
    """The parsed name of a parity file; ``arena`` is the name of its directory."""

    arena: str
    mode: str
    index: int
    path: Path


class ParityFile:
    """A mapped parity file. The caller closes it; views of blocks stay valid after that.

    The SMP calls ``begin``, ``put`` for every block, then ``seal``. Other processes only read.
    """

    def __init__(self, path: Path, mapping: Mapping, group: ParityGroup, holder: int) -> None:
        self.path = path
        self.group = group
        self.holder = holder
        self._map = mapping
        self._lengths = _block_lengths(group, holder)
        self._stores = Stores(memoryview(mapping.data))
        self._record = Records(self._stores, FORMAT.records_offset, 1, len(self._lengths))
        self._offsets, _ = _layout(group, self._lengths)
        # State of this process only: a file that another process left WRITING is restarted, not completed.
        self._put: set[int] = set()
        self._writing: SnapshotId | None = None

    @classmethod
    def create(cls, path: Path, group: ParityGroup, holder: int) -> ParityFile:
        """Create an empty file for the blocks of member ``holder``, with every page allocated.

        It is built under a temporary name and replaces an existing file; delete that first if memory is short.
        Unfinished files that killed processes left under this name are removed.

        Raises:
            MemoryBudgetError: the file system is full; no file is left.
            ArenaError: it cannot be created, the group's JSON is too large, or there is no such member.
        """
        if not 0 <= holder < len(group.members):
            raise ArenaError(f"{path}: parity group {group.name} has no member {holder}")
        text = _group_text(group)
        if len(text) > MAX_GROUP_BYTES:
            raise ArenaError(f"{path}: the group's JSON has {len(text)} bytes, at most {MAX_GROUP_BYTES} are allowed")
        nbytes = parity_bytes(group, holder)
        blocks = num_blocks(group, holder)
        mapping = None
        remove_unfinished(path.parent, f"{path.name}*")
        try:
            with fresh_name(path) as fresh:
                mapping = create_mapping(fresh, nbytes)
                FORMAT.write(mapping.data, Header(1, blocks, nbytes, text, numbers=(holder, 0, 0)))
                fresh.rename(path)
        except BaseException as error:  # no other code unmaps it
            if mapping is not None:
                mapping.close()
            if isinstance(error, OSError):
                raise ArenaError(f"{path}: cannot be created: {error.strerror}") from None
            raise
        return cls(path, mapping, group, holder)

    @classmethod
    def open(cls, path: Path, writable: bool = False) -> ParityFile:
        """Map an existing file.

        Raises:
            ArenaError: missing or not permitted.
            CorruptError: not a parity file, corrupt, or inconsistent.
            MismatchError: of another format version.
            MemoryBudgetError: a file opened for writing has holes and the file system is too full to fill them.
        """
        mapping = open_mapping(path, None, writable)
        try:
            group, holder = _read_header(path, mapping.data)
            return cls(path, mapping, group, holder)
        except BaseException:  # no other code unmaps it
            mapping.close()
            raise

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the file."""
        return len(self._lengths)

    def snapshot(self) -> SnapshotId | None:
        """The snapshot that the blocks belong to; None: none, incomplete, or torn."""
        return self._record.read(0).snapshot

    def damage(self) -> Corruption:
        """Check the header and the record; the blocks are checked by ``verify``."""
        try:
            sound = _read_header(self.path, self._map.data) == (self.group, self.holder)
        except (CorruptError, MismatchError):
            sound = False
        if not sound:
            return Corruption(parts=(HEADER,))
        return Corruption(parts=(RECORD,) if self._record.read(0).torn else ())

    def block(self, block: int) -> Bytes:
        """A view of a block; it is valid only if ``snapshot`` is not None and ``verify`` is true."""
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"{self.path}: block {block} of {self.num_blocks}")
        return np.frombuffer(self._map.data, np.uint8, self._lengths[block], self._offsets[block])

    def verify(self, block: int) -> bool:
        """Whether the bytes of a block match the checksum that was stored with it."""
        return xxhash.xxh3_64_intdigest(self.block(block).data) == self._record.word(0, block)

    def begin(self, snapshot: SnapshotId) -> None:
        """Set WRITING: drop the snapshot in the file, and expect the blocks of ``snapshot``."""
        self._record.give_up(0, WRITING)
        self._put.clear()
        self._writing = snapshot

    def put(self, block: int, data: Bytes, checksum: int | None = None) -> None:
        """Store a block (uint8, of the block's length) and its checksum; ``data`` may be the view from ``block``.

        ``checksum``: the xxh3-64 of ``data`` if the caller has it; None computes it.

        Raises:
            ValueError: another length or dtype.
            ArenaError: ``begin`` was not called.
        """
        self._require_writing()
        view = self.block(block)
        if data.shape != view.shape or data.dtype != np.uint8:
            raise ValueError(f"{self.path}: block {block} has {len(view)} bytes, not {data.dtype} {data.shape}")
        source = np.ascontiguousarray(data)
        # The hash of the source: the next ``verify`` detects an error in the copy.
        value = xxhash.xxh3_64_intdigest(source.data) if checksum is None else checksum
        # At the same address the block was computed in place.
        if source.ctypes.data != view.ctypes.data:
            self._stores.store(self._offsets[block], source.data)
        # After its block; until the seal the record is WRITING and no checksum counts.
        self._record.put_words(0, value.to_bytes(8, "little"), block)
        self._put.add(block)

    def seal(self) -> None:
        """Set SEALED: every block is stored and belongs to the snapshot of ``begin``.

        Raises:
            ArenaError: ``begin`` was not called, or blocks are missing since.
        """
        snapshot = self._require_writing()
        if len(self._put) < self.num_blocks:
            raise ArenaError(
                f"{self.path}: {self.num_blocks - len(self._put)} blocks are missing; put them, then seal"
            )
        self._record.seal(0, snapshot)
        self._writing = None

    def close(self) -> None:
        """Unmap. Remaining views are no error: they keep their memory mapped."""
        self._stores.data.release()
        self._map.close()

    def _require_writing(self) -> SnapshotId:
        if self._writing is None:
            raise ArenaError(f"{self.path} is not WRITING; call begin first")
        return self._writing


def snapshot_of(path: Path) -> SnapshotId | None:
    """The result of ``ParityFile.snapshot`` for the file at ``path``; the group is not parsed or checked.

    Raises:
        ArenaError, CorruptError, MismatchError: as ``ParityFile.open``.
    """
    with closing(open_mapping(path, None, False)) as mapping:
        header = FORMAT.read(mapping.data, str(path))
        if header.records != 1:
            raise CorruptError(f"{path}: {header.records} records")
        with memoryview(mapping.data) as view:
            return Records(Stores(view), FORMAT.records_offset, 1, header.words).read(0).snapshot


def parity_bytes(group: ParityGroup, holder: int) -> int:
    """Size in bytes of the parity file of member ``holder``."""
    return _layout(group, _block_lengths(group, holder))[1]


def parity_path(arena_dir: Path, mode: str, index: int) -> Path:
    """Path of a parity file of an arena; ``index`` is 0 or 1."""
    return arena_dir / f"parity.{mode}.{index}"


def list_parity(node_dir: Path) -> list[ParityName]:
    """The parity files of a node's arenas, sorted; only their names are read."""
    return sorted(name for arena in list_arenas(node_dir) for name in parity_of(arena))


def parity_of(arena_dir: Path) -> list[ParityName]:
    """The parity files of one arena, sorted; none if the arena does not exist."""
    # Another rank may delete its arena between the listing of the node and this one.
    with suppress(FileNotFoundError):
        matches = [(_NAME.fullmatch(path.name), path) for path in arena_dir.iterdir()]
        return sorted(ParityName(arena_dir.name, m[1], int(m[2]), path) for m, path in matches if m)
    return []


def _read_header(path: Path, data: memoryview) -> tuple[ParityGroup, int]:
    """Group and holder; every size is checked against the length of ``data`` before it is used."""
    header = FORMAT.read(data, str(path))
    text, blocks, holder = header.text, header.words, header.numbers[0]
    if len(text) > MAX_GROUP_BYTES or header.records != 1:
        raise CorruptError(f"{path}: {len(text)} bytes for the group, {header.records} records")
    try:
        group = ParityGroup.from_json(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptError(f"{path}: bad parity group: {str(error)[:200]}") from None
    if (
        # The canonical JSON is required: sizes are computed from the group and compared.
        text != _group_text(group)
        or holder >= len(group.members)
        or blocks != num_blocks(group, holder)
        or len(data) != parity_bytes(group, holder)
    ):
        raise CorruptError(f"{path}: {blocks} blocks in {len(data)} bytes do not match member {holder} of its group")
    return group, holder


def _group_text(group: ParityGroup) -> bytes:
    return json.dumps(group.to_json(), separators=(",", ":"), sort_keys=True).encode()


def _block_lengths(group: ParityGroup, holder: int) -> list[int]:
    """Bytes of each block of a holder."""
    lengths = [0] * num_blocks(group, holder)
    for stripe in stripes(group):
        for member, block in stripe.blocks:
            if member == holder:
                lengths[block] = stripe.length
    return lengths


def _layout(group: ParityGroup, lengths: list[int]) -> tuple[list[int], int]:
    """The page-aligned offset of each block, and the size of the file."""
    at = _page_up(FORMAT.text_offset(1, len(lengths)) + len(_group_text(group)))
    offsets = []
    for nbytes in lengths:
        offsets.append(at)
        at += _page_up(nbytes)
    return offsets, at


def _page_up(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
