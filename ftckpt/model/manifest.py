"""The manifest of a slot: the shard's coordinates, the layout, and the fragments in the order of their bytes."""

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
"""Kinds of section, in their order in a slot."""

PARITY_PREFIX = "__parity__/"

MAX_CHUNKS = 1 << 20
"""Limit of a slot's chunks, so that a hostile manifest cannot request a huge table."""


class Section(NamedTuple):
    """A section of a slot: ``fragments`` adjacent stepped fragments of its manifest, at least one.

    ``private``: not protected by replica or copy groups. ``shared``: this rank's share of its replica set's state,
    protected by the parity group ``group``, whose blocks are in slots. ``copy``: a copy of the share that shard
    ``of`` has in ``group``. ``parity``: this rank's blocks of ``group``, as one fragment of bytes.
    """

    kind: str
    fragments: int
    group: str = ""
    of: str = ""


def parity_fragment(group: str, nbytes: int) -> Fragment:
    """The fragment of a parity section of ``group``: ``nbytes`` up to the end of the last block."""
    return Fragment.whole(f"{PARITY_PREFIX}{group}", "U8", (nbytes,), Box((0,), (nbytes,)))


def check_sections(sections: Sequence[Section], stepped: Sequence[Fragment]) -> None:
    """Validates a manifest's sections; an empty sequence means one private section.

    Raises:
        ValueError: an unknown kind, an order other than that of ``KINDS``, a duplicate, a wrong number of fragments,
            a missing or superfluous group or shard, or a parity section that is not one fragment of bytes.
    """
    if not sections:
        return
    for section in sections:
        _check(section)
    places = [KINDS.index(section.kind) for section in sections]
    if places != sorted(places):
        raise ValueError(f"sections are in the order {[s.kind for s in sections][:20]}, not in that of {KINDS}")
    if len({(section.kind, section.group, section.of) for section in sections}) != len(sections):
        raise ValueError("a section occurs twice")
    count = sum(section.fragments for section in sections)
    if count != len(stepped):
        raise ValueError(f"sections have {count} fragments, the manifest has {len(stepped)} stepped ones")
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
    """The structure of all slots of one arena.

    ``coords``: the shard's place in the layout (``{"tp": 0, "pp": 1, "dp": 0}``). ``layout``: sizes, and the sharding
    of the optimizer. ``stepped``: fragments of optimizer-updated state, copied in the background; ``volatile``: of
    mutable state, copied at the boundary. ``objects_bytes``: space for encoded objects. ``chunk_bytes``: the unit of
    copies and checksums. ``sections``: divide the stepped fragments in order; empty: one private section.
    ``padded``: sorted keys whose first dimension is rounded up by a rule that depends on the layout. ``derived``:
    sorted types of weights that have no fragment because they are casts of their masters.

    Raises:
        ValueError: invalid sections, see ``check_sections``.
    """

    coords: Mapping[str, int]
    layout: Mapping[str, int | str | bool]
    stepped: tuple[Fragment, ...]
    volatile: tuple[Fragment, ...]
    objects_bytes: int
    chunk_bytes: int
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

    @cached_property  # encoding thousands of fragments takes 10 ms, and a start needs it several times
    def _encoded(self) -> bytes:
        value: dict[str, Any] = {
            "version": VERSION,
            "coords": list(self.coords.items()),
            "layout": dict(self.layout),
            "objects_bytes": self.objects_bytes,
            "chunk_bytes": self.chunk_bytes,
        }
        # Absent at its default, as in slots of versions without the field.
        if self.sections:
            value["sections"] = codec.to_json(self.sections)
        if self.padded:
            value["padded"] = list(self.padded)
        if self.derived:
            value["derived"] = list(self.derived)
        texts = {name: json.dumps(of, separators=(",", ":"), sort_keys=True) for name, of in value.items()}
        for name, fragments in (("stepped", self.stepped), ("volatile", self.volatile)):
            texts[name] = f"[{','.join(map(Fragment.to_json_text, fragments))}]"
        # Keys are sorted, lists are not: the order of coordinates and fragments is significant.
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
            return cls(
                coords={str(axis): int(index) for axis, index in value["coords"]},
                layout=dict(value["layout"]),
                stepped=tuple(Fragment.each_from_json(value["stepped"])),
                volatile=tuple(Fragment.each_from_json(value["volatile"])),
                objects_bytes=int(value["objects_bytes"]),
                chunk_bytes=int(value["chunk_bytes"]),
                sections=codec.from_json(value.get("sections", []), tuple[Section, ...]),
                padded=_texts(value.get("padded", [])),
                derived=_texts(value.get("derived", [])),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CorruptError(f"not a manifest: {error}") from None

    @cached_property
    def digest(self) -> bytes:
        """The xxh3-128 of the encoded manifest, 16 bytes, which identifies it."""
        return xxhash.xxh3_128_digest(self.encode())


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise TypeError(f"padded or derived: {value!r} is not a list of texts")
    return tuple(value)


def shard_name(coords: Mapping[str, int]) -> str:
    """Coordinates as a file name, in their own order: ``tp0-pp1-dp0``."""
    return "-".join(f"{axis}{index}" for axis, index in coords.items())
