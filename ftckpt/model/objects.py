"""Encoding of objects (RNG states, counters, schedulers, users' own state) without pickle.

Byte layout, version 1: 8 bytes magic ``FTOBJ001``, 8 bytes little-endian length of a JSON text, the JSON
text, then raw bytes that it refers to by offset. JSON has no tuples, bytes, arrays or keys other than texts, so
these are written as ``{"$": kind, ...}``; a plain mapping with the key ``$`` is written as pairs.
"""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np

from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.model.text import with_article

MAGIC = b"FTOBJ001"
_TEXTS = frozenset((str,))
_PLAIN: frozenset[type] = frozenset((str, bool, int, type(None)))
_NUMBERS = _PLAIN | {float}
# A number that is not finite is an error, so that ``encode`` notices this rare case and encodes it differently.
_TEXT = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False)
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_NAMES = {kind: name for name, kind in _MAPPINGS.items()}
_ARRAY_KINDS = "biufc"
_ARRAY_DTYPE = re.compile(rf"[<>|][{_ARRAY_KINDS}]\d{{1,2}}")
_TENSOR_DTYPES = frozenset((
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
    "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "complex64", "complex128",
))  # fmt: skip


def encode(value: Any) -> bytes:
    """Encodes nested dicts, lists, tuples, numbers, texts, bytes, numpy arrays and torch tensors.

    Raises:
        UnsupportedError: a value of another type; the message names its place.
    """
    try:
        try:
            blobs = _Blobs(_NUMBERS)
            text = _TEXT.encode(_encode(value, blobs)).encode()
        except ValueError:  # a number is not finite: floats are checked one by one
            blobs = _Blobs(_PLAIN)
            text = _TEXT.encode(_encode(value, blobs)).encode()
    except _RefusedError as refused:
        raise UnsupportedError(
            f"objects{''.join(reversed(refused.steps))} is {refused.what}; give its state as numbers, texts, lists, "
            "dicts, arrays or tensors"
        ) from None
    return b"".join([MAGIC, len(text).to_bytes(8, "little"), text, *blobs.data])


def decode(data: bytes | memoryview) -> Any:
    """Inverse of ``encode``; tensors are on the CPU and own their memory.

    Raises:
        CorruptError: not an output of ``encode``.
    """
    view = memoryview(data)
    try:
        if bytes(view[:8]) != MAGIC:
            raise ValueError("wrong magic")
        end = 16 + int.from_bytes(view[8:16], "little")
        # Checked before the slice, which would be shorter without an error.
        if end > len(view):
            raise ValueError("truncated")
        return _decode(json.loads(bytes(view[16:end])), view[end:])
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RuntimeError) as error:
        raise CorruptError(f"objects cannot be decoded: {error}") from None


class _Blobs:
    """Raw bytes that the JSON text refers to. Values of the types ``plain`` are written as JSON."""

    def __init__(self, plain: frozenset[type]) -> None:
        self.plain = plain
        self.data: list[bytes] = []
        self._end = 0

    def add(self, data: bytes) -> dict[str, int]:
        """Appends ``data`` and returns its place."""
        begin = self._end
        self._end += len(data)
        self.data.append(data)
        return {"begin": begin, "end": self._end}


class _RefusedError(Exception):
    """A value that cannot be encoded: ``what`` it is, and the ``steps`` to it, innermost first."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.steps: list[str] = []


def _encode(value: Any, blobs: _Blobs) -> Any:
    # The exact type: an enum is an int, and would be decoded as a plain number. Common types come first.
    kind = type(value)
    if kind in blobs.plain:
        return value
    if kind in _NAMES:
        return _encode_dict(value, blobs)
    if kind is list:
        return _encode_items(value, blobs)
    if kind is tuple:
        return {"$": "tuple", "items": _encode_items(value, blobs)}
    # JSON has neither NaN nor infinity. All other floats are encoded bit-exactly.
    if kind is float:
        return value if isfinite(value) else {"$": "float", "value": repr(value)}
    return _encode_bytes(value, blobs)


def _encode_items(value: Sequence[Any], blobs: _Blobs) -> Sequence[Any]:
    if blobs.plain.issuperset(map(type, value)):
        return value
    items: list[Any] = []
    try:
        for item in value:
            items.append(_encode(item, blobs))
    except _RefusedError as refused:
        refused.steps.append(f"[{len(items)}]")
        raise
    return items


def _encode_dict(value: dict[Any, Any], blobs: _Blobs) -> Any:
    if type(value) is not dict or "$" in value or not _TEXTS.issuperset(map(type, value)):
        return _encode_pairs(value, blobs)
    plain = blobs.plain
    if plain.issuperset(map(type, value.values())):
        return value
    items: dict[str, Any] = {}
    try:
        for key, item in value.items():
            items[key] = item if type(item) in plain else _encode(item, blobs)
    except _RefusedError as refused:
        refused.steps.append(f".{key}")
        raise
    return items


def _encode_pairs(value: dict[Any, Any], blobs: _Blobs) -> Any:
    pairs: list[Any] = []
    for key, item in value.items():
        step = " key"
        try:
            encoded = _encode(key, blobs)
            step = f"[{key!r}]"
            pairs.append([encoded, _encode(item, blobs)])
        except _RefusedError as refused:
            refused.steps.append(step)
            raise
    return {"$": _NAMES[type(value)], "pairs": pairs}


def _encode_bytes(value: Any, blobs: _Blobs) -> Any:
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ in ("Tensor", "ByteTensor"):
        return _encode_tensor(value, blobs)
    if kind is bytes or kind is bytearray:
        return {"$": kind.__name__, **blobs.add(bytes(value))}
    # Not subclasses of arrays, which have more than their elements: masks, names of fields.
    is_array = kind is np.ndarray
    if (is_array or isinstance(value, np.generic)) and value.dtype.kind in _ARRAY_KINDS:
        data = np.ascontiguousarray(value).tobytes()
        described = {"dtype": value.dtype.str, "shape": list(value.shape)}
        return {"$": "array" if is_array else "scalar", **described, **blobs.add(data)}
    raise _RefusedError(
        f"{with_article(f'{kind.__module__}.{kind.__qualname__}')}, which cannot be saved without pickle"
    )


def _encode_tensor(value: Any, blobs: _Blobs) -> Any:
    import torch

    if value.dtype is torch.uint8 and value.is_cpu and value.layout is torch.strided and not value.requires_grad:
        name, data = "uint8", value.numpy().tobytes()  # fast path for RNG states; tobytes() handles strides
    else:
        name = str(value.dtype).removeprefix("torch.")
        if value.layout != torch.strided or name not in _TENSOR_DTYPES:
            kind = "" if value.layout == torch.strided else "sparse "
            raise _RefusedError(f"a {kind}tensor of {value.dtype}, which cannot be saved")
        # ``contiguous`` may preserve strides of a tensor of one element or none, which ``view`` refuses.
        # Lazily negated or conjugated views have the bytes of the original until resolved.
        fresh = value.detach().cpu().resolve_neg().resolve_conj().clone(memory_format=torch.contiguous_format)
        data = fresh.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"$": "tensor", "dtype": name, "shape": list(value.shape), **blobs.add(data)}


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
        raise ValueError(f"bytes {begin}:{end} are outside {len(raw)}")
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
    # In a new bytearray: loaded objects must be writable.
    array = np.frombuffer(bytearray(data), dtype=np.dtype(name)).reshape(shape)
    return array if kind == "array" else array[()]


def _decode_tensor(data: bytes, name: str, shape: list[int]) -> Any:
    import torch

    if name not in _TENSOR_DTYPES:
        raise ValueError(f"tensor of dtype {name!r}")
    dtype = getattr(torch, name)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    return flat.reshape(shape)
