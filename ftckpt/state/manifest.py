"""What one slot holds: the shard's coordinates, its layout and its fragments in the order of the bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from ftckpt.errors import CorruptError, MismatchError
from ftckpt.state.fragment import Fragment
from ftckpt.state.sections import Section, check_sections

__all__ = ["VERSION", "Manifest", "Section", "shard_name"]

VERSION = 1
"""Raised whenever a reader of the previous version would misread a slot or a control block."""


@dataclass(frozen=True)
class Manifest:
    """The contents of every slot of one arena.

    ``coords`` places the shard in the layout (``{"tp": 0, "pp": 1, "dp": 0}``) and ``layout`` holds the
    sizes and the sharding of the optimizer. ``stepped`` fragments are copied in the background, ``volatile``
    ones at the boundary. ``objects_bytes`` is the room for encoded objects, ``chunk_bytes`` the size of a
    copy and of a checksum. ``capacity`` is 0 where replica sets were cut into equal shares; otherwise shares
    follow the bytes that each rank's windows take per snapshot, and this is the rank's own such figure.
    ``sections`` divides the stepped fragments, in their order; none at all is one private section. ``padded`` are
    keys, sorted, whose first dimension is rounded up by a rule that depends on the layout. ``derived`` are the types,
    sorted, of weights that are in no fragment because they are casts of their masters.

    Raises:
        ValueError: sections that break the rules of ``check_sections``.
    """

    coords: Mapping[str, int]
    layout: Mapping[str, int | str | bool]
    stepped: tuple[Fragment, ...]
    volatile: tuple[Fragment, ...]
    objects_bytes: int
    chunk_bytes: int
    capacity: int = 0
    sections: tuple[Section, ...] = ()
    padded: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_sections(self.sections, self.stepped)

    @property
    def shard(self) -> str:
        """The coordinates as a file name: ``tp0-pp1-dp0``."""
        return shard_name(self.coords)

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """Stepped, then volatile."""
        return self.stepped + self.volatile

    def encode(self) -> bytes:
        """Canonical JSON: equal manifests give equal bytes."""
        value: dict[str, Any] = {
            "version": VERSION,
            "coords": list(self.coords.items()),
            "layout": dict(self.layout),
            "stepped": [f.to_json() for f in self.stepped],
            "volatile": [f.to_json() for f in self.volatile],
            "objects_bytes": self.objects_bytes,
            "chunk_bytes": self.chunk_bytes,
        }
        if self.capacity:  # absent where it says nothing: slots written before it existed stay readable
            value["capacity"] = self.capacity
        if self.sections:  # as above
            value["sections"] = [section.to_json() for section in self.sections]
        if self.padded:  # as above
            value["padded"] = list(self.padded)
        if self.derived:  # as above
            value["derived"] = list(self.derived)
        return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Inverse of ``encode``.

        Raises:
            CorruptError: not a manifest.
            MismatchError: a manifest of another format version.
        """
        try:
            value: dict[str, Any] = json.loads(data)
            version = value["version"]
            if version != VERSION:
                raise MismatchError(f"manifest has format version {version}, this ftckpt reads {VERSION}")
            capacity = int(value.get("capacity", 0))
            if capacity < 0:
                raise ValueError(f"capacity {capacity} is negative")
            return cls(
                coords={str(axis): int(index) for axis, index in value["coords"]},
                layout=dict(value["layout"]),
                stepped=tuple(map(Fragment.from_json, value["stepped"])),
                volatile=tuple(map(Fragment.from_json, value["volatile"])),
                objects_bytes=int(value["objects_bytes"]),
                chunk_bytes=int(value["chunk_bytes"]),
                capacity=capacity,
                sections=tuple(map(Section.from_json, value.get("sections", ()))),
                padded=_texts(value.get("padded", [])),
                derived=_texts(value.get("derived", [])),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CorruptError(f"not a manifest: {error}") from None

    @property
    def digest(self) -> bytes:
        """16 bytes (xxh3-128) that name this manifest."""
        return xxhash.xxh3_128_digest(self.encode())


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise TypeError(f"padded or derived: {value!r} is not a list of texts")
    return tuple(value)


def shard_name(coords: Mapping[str, int]) -> str:
    """Coordinates as a file name, in their own order: ``tp0-pp1-dp0``."""
    return "-".join(f"{axis}{index}" for axis, index in coords.items())
