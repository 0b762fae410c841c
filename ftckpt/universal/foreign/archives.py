"""Whether what a file of ``torch.save`` holds is what was written: the CRC-32 that it keeps of each of its records.

Such a file is a zip archive without compression: ``data.pkl``, a few short records, and one for each storage, named
``data/7``. torch writes these checksums and never compares them. Here all but large storages are compared when a file
is opened, a large one when the first of its elements is read: once, and all of it, whatever part of it is wanted.
What nobody reads is not compared.

A checksum of zero says that none was kept: ``torch.serialization.set_crc32_options(False)`` writes that, and so do
programs that fill storages in later. Files in the format of torch before 1.6 have none at all.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ftckpt.errors import ConvertError
from ftckpt.universal.storage import CheckedOnce


class View(io.RawIOBase):
    """A file to read of bytes that are not copied as a whole."""

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
"""How files begin that ``torch.save`` writes since torch 1.6."""
SMALL_BYTES = 16 << 10
"""Storages of at most this size (generators, counters, steps) are compared when their file is opened."""
_FIELD = "_ftckpt_record"
"""Attribute of a storage: its ``_Storage``."""
_DATA = "data/"
_NAME_LENGTHS = struct.Struct("<HH")
_LENGTHS_AT, _HEADER_BYTES = 26, 30
"""Of an entry's own header: where the lengths of name and more stand, and how long it is without these."""


@dataclass(frozen=True)
class ArchiveRecord:
    """Bytes ``begin`` to ``begin + nbytes`` of an archive; ``key`` is its name inside, ``crc`` zero where none is
    kept."""

    key: str
    begin: int
    nbytes: int
    crc: int

    def is_good(self, data: Any) -> bool:
        """Whether its bytes, ``data``, are what was written, as far as can be told."""
        return not self.crc or not self.nbytes or zlib.crc32(data) == self.crc


def records_of(data: memoryview, where: str) -> list[ArchiveRecord]:
    """The records of the archive that ``data`` is.

    Raises:
        ConvertError: it is none, or not one that torch writes; the text has ``where``.
    """
    records = []
    try:
        with zipfile.ZipFile(View(data)) as archive:
            entries = archive.infolist()
        for entry in entries:
            lengths = data[entry.header_offset + _LENGTHS_AT : entry.header_offset + _HEADER_BYTES]
            # The entry's own header, not the central one: torch pads its extra field so that storages are aligned.
            begin = entry.header_offset + _HEADER_BYTES + sum(_NAME_LENGTHS.unpack(lengths))
            key = entry.filename.partition("/")[2]
            if entry.compress_type != zipfile.ZIP_STORED or begin + entry.file_size > len(data):
                raise ConvertError(f"{where} is damaged: its record {key} does not lie there as torch.save writes it")
            records.append(ArchiveRecord(key, begin, entry.file_size, entry.CRC))
    except (zipfile.BadZipFile, NotImplementedError, UnicodeError, ValueError, struct.error, OverflowError):
        raise ConvertError(f"{where} is truncated or was not written by torch.save") from None
    return records


def check_all(data: memoryview, where: str, storages: bool = True) -> list[ArchiveRecord]:
    """Compare every record of the archive that ``data`` is, or all but those that are ``storages``; returns them.

    Raises:
        ConvertError: one is not what was written; the text has ``where``.
    """
    records = records_of(data, where)
    for record in records:
        wanted = storages or not record.key.startswith(_DATA)
        if wanted and not record.is_good(data[record.begin : record.begin + record.nbytes]):
            raise ConvertError(damaged(where, record.key))
    return records


def damaged(where: str, key: str) -> str:
    """What is said of a record whose bytes are others."""
    return f"{where} is damaged: the bytes of its record {key} do not match their CRC-32"


class _Storage:
    """What is known of a storage that is mapped from a file."""

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
    """Compare the storage that ``tensor`` is a part of, if it is mapped from a file and was not compared before.

    Raises:
        ConvertError: it is not what was written; the text has the file and ``name``.
    """
    storage = tensor.untyped_storage()
    known: _Storage | None = getattr(storage, _FIELD, None)
    if known is not None:
        known.check(storage, name)


def flat(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """``tensor`` with one dimension, of the same memory where that can be; compared first where it is copied.

    Raises:
        ConvertError: as ``check``.
    """
    if not tensor.is_contiguous():
        check(tensor, name)
    return tensor.detach().reshape(-1)


def mark(
    storages: Sequence[torch.UntypedStorage], records: Sequence[ArchiveRecord], data: memoryview, where: str
) -> bool:
    """Let ``check`` know to which of the ``records`` of the file ``data`` each of its mapped ``storages`` belongs.

    Returns:
        False where nothing says so: then every record was compared at once.

    Raises:
        ConvertError: such a record is not what was written.
    """
    by_begin = {record.begin: record for record in records if record.nbytes and record.key.startswith(_DATA)}
    filled = [storage for storage in storages if storage.nbytes()]
    if not filled:
        return True
    # torch tells neither record nor offset of a mapped storage: its address does.
    base = _file_begin(filled[0].data_ptr())
    found = [(storage, by_begin.get(storage.data_ptr() - base)) for storage in filled]
    owners = [(storage, record) for storage, record in found if record and record.nbytes == storage.nbytes()]
    if _is_swapped(records, data) or len(owners) < len(filled):
        check_all(data, where)
        return False
    for storage, record in owners:
        setattr(storage, _FIELD, _Storage(where, record))
    return True


def check_small(storages: Sequence[torch.UntypedStorage], value: Any) -> None:
    """Compare all small ones of these storages, that tensors in ``value`` are made of.

    Raises:
        ConvertError: one is not what was written; the text has the file and where in ``value`` it is.
    """
    for storage in storages:
        known: _Storage | None = getattr(storage, _FIELD, None)
        if known is not None and storage.nbytes() <= SMALL_BYTES:
            try:
                known.check(storage, "")
            except ConvertError:
                pointer = storage.data_ptr()
                names = (name for name, tensor in _tensors(value) if tensor.untyped_storage().data_ptr() == pointer)
                # Again, for the error with a name: which tensor it is was not worth looking for before.
                known.check(storage, next(names, "") or "its tensor")


def _file_begin(address: int) -> int:
    """Where in memory the file begins, or would, that is mapped at ``address``; 0 where none is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        # proc(5): addresses, permissions, offset, device, inode.
        span, _, offset, _, inode, *_ = line.split()
        begin, end = (int(word, 16) for word in span.split("-"))
        if begin <= address < end and inode != "0":
            return begin - int(offset, 16)
    return 0


def _is_swapped(records: Sequence[ArchiveRecord], data: memoryview) -> bool:
    """Whether torch has turned the bytes of every element round, so that they are others than those in the file."""
    orders = (bytes(data[each.begin : each.begin + each.nbytes]) for each in records if each.key == "byteorder")
    return next(orders, sys.byteorder.encode()) != sys.byteorder.encode()


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in mappings, sequences and objects, by where they are."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if isinstance(value, Mapping):
        parts = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(str(index), item) for index, item in enumerate(value)]
    else:
        parts = list(vars(value).items()) if hasattr(value, "__dict__") and not isinstance(value, type) else []
    for key, item in parts:
        yield from _tensors(item, f"{name}.{key}" if name else key)
