"""Encoding of objects (RNG states, counters, schedulers, users' own state) without pickle.

Byte layout, version 1: 8 bytes magic ``FTOBJ001``, 8 bytes little-endian length of a JSON text, the JSON
text, then the raw bytes that it points to. JSON has no tuples, bytes, arrays or keys other than texts, so
these are written as ``{"$": kind, ...}``; a plain mapping with the key ``$`` is written as pairs.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import numpy as np

from ftckpt.errors import CorruptError, UnsupportedError

MAGIC = b"FTOBJ001"
_PLAIN = (str, bool, int, type(None))
_ARRAY_KINDS = "biufc"


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
        if end > len(view):
            raise ValueError("truncated")
        return _decode(json.loads(bytes(view[16:end])), view[end:])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise CorruptError(f"objects cannot be decoded: {error}") from None


def _encode(value: Any, where: str, blobs: list[bytes]) -> Any:
    if isinstance(value, _PLAIN) and type(value) in _PLAIN:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):
        return _encode_dict(value, where, blobs)
    if type(value) in (list, tuple):
        items = [_encode(item, f"{where}[{index}]", blobs) for index, item in enumerate(value)]
        return items if type(value) is list else {"$": "tuple", "items": items}
    if isinstance(value, (bytes, bytearray)):
        return {"$": "bytes", **_blob(bytes(value), blobs)}
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
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
    return {"$": "dict" if type(value) is dict else "ordered", "pairs": pairs}


def _encode_tensor(value: Any, where: str, blobs: list[bytes]) -> Any:
    import torch

    if value.layout != torch.strided or value.is_quantized or value.dtype.is_complex:
        raise UnsupportedError(f"{where} is a sparse, quantized or complex tensor, which cannot be saved")
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    name = str(value.dtype).removeprefix("torch.")
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
    if kind in ("dict", "ordered"):
        pairs = [(_decode(key, raw), _decode(item, raw)) for key, item in value["pairs"]]
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    return _decode_blob(kind, value, raw)


def _decode_blob(kind: str, value: dict[str, Any], raw: memoryview) -> Any:
    begin, end = int(value["begin"]), int(value["end"])
    if not 0 <= begin <= end <= len(raw):
        raise ValueError(f"bytes {begin}:{end} lie outside {len(raw)}")
    data = bytes(raw[begin:end])
    if kind == "bytes":
        return data
    if kind == "tensor":
        import torch

        dtype = getattr(torch, value["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown tensor dtype {value['dtype']!r}")
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape([int(size) for size in value["shape"]])
    if kind not in ("array", "scalar"):
        raise ValueError(f"unknown kind {kind!r}")
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"array of dtype {dtype}")
    array = np.frombuffer(bytearray(data), dtype=dtype).reshape(value["shape"])
    return array if kind == "array" else array[()]
