"""Sections of a manifest: which runs of stepped fragments belong to whom, and who protects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ftckpt.state.fragment import Box, Fragment

KINDS = ("private", "shared", "copy", "parity")
"""In the order in which they stand."""

PARITY_PREFIX = "__parity__/"


@dataclass(frozen=True, slots=True)
class Section:
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

    def to_json(self) -> list[Any]:
        """A JSON value that ``from_json`` turns back into an equal section."""
        return [self.kind, self.fragments, self.group, self.of]

    @classmethod
    def from_json(cls, value: list[Any]) -> Section:
        """Inverse of ``to_json``; raises ValueError for anything else."""
        try:
            kind, fragments, group, of = value
            if not all(isinstance(text, str) for text in (kind, group, of)) or type(fragments) is not int:
                raise TypeError(f"{str(value)[:100]} is not a kind, a number, a group and a shard")
            return cls(kind, fragments, group, of)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a section: {error}") from None


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
