"""What the arenas of one node hold, as data that can be sent to other nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ftckpt.arena.control import SlotState
from ftckpt.arena.segment import Arena, list_arenas
from ftckpt.errors import ArenaError, MismatchError


@dataclass(frozen=True)
class SlotReport:
    """One sealed slot: ``lineage`` in hex."""

    index: int
    lineage: str
    iteration: int


@dataclass(frozen=True)
class ArenaReport:
    """One arena: where it lies, which shard it holds, what is sealed in it.

    ``whole`` is the newest snapshot that all ranks were known to have sealed (lineage in hex, iteration).
    ``problems`` are texts about what could not be read. ``num_slots`` counts all slots, 0 where unknown.
    """

    node: str
    name: str
    shard: str
    layout: Mapping[str, int | str | bool] = field(default_factory=dict)
    slots: tuple[SlotReport, ...] = ()
    whole: tuple[str, int] | None = None
    problems: tuple[str, ...] = ()
    num_slots: int = 0

    def to_json(self) -> dict[str, Any]:
        """A JSON value for ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ArenaReport:
        """Inverse of ``to_json``."""
        slots = tuple(SlotReport(**slot) for slot in value["slots"])
        whole = (value["whole"][0], value["whole"][1]) if value["whole"] else None
        return cls(**{**value, "slots": slots, "whole": whole, "problems": tuple(value["problems"])})


def take_inventory(node_dir: Path, node: str) -> list[ArenaReport]:
    """Report every arena of this node, readable or not; nothing is written.

    Raises:
        MismatchError: an arena was written by another format version.
    """
    return [_report(path, node) for path in list_arenas(node_dir)]


def _report(path: Path, node: str) -> ArenaReport:
    shard = path.name.rpartition(".")[0]
    try:
        arena = Arena.open(path)
    except MismatchError as error:
        raise MismatchError(f"{path}: {error}; start the version that wrote it, or clean the job") from None
    except ArenaError as error:
        return ArenaReport(node, path.name, shard, problems=(str(error),))
    try:
        slots, problems = [], []
        for index in range(arena.control.slots):
            record, bad = arena.control.record(index), arena.slot_error(index)
            if not arena.allocated(index):
                continue  # its record is EMPTY: nothing was lost
            if bad is not None:
                problems.append(f"slot {index}: {bad}")
            elif record.torn:
                problems.append(f"slot {index}: torn control record")
            elif record.state >= SlotState.SEALED:
                slots.append(SlotReport(index, record.lineage.hex(), record.iteration))
        whole = arena.control.whole()
        return ArenaReport(
            node,
            path.name,
            arena.manifest.shard,
            arena.manifest.layout,
            tuple(slots),
            (whole[0].hex(), whole[1]) if whole else None,
            tuple(problems),
            arena.control.slots,
        )
    finally:
        arena.close()
