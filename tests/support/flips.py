"""Flips single bits of files; in checkpoints of other programs, in every record that ``torch.save`` wrote."""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ftckpt.errors import ConvertError
from ftckpt.memory.arena import Arena
from ftckpt.memory.slots import slot_name
from ftckpt.model import objects


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Turn one bit of a file round; a second call turns it back."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def flip_slot(arena: Arena, slot: int, at: int) -> None:
    """Turn one bit of a slot round."""
    flip(arena.path / slot_name(slot), at, 2)


@dataclass(frozen=True)
class Record:
    """Bytes of a file that a CRC-32 belongs to."""

    file: Path
    key: str
    begin: int
    nbytes: int


def records(file: Path, begin: int = 0, length: int | None = None) -> list[Record]:
    """Records that are not empty, of an archive that is ``file`` or a part of it."""
    data = file.read_bytes()[begin : None if length is None else begin + length]
    found = []
    for entry in zipfile.ZipFile(io.BytesIO(data)).infolist():
        lengths = struct.unpack("<HH", data[entry.header_offset + 26 : entry.header_offset + 30])
        at = begin + entry.header_offset + 30 + sum(lengths)
        if entry.file_size:
            found.append(Record(file, entry.filename.partition("/")[2], at, entry.file_size))
    return found


def of_distributed(path: Path) -> list[Record]:
    """Records of the ``.distcp`` files of a directory, at the places that torch itself names."""
    from torch.distributed.checkpoint import FileSystemReader

    places: Any = FileSystemReader(path).read_metadata().storage_data
    return [
        record
        for info in sorted(places.values(), key=lambda info: (info.relative_path, info.offset))
        for record in records(path / info.relative_path, info.offset, info.length)
    ]


@contextlib.contextmanager
def flipped(record: Record) -> Iterator[None]:
    """One bit in the middle of a record is flipped."""
    place = record.begin + record.nbytes // 2
    flip(record.file, place, 2)
    try:
        yield
    finally:
        flip(record.file, place, 2)


def all_that_is_read(source: Any) -> str:
    """A digest of every fragment and object."""
    try:
        digest = xxhash.xxh3_128(objects.encode(dict(source.catalog.objects)))
        for index, fragment in enumerate(source.catalog.fragments):
            digest.update(repr(fragment).encode())
            digest.update(source.read(index).tobytes())
        return digest.hexdigest()
    finally:
        source.close()


def noticed(opened: Callable[[], Any], found: list[Record]) -> dict[Record, str]:
    """The error for a flipped bit in each record, except for records that are not read.

    A flip that is read and not refused is an AssertionError.
    """
    right = all_that_is_read(opened())
    said: dict[Record, str] = {}
    for record in found:
        with flipped(record):
            try:
                assert all_that_is_read(opened()) == right, f"{record} was read with a flipped bit"
            except ConvertError as error:
                said[record] = str(error)
    assert all_that_is_read(opened()) == right
    for record, text in said.items():
        assert str(record.file) in text, (record, text)
        assert f"record {record.key} do not match their CRC-32" in text, (record, text)
    return said
