"""The slots of arenas in memory, as ``ftckpt list`` and ``ftckpt verify`` show them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from ftckpt.cli.answers import Answer, Lines, ProgressLine, alarming
from ftckpt.cli.targets import arenas_under, jobs_in
from ftckpt.errors import CorruptError, MismatchError
from ftckpt.memory.arena import Arena
from ftckpt.memory.control_block import SlotRecord
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import aligned, listed

_COLUMNS = ("ARENA", "SLOT", "STATE", "ITERATION", "LINEAGE", "BYTES", "GAP", "VERIFIED")
_MOST_NAMED = 8


def slots_at(path: Path, verify: bool) -> Lines:
    """The slots of all arenas at ``path``, with ``verify`` compared with their checksums; status 1: some are bad."""
    jobs = [one.path for one in jobs_in(path) if one.is_open]
    arenas = [arena for under in jobs or [path] for arena in arenas_under(under)]
    table = _SlotTable(verify)
    for arena in arenas:
        table.add("/".join(arena.parts[-3 if jobs else -2 :]), arena)
    yield aligned([_COLUMNS, *table.rows], len(_COLUMNS))
    yield from table.notes
    yield from map(alarming, table.problems)
    heads = [head.lower() for head in _COLUMNS]
    slots = [dict(zip(heads, row, strict=True)) for row in table.rows]
    yield Answer({"slots": slots, "notes": table.notes, "problems": table.problems}, int(bool(table.problems)))


class _SlotTable:
    """A row per slot, notes, and the problems found: corrupt bytes, unreadable files."""

    def __init__(self, verify: bool) -> None:
        self._verify = verify
        self.rows: list[tuple[str, ...]] = []
        self.notes: list[str] = []
        self.problems: list[str] = []

    def add(self, name: str, path: Path) -> None:
        """Adds the slots of an arena."""
        try:
            arena = Arena.open(path)
        except (CorruptError, MismatchError) as error:
            self.rows.append((name, "-", "UNREADABLE", *["-"] * 5))
            self.problems.append(f"{name}: {error}")
            return
        with (
            closing(arena),
            ProgressLine(f"verifying {name}", arena.image.file_bytes * arena.control.slots) as progress,
        ):
            for slot in range(arena.control.slots):
                self._add_slot(name, arena, slot)
                progress(arena.image.file_bytes)
            control = arena.control
            self.notes.append(f"{name}: newest committed snapshot: {_in_words(control.whole())}")
            for what, snapshot in (("being protected", control.target()), ("protected", control.protected())):
                if snapshot is not None:
                    self.notes.append(f"{name}: {what} on all nodes: {_in_words(snapshot)}")

    def _add_slot(self, name: str, arena: Arena, slot: int) -> None:
        record, bad = arena.control.record(slot), list[str]()
        is_verified = self._verify and record.sealed and arena.allocated(slot)
        if error := arena.slot_error(slot) if arena.allocated(slot) else None:
            state, bad = "UNUSABLE", [error]
        elif record.torn and arena.allocated(slot):
            state, bad = "TORN", ["record"]
        else:
            state = arena.state(slot).name if arena.allocated(slot) else "ABSENT"
            bad = _corrupt(arena, slot, record) if is_verified else []
        iteration, lineage = "-", "-"
        if record.snapshot is not None:
            iteration, lineage = str(record.snapshot.iteration), record.snapshot.lineage.hex()[:8]
        verified = "-" if not is_verified else "BAD" if bad else "unchecked" if arena.unchecked(slot) else "yes"
        size, gap = str(arena.image.file_bytes), _gap(arena, slot, record)
        self.rows.append((name, str(slot), state, iteration, lineage, size, gap, verified))
        if bad:
            self.problems.append(f"{name} slot {slot}: bad: {listed(bad, _MOST_NAMED)}")


def _in_words(snapshot: SnapshotId | None) -> str:
    return "none" if snapshot is None else f"iteration {snapshot.iteration} of lineage {snapshot.lineage.hex()[:8]}"


def _gap(arena: Arena, slot: int, record: SlotRecord) -> str:
    """Time from the seal to the checksums: corruption in that gap is not detected."""
    if not record.sealed:
        return "-"
    if record.hashed:  # checksums were there before the seal
        return "0s"
    return "open" if arena.unchecked(slot) else f"{arena.gap_secs(slot):.3f}s"


def _corrupt(arena: Arena, slot: int, record: SlotRecord) -> list[str]:
    """Names of corrupt chunks of a sealed slot."""
    bad = arena.verify(slot).names
    now = arena.control.record(slot)
    # Bytes of a slot that a live rank has reused meanwhile are not corrupt.
    return [] if (now.state, now.sequence) != (record.state, record.sequence) and not now.torn else bad
