"""JSON for dataclasses, driven by their type hints: the encoding of messages and files.

A dataclass becomes an object with a member per field, a named tuple an array, bytes become hex, a SnapshotId its
text. A class with its own encoding has ``to_json`` and ``from_json``. Decoding checks values against the type hints,
as messages and files are not trusted.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from ftckpt.model.snapshot import SnapshotId

T = TypeVar("T")
Reader = Callable[[Any], Any]
"""Makes a value of one type from JSON; raises ValueError, TypeError or KeyError."""


class Gathers(Protocol):
    """The operations on a group of ranks that ``gather`` needs."""

    def gather(self, data: bytes, /) -> list[bytes]:
        """Every rank's bytes, in the order of ranks."""


def gather(group: Gathers, value: T, kind: type[T]) -> list[T]:
    """The ``value`` of every rank, in the order of ranks. Collective."""
    return [decode(data, kind) for data in group.gather(encode(value))]


def encode(value: Any) -> bytes:
    """The JSON text of ``value``, without spaces."""
    return json.dumps(to_json(value), separators=(",", ":")).encode()


def decode(data: bytes, kind: type[T]) -> T:
    """Inverse of ``encode`` for a value of type ``kind``; raises ValueError for anything else."""
    try:
        return from_json(json.loads(data), kind)
    # ``json`` recurses once per level of nesting in a hostile message.
    except RecursionError:
        raise ValueError(f"no {_name(kind)}: too deeply nested") from None


def to_json(value: Any) -> Any:
    """``value`` as a value that ``json`` can write."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, SnapshotId):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "to_json"):
        return value.to_json()
    if type(value) in (tuple, list):  # the common case first: isinstance(value, Mapping) is slow
        return [to_json(item) for item in value]
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {_text(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [to_json(item) for item in value]
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def from_json(value: Any, kind: type[T]) -> T:
    """Inverse of ``to_json`` for a value of type ``kind``; raises ValueError for anything else."""
    try:
        made: T = _reader(kind)(value)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"no {_name(kind)}: {error}") from None
    return made


def _reader(kind: Any) -> Reader:
    return _cached_reader(kind)


@lru_cache(maxsize=256)
def _cached_reader(kind: Any) -> Reader:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any or kind is object:
        return lambda value: value
    if origin in (Union, types.UnionType):
        return _union(args)
    # tuple[X, Y] has as many items as types; tuple[X, ...] is a sequence.
    if origin is tuple and args[-1] is not Ellipsis:
        return _items(args, tuple)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(*args)
    if origin is not None and issubclass(origin, Iterable):
        # An abstract type has no instances: values become tuples.
        return _sequence(args[0], tuple if origin.__module__ == "collections.abc" else origin)
    if kind is SnapshotId:
        return lambda value: _snapshot(_str(value))
    if kind is bytes:
        return lambda value: bytes.fromhex(_str(value))
    if hasattr(kind, "from_json"):
        made: Reader = kind.from_json
        return made
    if is_dataclass(kind):
        return _dataclass(kind)
    if issubclass(kind, tuple):  # a named tuple: its hints have the order of its items
        return _items(get_type_hints(kind).values(), lambda items: kind(*items))
    return _of(kind)


def _of(kind: Any) -> Reader:
    def read(value: Any) -> Any:
        # Not isinstance: True is an int.
        if type(value) is kind:
            return value
        # Other JSON writers write 1.0 as 1.
        if kind is float and type(value) is int:
            return float(value)
        raise ValueError(f"{str(value)[:80]!r} is no {_name(kind)}")

    return read


_list, _dict, _str = _of(list), _of(dict), _of(str)


@lru_cache(maxsize=1024)
def _snapshot(text: str) -> SnapshotId:
    """Parses a snapshot's text; cached, as the messages of a large job repeat a few snapshots very often."""
    return SnapshotId.parse(text)


def _union(kinds: tuple[Any, ...]) -> Reader:
    """A reader of a union, whose dataclasses must differ in the names of their fields."""
    # Chosen by field names: trying one after another would read a large message several times.
    by_fields = {frozenset(f.name for f in fields(kind)): _reader(kind) for kind in kinds if _by_fields(kind)}
    plain = {kind for kind in kinds if kind in (str, int, bool, type(None))}
    others = [_reader(kind) for kind in kinds if kind not in plain and not _by_fields(kind)]

    def read(value: Any) -> Any:
        if type(value) in plain:
            return value
        if isinstance(value, dict) and frozenset(value) in by_fields:
            return by_fields[frozenset(value)](value)
        for reader in others:
            try:
                return reader(value)
            except (KeyError, TypeError, ValueError):
                continue
        raise ValueError(f"{str(value)[:80]!r} is none of {', '.join(map(_name, kinds))}")

    return read


def _items(kinds: Iterable[Any], make: Callable[[Any], Any]) -> Reader:
    readers = [_reader(kind) for kind in kinds]
    return lambda value: make([reader(item) for reader, item in zip(readers, _list(value), strict=True)])


def _sequence(kind: Any, make: Callable[[Any], Any]) -> Reader:
    reader = _reader(kind)
    return lambda value: make([reader(item) for item in _list(value)])


def _mapping(key: Any, kind: Any) -> Reader:
    if key is not str:
        raise TypeError(f"keys of JSON objects are texts, not {_name(key)}")
    reader = _reader(kind)
    return lambda value: {name: reader(item) for name, item in _dict(value).items()}


def _dataclass(kind: Any) -> Reader:
    hints = get_type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in fields(kind)}
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}

    def read(value: Any) -> Any:
        given = _dict(value)
        # The first comparison is the common case, and cheaper.
        if given.keys() != readers.keys() and not needed <= given.keys() <= readers.keys():
            wrong = sorted(given.keys() - readers.keys()) or sorted(needed - given.keys())
            raise ValueError(f"field {wrong[0][:80]!r} is missing or unknown")
        return kind(**{name: readers[name](item) for name, item in given.items()})

    return read


def _by_fields(kind: Any) -> bool:
    return is_dataclass(kind) and kind is not SnapshotId and not hasattr(kind, "from_json")


def _text(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"keys of JSON objects are texts, not {key!r}")
    return key


def _name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))
