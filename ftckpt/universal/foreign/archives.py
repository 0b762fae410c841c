"""Verifies files of ``torch.save`` by the CRC-32 of each of their records.

Such a file is an uncompressed zip archive: ``data.pkl``, a few short records, and one per storage, such as
``data/7``. torch writes these checksums and never verifies them. This module verifies all but large storages when a
file is opened, and a large one, once and completely, when one of its elements is first read.

A checksum of zero means none: ``torch.serialization.set_crc32_options(False)`` writes that, and so do programs that
fill storages later. Files in the format of torch before 1.6 have no checksums.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.universal.storage import CheckedOnce


class View(io.RawIOBase):
    """A readable file over bytes, without a copy of all of them."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, len(self._data))[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        there = self._data[self._at : self._at + len(buffer)]
        buffer[: len(there)] = there
        self._at += len(there)
        return len(there)


ARCHIVE = b"PK\x03\x04"
"""The first bytes of files that ``torch.save`` writes since torch 1.6."""
SMALL_BYTES = 16 << 10
"""Storages of at most this size (generators, counters, steps) are verified when their file is opened."""
_FIELD = "_ftckpt_record"
"""Attribute of a storage: its ``_Storage``."""
_DATA = "data/"
_NAME_LENGTHS = struct.Struct("<HH")
_LENGTHS_AT, _HEADER_BYTES = 26, 30
"""In an entry's local header: offset of the lengths of name and extra field, and size without these two."""


@dataclass(frozen=True)
class ArchiveRecord:
    """Bytes ``begin`` to ``begin + nbytes`` of an archive; ``key`` is the record's name in it, ``crc`` 0 if it has
    none."""

    key: str
    begin: int
    nbytes: int
    crc: int

    def is_good(self, data: Any) -> bool:
        """Whether the record's bytes ``data`` match its checksum, or it has none."""
        return not self.crc or not self.nbytes or zlib.crc32(data) == self.crc


def records_of(data: memoryview, where: str) -> list[ArchiveRecord]:
    """The records of an archive; ``data`` is all of it.

    Raises:
        ConvertError: not an archive that torch writes; the text has ``where``.
    """
    records = []
    try:
        with zipfile.ZipFile(View(data)) as archive:
            entries = archive.infolist()
        for entry in entries:
            lengths = data[entry.header_offset + _LENGTHS_AT : entry.header_offset + _HEADER_BYTES]
            # From the local header, not the central one: torch pads its extra field to align storages.
            begin = entry.header_offset + _HEADER_BYTES + sum(_NAME_LENGTHS.unpack(lengths))
            key = entry.filename.partition("/")[2]
            if entry.compress_type != zipfile.ZIP_STORED or begin + entry.file_size > len(data):
                raise ConvertError(f"{where} is damaged: its record {key} is compressed or truncated")
            records.append(ArchiveRecord(key, begin, entry.file_size, entry.CRC))
    except (zipfile.BadZipFile, NotImplementedError, UnicodeError, ValueError, struct.error, OverflowError):
        raise ConvertError(f"{where} is truncated or was not written by torch.save") from None
    return records


def check_all(data: memoryview, where: str, large: bool = True) -> list[ArchiveRecord]:
    """Verify the records of an archive, those of large storages only if ``large``; returns all of them.

    Raises:
        ConvertError: a record is corrupt; the text has ``where``.
    """
    records = records_of(data, where)
    for record in records:
        wanted = large or not record.key.startswith(_DATA) or record.nbytes <= SMALL_BYTES
        if wanted and not record.is_good(data[record.begin : record.begin + record.nbytes]):
            raise ConvertError(damaged(where, record.key))
    return records


def damaged(where: str, key: str) -> str:
    """The error message for a corrupt record."""
    return f"{where} is damaged: the bytes of its record {key} do not match their CRC-32"


class _Storage:
    """The record of a storage that is mapped from a file."""

    def __init__(self, where: str, record: ArchiveRecord) -> None:
        self._where = where
        self._record = record
        self._checked = CheckedOnce[str]()

    def check(self, storage: torch.UntypedStorage, name: str) -> None:
        def compare() -> None:
            if not self._record.is_good(torch.empty(0, dtype=torch.uint8).set_(storage).numpy()):
                raise ConvertError(damaged(f"{self._where}: {name}", self._record.key))

        self._checked.check(self._record.key, compare)


def check(tensor: torch.Tensor, name: str) -> None:
    """Verify the storage of ``tensor``, if it is mapped from a file and was not verified before.

    Raises:
        ConvertError: it is corrupt; the text has the file and ``name``.
    """
    storage = tensor.untyped_storage()
    known: _Storage | None = getattr(storage, _FIELD, None)
    if known is not None:
        known.check(storage, name)


def bytes_of(tensor: torch.Tensor, name: str) -> Bytes:
    """The verified elements of ``tensor``, row-major; a view if they are contiguous. Raises ConvertError."""
    check(tensor, name)
    data: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return data


def flat(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """``tensor`` with one dimension: a view, or, if that is impossible, a copy of verified bytes.

    Raises:
        ConvertError: as ``check``.
    """
    if not tensor.is_contiguous():
        check(tensor, name)
    return tensor.detach().reshape(-1)


def mark(
    storages: Sequence[torch.UntypedStorage], records: Sequence[ArchiveRecord], data: memoryview, where: str
) -> bool:
    """Attach to each of the mapped ``storages`` of the file ``data`` its record among ``records``, for ``check``.

    Returns:
        False if they cannot be matched: every record was verified instead.

    Raises:
        ConvertError: a record verified here is corrupt.
    """
    by_begin = {record.begin: record for record in records if record.nbytes and record.key.startswith(_DATA)}
    filled = [storage for storage in storages if storage.nbytes()]
    if not filled:
        return True
    # torch exposes neither record nor offset of a mapped storage: its address gives the offset.
    base = _file_begin(filled[0].data_ptr())
    found = [(storage, by_begin.get(storage.data_ptr() - base)) for storage in filled]
    owners = [(storage, record) for storage, record in found if record and record.nbytes == storage.nbytes()]
    if _is_swapped(records, data) or len(owners) < len(filled):
        check_all(data, where)
        return False
    for storage, record in owners:
        setattr(storage, _FIELD, _Storage(where, record))
    return True


def _file_begin(address: int) -> int:
    """The address at which byte 0 of the file mapped at ``address`` is, or would be; 0 if no file is mapped there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        # proc(5): addresses, permissions, offset, device, inode.
        span, _, offset, _, inode, *_ = line.split()
        begin, end = (int(word, 16) for word in span.split("-"))
        if begin <= address < end and inode != "0":
            return begin - int(offset, 16)
    return 0


def _is_swapped(records: Sequence[ArchiveRecord], data: memoryview) -> bool:
    """Whether torch has swapped the byte order, so that storages differ from the file."""
    orders = (bytes(data[each.begin : each.begin + each.nbytes]) for each in records if each.key == "byteorder")
    return next(orders, sys.byteorder.encode()) != sys.byteorder.encode()
