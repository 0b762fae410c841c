"""Writes a file that ``torch.load`` reads, with one large tensor in it that is never in memory as a whole.

Such a file is a zip archive without compression: the structure is saved with the tensor's bytes left out, then these
are written where they belong.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import torch

from ftckpt.errors import ConvertError
from ftckpt.universal.catalog import Bytes
from ftckpt.universal.foreign import pickles

_LOCAL = struct.Struct("<4s5HIIIHH")
_CENTRAL = struct.Struct("<4s6HIIIHHHHHII")
_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
_HAS_DESCRIPTOR = 0x08
_LOCAL_CRC, _CENTRAL_CRC = 14, 16
"""Where in these headers the CRC-32 of the entry stands."""


def save_streamed(
    file: BinaryIO, build: Callable[[torch.Tensor], Any], like: torch.Tensor, data: Iterable[Bytes]
) -> None:
    """Write ``build(tensor)``, where ``tensor`` has type and shape of ``like`` and the bytes that ``data`` yields.

    ``file`` is open for writing, has a name, and is written from its beginning. ``like``: never read or written, so
    that ``torch.empty`` costs no memory.

    Raises:
        ConvertError: the file cannot be written, or ``data`` has more or fewer bytes than the tensor.
    """
    with torch.serialization.skip_data():
        pickles.save(build(like), file.name)
    entry, begin = _entry(file.name)
    crc = done = 0
    for part in data:
        view = part.data
        if done + len(view) > like.nbytes:
            break
        crc = zlib.crc32(view, crc)
        while view:
            written = os.pwrite(file.fileno(), view, begin + done)
            done, view = done + written, view[written:]
    else:
        if done == like.nbytes:
            _set_crc(file, entry, begin + done, crc)
            return
    raise ConvertError(f"{file.name}: other than {like.nbytes} bytes came for its tensor")


def _entry(name: str) -> tuple[zipfile.ZipInfo, int]:
    """The only storage of an archive, and where its bytes begin."""
    with zipfile.ZipFile(name) as archive:
        (entry,) = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
    with open(name, "rb") as file:
        file.seek(entry.header_offset)
        *_, name_length, extra_length = _LOCAL.unpack(file.read(_LOCAL.size))
    return entry, entry.header_offset + _LOCAL.size + name_length + extra_length


def _set_crc(file: BinaryIO, entry: zipfile.ZipInfo, end: int, crc: int) -> None:
    """torch does not look at it, other readers of archives do."""
    packed = struct.pack("<I", crc)
    with zipfile.ZipFile(file.name) as archive:
        at = archive.start_dir
    with open(file.name, "r+b") as opened:
        if entry.flag_bits & _HAS_DESCRIPTOR:
            opened.seek(end)
            if opened.read(4) == _DESCRIPTOR_SIGNATURE:
                opened.write(packed)
        else:
            opened.seek(entry.header_offset + _LOCAL_CRC)
            opened.write(packed)
        while True:
            opened.seek(at)
            fields = _CENTRAL.unpack(opened.read(_CENTRAL.size))
            name_length, extra_length, comment_length = fields[10:13]
            if opened.read(name_length) == entry.filename.encode():
                opened.seek(at + _CENTRAL_CRC)
                opened.write(packed)
                return
            at += _CENTRAL.size + name_length + extra_length + comment_length
