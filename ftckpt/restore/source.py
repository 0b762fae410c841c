"""Where bytes of a snapshot lie, and what is wrong with a slot."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

_CHUNK = re.compile(r"chunk ([0-9]+)")
_PARTS = frozenset({"header", "padding", "objects"})


@dataclass(frozen=True, order=True)
class Source:
    """One slot of one arena of one node."""

    node: str
    arena: str
    slot: int

    def to_json(self) -> list[Any]:
        """A JSON value for ``place_of_json``."""
        return ["slot", *astuple(self)]


@dataclass(frozen=True, order=True)
class ChunkAt:
    """One chunk of a slot of one arena of one node."""

    node: str
    arena: str
    slot: int
    chunk: int

    def to_json(self) -> list[Any]:
        """A JSON value for ``place_of_json``."""
        return ["chunk", *astuple(self)]


@dataclass(frozen=True, order=True)
class BlockAt:
    """One block of a parity file of one node."""

    node: str
    arena: str
    file: str
    block: int

    def to_json(self) -> list[Any]:
        """A JSON value for ``place_of_json``."""
        return ["block", *astuple(self)]


@dataclass(frozen=True, order=True)
class PackageAt:
    """A package file of one node, by its name."""

    node: str
    file: str

    def to_json(self) -> list[Any]:
        """A JSON value for ``place_of_json``."""
        return ["package", *astuple(self)]


Place = Source | ChunkAt | BlockAt | PackageAt

_KINDS: dict[str, type[Source] | type[ChunkAt] | type[BlockAt] | type[PackageAt]] = {
    "slot": Source, "chunk": ChunkAt, "block": BlockAt, "package": PackageAt,
}  # fmt: skip


def place_of_json(value: Sequence[Any]) -> Place:
    """Inverse of the places' ``to_json``."""
    kind, *fields = value
    return _KINDS[kind](*fields)


@dataclass(frozen=True)
class Damage:
    """What does not verify in a slot: chunks, and other ``parts`` (header, padding, objects).

    A ``useless`` slot has nothing that could be used.
    """

    chunks: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()
    useless: bool = True

    @classmethod
    def of(cls, problems: Iterable[str]) -> Damage:
        """From the names that ``Arena.verify`` gives."""
        chunks: list[int] = []
        parts: list[str] = []
        for problem in problems:
            match = _CHUNK.fullmatch(problem)
            if match:
                chunks.append(int(match[1]))
            elif problem in _PARTS:
                parts.append(problem)
            else:
                return cls()
        return cls(tuple(chunks), tuple(parts), useless=False)
