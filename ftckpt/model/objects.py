"""Encoding of objects (RNG states, counters, schedulers, users' own state) without pickle.

Byte layout, version 1: 8 bytes magic ``FTOBJ001``, 8 bytes little-endian length of a JSON text, the JSON
text, then the raw bytes that it points to. JSON has no tuples, bytes, arrays or keys other than texts, so
these are written as ``{"$": kind, ...}``; a plain mapping with the key ``$`` is written as pairs.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, OrderedDict
from typing import Any

import numpy as np

from ftckpt.errors import CorruptError, UnsupportedError

MAGIC = b"FTOBJ001"
_PLAIN = (str, bool, int, type(None))
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_ARRAY_KINDS = "biufc"
_ARRAY_DTYPE = re.compile(rf"[<>|][{_ARRAY_KINDS}]\d{{1,2}}")
_TENSOR_DTYPES = frozenset((
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
    "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
))  # fmt: skip


def encode(value: Any) -> bytes:
    """Encode nested dicts, lists, tuples, numbers, texts, bytes, numpy arrays and torch tensors.

    Raises:
        UnsupportedError: something else is inside; the text names where.
    """
    blobs: list[bytes] = []
    text = json.dumps(_encode(value, "objects", blobs), separators=(",", ":")).encode()
    return b"".join([MAGIC, len(text).to_bytes(8, "little"), text, *blobs])


def decode(data: bytes | memoryview) -> Any:
    """Inverse of ``encode``; tensors come back on the CPU, owning their memory.

    Raises:
        CorruptError: not something that ``encode`` wrote.
    """
    view = memoryview(data)
    try:
        if bytes(view[:8]) != MAGIC:
            raise ValueError("wrong magic")
        end = 16 + int.from_bytes(view[8:16], "little")
        # Before the slice, which would be cut short without an error.
        if end > len(view):
            raise ValueError("truncated")
        return _decode(json.loads(bytes(view[16:end])), view[end:])
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RuntimeError) as error:
        raise CorruptError(f"objects cannot be decoded: {error}") from None


def _encode(value: Any, where: str, blobs: list[bytes]) -> Any:
    # The exact type: an enum is an int, and would come back as a mere number.
    if isinstance(value, _PLAIN) and type(value) in _PLAIN:
        return value
    # JSON has neither NaN nor infinity. All others are written so that they read back bit for bit.
    if type(value) is float:
        return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
    if isinstance(value, dict) and type(value) in _MAPPINGS.values():
        return _encode_dict(value, where, blobs)
    if type(value) in (list, tuple):
        items = [_encode(item, f"{where}[{index}]", blobs) for index, item in enumerate(value)]
        return items if type(value) is list else {"$": "tuple", "items": items}
    if type(value) in (bytes, bytearray):
        return {"$": type(value).__name__, **_blob(bytes(value), blobs)}
    # Subclasses of arrays carry more than their elements: masks, names of fields.
    is_array = type(value) is np.ndarray
    if (is_array or isinstance(value, np.generic)) and value.dtype.kind in _ARRAY_KINDS:
        kind = "array" if is_array else "scalar"
        return _array(kind, np.asarray(value), blobs)
    if type(value).__module__ == "torch" and type(value).__name__ in ("Tensor", "ByteTensor"):
        return _encode_tensor(value, where, blobs)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise UnsupportedError(
        f"{where} is a {kind}, which cannot be saved without pickle; give its state as numbers, texts, "
        "lists, dicts, arrays or tensors"
    )


def _encode_dict(value: dict[Any, Any], where: str, blobs: list[bytes]) -> Any:
    if type(value) is dict and all(type(key) is str for key in value) and "$" not in value:
        return {key: _encode(item, f"{where}.{key}", blobs) for key, item in value.items()}
    pairs = [
        [_encode(key, f"{where} key", blobs), _encode(item, f"{where}[{key!r}]", blobs)]
        for key, item in value.items()
    ]
    return {"$": next(name for name, kind in _MAPPINGS.items() if type(value) is kind), "pairs": pairs}


def _encode_tensor(value: Any, where: str, blobs: list[bytes]) -> Any:
    import torch

    name = str(value.dtype).removeprefix("torch.")
    if value.layout != torch.strided or name not in _TENSOR_DTYPES:
        kind = "" if value.layout == torch.strided else "sparse "
        raise UnsupportedError(f"{where} is a {kind}tensor of {value.dtype}, which cannot be saved")
    # ``contiguous`` would keep the strides of a tensor of one element or none, which ``view`` refuses.
    # ``resolve_neg``: a view that negates lazily has the bytes of the original.
    fresh = value.detach().cpu().resolve_neg().clone(memory_format=torch.contiguous_format)
    flat = fresh.reshape(-1).view(torch.uint8).numpy()
    return {"$": "tensor", "dtype": name, "shape": list(value.shape), **_blob(flat.tobytes(), blobs)}


def _array(kind: str, value: np.ndarray[Any, Any], blobs: list[bytes]) -> Any:
    data = _blob(np.ascontiguousarray(value).tobytes(), blobs)
    return {"$": kind, "dtype": value.dtype.str, "shape": list(value.shape), **data}


def _blob(data: bytes, blobs: list[bytes]) -> dict[str, int]:
    begin = sum(map(len, blobs))
    blobs.append(data)
    return {"begin": begin, "end": begin + len(data)}


def _decode(value: Any, raw: memoryview) -> Any:
    if isinstance(value, list):
        return [_decode(item, raw) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: _decode(item, raw) for key, item in value.items()}
    if kind == "float":
        return float(value["value"])
    if kind == "tuple":
        return tuple(_decode(item, raw) for item in value["items"])
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({_decode(key, raw): _decode(item, raw) for key, item in value["pairs"]})
    return _decode_blob(kind, value, raw)


def _decode_blob(kind: str, value: dict[str, Any], raw: memoryview) -> Any:
    begin, end = int(value["begin"]), int(value["end"])
    if not 0 <= begin <= end <= len(raw):
        raise ValueError(f"bytes {begin}:{end} lie outside {len(raw)}")
    data = bytes(raw[begin:end])
    if kind in ("bytes", "bytearray"):
        return data if kind == "bytes" else bytearray(data)
    if kind not in ("tensor", "array", "scalar"):
        raise ValueError(f"unknown kind {kind!r}")
    name, shape = value["dtype"], [int(size) for size in value["shape"]]
    if kind == "tensor":
        return _decode_tensor(data, name, shape)
    if not _ARRAY_DTYPE.fullmatch(name):
        raise ValueError(f"array of dtype {name!r}")
    # A bytearray of its own: objects that are loaded are written to, and bytes cannot be.
    array = np.frombuffer(bytearray(data), dtype=np.dtype(name)).reshape(shape)
    return array if kind == "array" else array[()]


def _decode_tensor(data: bytes, name: str, shape: list[int]) -> Any:
    import torch

    if name not in _TENSOR_DTYPES:
        raise ValueError(f"tensor of dtype {name!r}")
    dtype = getattr(torch, name)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)
