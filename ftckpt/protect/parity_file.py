"""Parity files: the blocks that one member of a parity group keeps of one snapshot; ``FORMAT.md`` has the bytes.

A file describes itself: the group, which member keeps it, the snapshot, and a checksum of every block. Only a
node's SMP writes. Why a SIGKILL between any two stores is safe: ``begin`` stores the state byte first, then
clears the checksum, so that nothing is claimed while the snapshot's name, blocks and their checksums are written;
``seal`` stores the checksum over name and block checksums, then the state byte, the only store that makes the claim.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.arena.directory import list_arenas
from ftckpt.arena.fresh import fresh_name, remove_half_made
from ftckpt.arena.mapping import Mapping, create_mapping, open_mapping
from ftckpt.errors import ArenaError, CorruptError, MismatchError
from ftckpt.protect.groups import MODES, ParityGroup
from ftckpt.protect.stripes import num_blocks, stripes

Bytes = npt.NDArray[np.uint8]

MAGIC = b"FTCKPTPF"
VERSION = 1
MAX_GROUP_BYTES = 16 << 20
"""Bound on the JSON of a group."""

_WRITING, _SEALED = b"\1", b"\2"
_PAGE_BYTES = 4096
_HEADER = struct.Struct("<8sIIIIQQQ")  # magic, version, holder, blocks, zeros, group bytes, file bytes, group hash
_HEADER_BYTES = 512
_RECORD_OFFSET = 512
_FIELDS = struct.Struct("<16sq")  # lineage, iteration, at 8 of the record
_CHECKSUM_OFFSET = _RECORD_OFFSET + 56
_TABLE_OFFSET = _PAGE_BYTES
_U64 = struct.Struct("<Q")
_NAME = re.compile(rf"parity\.({'|'.join(MODES)})\.([01])")


@dataclass(frozen=True, order=True)
class ParityName:
    """A parity file by its name alone; ``arena`` is the name of the directory it lies in."""

    arena: str
    mode: str
    index: int
    path: Path


class ParityFile:
    """A mapped parity file. The caller closes it; views of blocks stay usable after that."""

    def __init__(self, path: Path, mapping: Mapping, group: ParityGroup, holder: int) -> None:
        self.path = path
        self.group = group
        self.holder = holder
        self._map = mapping
        self._data = memoryview(mapping.data)
        self._lengths = _block_lengths(group, holder)
        self._offsets, _ = _layout(group, self._lengths)
        self._put: set[int] = set()
        self._writing = False

    @classmethod
    def create(cls, path: Path, group: ParityGroup, holder: int) -> ParityFile:
        """An empty file for the blocks that member ``holder`` keeps, every page of it allocated.

        It is built under a temporary name and replaces what is there; delete that first where memory is short.
        What killed processes left half made of this file is removed.

        Raises:
            MemoryBudgetError: the file system has no room; nothing is left behind.
            ArenaError: it cannot be created, the group is too large to be described, or has no such holder.
        """
        if not 0 <= holder < len(group.members):
            raise ArenaError(f"{path}: parity group {group.name} has no member {holder}")
        text = _group_text(group)
        if len(text) > MAX_GROUP_BYTES:
            raise ArenaError(f"{path}: {len(text)} bytes describe the group, at most {MAX_GROUP_BYTES} are allowed")
        nbytes = parity_bytes(group, holder)
        blocks = num_blocks(group, holder)
        header = _HEADER.pack(MAGIC, VERSION, holder, blocks, 0, len(text), nbytes, xxhash.xxh3_64_intdigest(text))
        header = header.ljust(_HEADER_BYTES - 8, b"\0")
        mapping = None
        remove_half_made(path.parent, f"{path.name}*")
        try:
            with fresh_name(path) as fresh:
                mapping = create_mapping(fresh, nbytes)
                begin = _text_offset(blocks)
                mapping.data[begin : begin + len(text)] = text
                mapping.data[:_HEADER_BYTES] = header + _U64.pack(xxhash.xxh3_64_intdigest(header))
                fresh.rename(path)
        except BaseException as error:
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
            CorruptError: no parity file, damaged, or one that contradicts itself.
            MismatchError: of another format version.
            MemoryBudgetError: a file to be written has holes and there is no room to fill them.
        """
        mapping = open_mapping(path, None, writable)
        try:
            group, holder = _read_header(path, mapping.data)
            return cls(path, mapping, group, holder)
        except BaseException:
            mapping.close()
            raise

    @property
    def num_blocks(self) -> int:
        """How many blocks it has."""
        return len(self._lengths)

    def snapshot(self) -> tuple[bytes, int] | None:
        """Lineage and iteration of the snapshot whose blocks these are; None: none, half written, or torn."""
        raw, table = self._record()
        if raw[:1] != _SEALED or raw[56:] != _checksum(raw, table):
            return None
        lineage, iteration = _FIELDS.unpack_from(raw, 8)
        return lineage, iteration

    def block(self, block: int) -> Bytes:
        """The bytes of a block, a view; they mean something while ``snapshot`` names one, and ``verify`` is true."""
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"{self.path}: block {block} of {self.num_blocks}")
        return np.frombuffer(self._map.data, np.uint8, self._lengths[block], self._offsets[block])

    def verify(self, block: int) -> bool:
        """Whether the bytes of a block match the checksum that was stored with it."""
        found = xxhash.xxh3_64_intdigest(self.block(block).data)
        at = _TABLE_OFFSET + 8 * block
        return _U64.pack(found) == self._data[at : at + 8]

    def begin(self, lineage: bytes, iteration: int) -> None:
        """WRITING: what the file held is given up, blocks of this snapshot follow."""
        if len(lineage) != 16:
            raise ValueError(f"a lineage has 16 bytes, not {len(lineage)}")
        self._store(_RECORD_OFFSET, _WRITING)
        self._store(_CHECKSUM_OFFSET, bytes(8))
        self._store(_RECORD_OFFSET + 8, _FIELDS.pack(lineage, iteration))
        self._put.clear()
        self._writing = True

    def put(self, block: int, data: Bytes) -> None:
        """Store a block (uint8, of the block's length) and its checksum; ``data`` may be the view ``block`` gave.

        Raises:
            ValueError: another length.
            ArenaError: ``begin`` was not called.
        """
        self._require_writing()
        view = self.block(block)
        if data.shape != view.shape or data.dtype != np.uint8:
            raise ValueError(f"{self.path}: block {block} has {len(view)} bytes, not {data.dtype} {data.shape}")
        source = np.ascontiguousarray(data)
        # Of the source: what goes wrong in the copy is found.
        value = xxhash.xxh3_64_intdigest(source.data)
        if source.ctypes.data != view.ctypes.data:
            self._store(self._offsets[block], source.data)
        self._store(_TABLE_OFFSET + 8 * block, _U64.pack(value))
        self._put.add(block)

    def seal(self) -> None:
        """SEALED: every block is in place and belongs to the snapshot that ``begin`` named.

        Raises:
            ArenaError: ``begin`` was not called, or blocks have not been put since.
        """
        self._require_writing()
        if len(self._put) < self.num_blocks:
            raise ArenaError(
                f"{self.path}: {self.num_blocks - len(self._put)} blocks were not put; put them, then seal"
            )
        self._store(_CHECKSUM_OFFSET, _checksum(*self._record()))
        self._store(_RECORD_OFFSET, _SEALED)
        self._writing = False

    def close(self) -> None:
        """Unmap; never raises because of views that still exist."""
        self._data.release()
        self._map.close()

    def _record(self) -> tuple[bytes, bytes]:
        """A copy of the record, and of the checksums of all blocks."""
        raw = bytes(self._data[_RECORD_OFFSET : _RECORD_OFFSET + 64])
        return raw, bytes(self._data[_TABLE_OFFSET : _TABLE_OFFSET + 8 * self.num_blocks])

    def _require_writing(self) -> None:
        if not self._writing:
            raise ArenaError(f"{self.path}: is not WRITING; call begin first")

    def _store(self, offset: int, data: bytes | memoryview) -> None:
        """Every store after creation goes through here, in program order."""
        self._data[offset : offset + len(data)] = data


def parity_bytes(group: ParityGroup, holder: int) -> int:
    """Size in bytes of the parity file of member ``holder``."""
    return _layout(group, _block_lengths(group, holder))[1]


def parity_path(arena_dir: Path, mode: str, index: int) -> Path:
    """Where a parity file of an arena lies; ``index`` is 0 or 1."""
    return arena_dir / f"parity.{mode}.{index}"


def list_parity(node_dir: Path) -> list[ParityName]:
    """The parity files of a node's arenas, sorted, by their names alone; ``ParityFile.open`` tells what they are."""
    names = []
    for arena in list_arenas(node_dir):
        for path in arena.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                names.append(ParityName(arena.name, match[1], int(match[2]), path))
    return sorted(names)


def _read_header(path: Path, data: memoryview) -> tuple[ParityGroup, int]:
    """Group and holder; every size is compared with the bytes at hand before it is used."""
    header = bytes(data[:_HEADER_BYTES])
    if len(data) < _PAGE_BYTES or header[:8] != MAGIC:
        raise CorruptError(f"{path}: bad magic, not a parity file")
    if _U64.pack(xxhash.xxh3_64_intdigest(header[:-8])) != header[-8:]:
        raise CorruptError(f"{path}: header checksum does not match")
    _, version, holder, blocks, _, text_bytes, nbytes, text_hash = _HEADER.unpack_from(header)
    if version != VERSION:
        raise MismatchError(f"{path}: has format version {version}, this ftckpt reads {VERSION}")
    begin = _text_offset(blocks)
    if nbytes != len(data) or text_bytes > MAX_GROUP_BYTES or begin + text_bytes > nbytes:
        raise CorruptError(f"{path}: {len(data)} bytes, {nbytes} are announced, {text_bytes} of them for the group")
    text = bytes(data[begin : begin + text_bytes])
    if xxhash.xxh3_64_intdigest(text) != text_hash:
        raise CorruptError(f"{path}: the group's checksum does not match")
    try:
        group = ParityGroup.from_json(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptError(f"{path}: no parity group: {str(error)[:200]}") from None
    if (
        text != _group_text(group)
        or holder >= len(group.members)
        or blocks != num_blocks(group, holder)
        or nbytes != parity_bytes(group, holder)
    ):
        raise CorruptError(f"{path}: {blocks} blocks in {nbytes} bytes are not those of member {holder} of its group")
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
    """Where each block begins, on a page; bytes of the file."""
    at = _page_up(_text_offset(len(lengths)) + len(_group_text(group)))
    offsets = []
    for nbytes in lengths:
        offsets.append(at)
        at += _page_up(nbytes)
    return offsets, at


def _text_offset(blocks: int) -> int:
    return _TABLE_OFFSET + 8 * blocks


def _page_up(nbytes: int) -> int:
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


def _checksum(raw: bytes, table: bytes) -> bytes:
    """Over lineage, iteration, the zeros behind them, and the checksums of all blocks."""
    return _U64.pack(xxhash.xxh3_64_intdigest(raw[8:56] + table))
