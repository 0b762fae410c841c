"""What one slot holds: the shard's coordinates, its layout and its fragments in the order of the bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import xxhash

from ftckpt.errors import CorruptError, MismatchError
from ftckpt.model import codec
from ftckpt.model.fragment import Box, Fragment

KINDS = ("private", "shared", "copy", "parity")
"""In the order in which they stand."""

PARITY_PREFIX = "__parity__/"

MAX_CHUNKS = 1 << 20
"""Bound on a slot's chunks, so that a hostile manifest cannot ask for an endless table."""


class Section(NamedTuple):
    """``fragments`` stepped fragments of a manifest, at least one, that stand side by side.

    ``private``: what no replica or copy group covers. ``shared``: this rank's share of what its replica set
    holds, covered by ``group``, the name of a parity group whose blocks lie in slots. ``copy``: a copy of the
    share that the shard ``of`` has in ``group``. ``parity``: the blocks that this rank holds for ``group``,
    one fragment of bytes.
    """

    kind: str
    fragments: int
    group: str = ""
    of: str = ""


def parity_fragment(group: str, nbytes: int) -> Fragment:
    """What the section of the parity blocks of ``group`` holds: ``nbytes`` up to the end of the last block."""
    return Fragment.whole(f"{PARITY_PREFIX}{group}", "U8", (nbytes,), Box((0,), (nbytes,)))


def check_sections(sections: Sequence[Section], stepped: Sequence[Fragment]) -> None:
    """Hold the rules of a manifest's sections; none at all is one private section.

    Raises:
        ValueError: an unknown kind, an order other than that of ``KINDS``, one section twice, more than one
            private one, a wrong number of fragments, a group or shard where none belongs or none where one
            does, or a parity section that is not its one fragment of bytes.
    """
    if not sections:
        return
    for section in sections:
        _check(section)
    places = [KINDS.index(section.kind) for section in sections]
    if places != sorted(places):
        raise ValueError(f"sections stand in the order {[s.kind for s in sections][:20]}, not in that of {KINDS}")
    if len({(section.kind, section.group, section.of) for section in sections}) != len(sections):
        raise ValueError("one section stands there twice")
    count = sum(section.fragments for section in sections)
    if count != len(stepped):
        raise ValueError(f"sections hold {count} fragments, there are {len(stepped)} stepped ones")
    begin = 0
    for section in sections:
        if section.kind == "parity" and stepped[begin] != parity_fragment(section.group, stepped[begin].nbytes):
            raise ValueError(f"parity of group {section.group} is not one fragment of bytes: {stepped[begin].name}")
        begin += section.fragments


def _check(section: Section) -> None:
    if section.kind not in KINDS:
        raise ValueError(f"a section is of kind {section.kind!r}, known are {KINDS}")
    if section.fragments < 1 or (section.kind == "parity" and section.fragments != 1):
        raise ValueError(f"a {section.kind} section of {section.fragments} fragments")
    if bool(section.group) != (section.kind != "private"):
        raise ValueError(f"a {section.kind} section has group {section.group!r}")
    if bool(section.of) != (section.kind == "copy"):
        raise ValueError(f"a {section.kind} section is of shard {section.of!r}")


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

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def shard(self) -> str:
        """The coordinates as a file name: ``tp0-pp1-dp0``."""
        return shard_name(self.coords)

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        return self.stepped + self.volatile

    def encode(self) -> bytes:
        """Canonical JSON: equal manifests give equal bytes."""
        return self._encoded

    @cached_property  # thousands of fragments take 10 ms, and a start asks for it several times
    def _encoded(self) -> bytes:
        value: dict[str, Any] = {
            "version": VERSION,
            "coords": list(self.coords.items()),
            "layout": dict(self.layout),
            "objects_bytes": self.objects_bytes,
            "chunk_bytes": self.chunk_bytes,
        }
        if self.capacity:  # absent where it says nothing: slots written before it existed stay readable
            value["capacity"] = self.capacity
        if self.sections:  # as above
            value["sections"] = codec.to_json(self.sections)
        if self.padded:  # as above
            value["padded"] = list(self.padded)
        if self.derived:  # as above
            value["derived"] = list(self.derived)
        texts = {name: json.dumps(of, separators=(",", ":"), sort_keys=True) for name, of in value.items()}
        for name, fragments in (("stepped", self.stepped), ("volatile", self.volatile)):
            texts[name] = f"[{','.join(map(Fragment.to_json_text, fragments))}]"
        # Keys are sorted, lists are not: the order of coordinates and of fragments is part of what they say.
        members = ",".join(f'"{name}":{texts[name]}' for name in sorted(texts))
        return f"{{{members}}}".encode()

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
                stepped=tuple(Fragment.each_from_json(value["stepped"])),
                volatile=tuple(Fragment.each_from_json(value["volatile"])),
                objects_bytes=int(value["objects_bytes"]),
                chunk_bytes=int(value["chunk_bytes"]),
                capacity=capacity,
                sections=codec.from_json(value.get("sections", []), tuple[Section, ...]),
                padded=_texts(value.get("padded", [])),
                derived=_texts(value.get("derived", [])),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CorruptError(f"not a manifest: {error}") from None

    @cached_property
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
