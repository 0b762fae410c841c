"""Which tensor goes into which safetensors file, and the header of such a file. Pure functions, no I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import xxhash

from ftckpt.errors import ConvertError
from ftckpt.state.fragment import DTYPE_BYTES
from ftckpt.universal.catalog import Bytes, Tensor

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library refuses longer ones."""

_ROLES = ("weight", "buffer", "master", "step")
_ALIGN = 8


def by_role(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Weights first, then buffers, masters, steps and the optimizer's states, each by name.

    Raises:
        ConvertError: a key occurs twice.
    """

    def order(tensor: Tensor) -> tuple[int, str]:
        role = tensor.key.partition("/")[0]
        return (_ROLES.index(role) if role in _ROLES else len(_ROLES)), tensor.key

    found = sorted(tensors, key=order)
    for one, other in pairwise(found):
        if one.key == other.key:
            raise ConvertError(f"{one.key}: there are two tensors of this name")
    return found


def pack(tensors: Sequence[Tensor], max_bytes: int) -> list[list[Tensor]]:
    """Tensors in the order given, cut into files of at most ``max_bytes``; a larger tensor has a file of its own.

    Inside a file types of more bytes come first, so that every tensor begins on a multiple of its item size.
    """
    files: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not files or tensor.nbytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(tensor)
        room -= tensor.nbytes
    return [sorted(file, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.key)) for file in files]


def file_names(stem: str, number: int) -> list[str]:
    """``tensors-00001-of-00007.safetensors`` and so on."""
    return [f"{stem}-{index:05}-of-{number:05}.safetensors" for index in range(1, number + 1)]


def header(names: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a safetensors file that holds ``names`` one behind the other, in this order.

    Raises:
        ConvertError: it would be longer than the safetensors library reads.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in names.items():
        begin, end = end, end + tensor.nbytes
        table[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    if len(text) > MAX_HEADER_BYTES:
        raise ConvertError(f"{len(names)} tensors need a header of {len(text)} bytes; lower --max-file")
    return len(text).to_bytes(8, "little") + text


Entry = tuple[str, tuple[int, ...], int, int]
"""Type, shape, begin and end in the file."""


def parse_header(data: Bytes, where: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """The entries by name, and the metadata, of the file ``where``, of which ``data`` are all bytes.

    Raises:
        ConvertError: not a safetensors file, truncated, or one with holes, overlaps or wrong sizes.
    """
    try:
        length = int.from_bytes(data[:8].tobytes(), "little")
        if len(data) < 8 or length > MAX_HEADER_BYTES or 8 + length > len(data):
            raise ValueError("truncated")
        table: dict[str, Any] = json.loads(data[8 : 8 + length].tobytes())
        metadata = dict(table.pop("__metadata__", {}))
        found: dict[str, Entry] = {}
        base, at = 8 + length, 0
        for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
            shape, (begin, end) = tuple(map(int, entry["shape"])), entry["data_offsets"]
            nbytes = Tensor(name, entry["dtype"], shape).nbytes
            if begin != at or end - begin != nbytes or min(shape, default=0) < 0:
                raise ValueError(f"{name} has bytes {begin} to {end}, {at} to {at + nbytes} are right")
            found[name], at = (entry["dtype"], shape, base + begin, base + end), end
        if base + at != len(data):
            raise ValueError(f"{len(data)} bytes, its header announces {base + at}")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConvertError(f"{where}: not a whole safetensors file: {str(error)[:200]}") from None
    return found, metadata


def checksum(data: Bytes) -> str:
    """xxh3-64 as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data.data)
