"""``ftckpt inspect``: lists the slots of arenas, and verifies them against their checksums."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from ftckpt.cli.job_nodes import job_directory, jobs_in
from ftckpt.cli.options import add_arena
from ftckpt.errors import ArenaError, CorruptError, MismatchError
from ftckpt.memory.arena import Arena
from ftckpt.memory.control_block import CONTROL_NAME, SlotRecord
from ftckpt.memory.directory import PULSE_NAME, list_directories
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.image import parse_image
from ftckpt.memory.mapping import open_mapping
from ftckpt.memory.page import pid_of
from ftckpt.memory.slots import slot_name
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import aligned, listed
from ftckpt.persist.paths import locate
from ftckpt.setting_checks import is_name
from ftckpt.smp.liveness import Liveness

_COLUMNS = ("ARENA", "SLOT", "STATE", "ITERATION", "LINEAGE", "BYTES", "GAP", "VERIFIED")
_MOST_NAMED = 8


def add_inspect(commands: Any) -> None:
    """Adds the command to the parser of ``ftckpt``."""
    parser = commands.add_parser("inspect", help="show the slots of arenas")
    text = "name of a job, or path of a directory of jobs, a job, a node, an arena or a slot file"
    parser.add_argument("what", metavar="JOB|PATH", help=text)
    add_arena(parser)
    parser.add_argument("--verify", action="store_true", help="read every byte and compare checksums")
    parser.set_defaults(run=run)


class Inspection:
    """Rows of the table, notes below it, and whether anything is corrupt."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, ...]] = []
        self.notes: list[str] = []
        self.corrupt = False

    def bad(self, note: str) -> None:
        """Adds a note about corruption."""
        self.corrupt = True
        self.notes.append(note)

    def print(self) -> None:
        """Writes the table and the notes to stdout."""
        print(aligned([_COLUMNS, *self.rows], len(_COLUMNS)))
        for note in self.notes:
            print(note)


def run(arguments: argparse.Namespace) -> int:
    """Prints the slots and returns the exit status, 1 if anything is corrupt. Raises ArenaError."""
    path = _path_of(arguments.what, arguments.arena)
    inspection = Inspection()
    if path.is_file() and (path.parent / CONTROL_NAME).exists():
        _inspect_arena(inspection, path.parent, _name_of(path.parent), path.name, arguments.verify)
    elif path.is_file():
        _inspect_file(inspection, path)
    else:
        jobs = [job_directory(path, job) for job in jobs_in(path)]
        arenas = [arena for under in jobs or [path] for arena in _arenas_under(under)]
        if not arenas:
            raise ArenaError(_no_arenas(path))
        for arena in arenas:
            _inspect_arena(inspection, arena, _name_of(arena, with_job=bool(jobs)), None, arguments.verify)
        for node_dir in sorted({arena.parent for arena in arenas}):
            _inspect_ranks(inspection, node_dir)
    inspection.print()
    return 1 if inspection.corrupt else 0


def _no_arenas(path: Path) -> str:
    # Imported late: torch takes seconds to load, and arenas do not need it.
    from ftckpt.universal.formats import description

    if there := description(Path(locate(str(path)).where)):
        return f"{path} {there}"
    return f"{path} has no arenas; name a job, or a directory of jobs, a job, a node or an arena"


def _path_of(what: str, root: Path) -> Path:
    """The job's directory, or else the path ``what``. Raises ArenaError if neither exists."""
    path = job_directory(root, what) if is_name(what) else Path(what)
    path = path if path.exists() else Path(what)
    if not path.exists():
        jobs = ", ".join(jobs_in(root)) or "none"
        raise ArenaError(f"{what}: neither a path nor a job with memory under {root}; jobs there: {jobs}")
    return path


def _arenas_under(path: Path) -> Iterable[Path]:
    """Arenas of an arena's, a node's or a job's directory; directories without arenas are skipped."""
    if _is_arena(path):
        return [path]
    children = list_directories(path)
    grand = [arenas for arenas in map(list_directories, children) if any(map(_is_arena, arenas))]
    return [*filter(_is_arena, children), *(arena for arenas in grand for arena in arenas)]


def _name_of(arena: Path, with_job: bool = False) -> str:
    return "/".join(arena.parts[-3 if with_job else -2 :])


def _is_arena(path: Path) -> bool:
    return (path / CONTROL_NAME).exists() or (path / slot_name(0)).exists()


def _inspect_arena(inspection: Inspection, path: Path, name: str, only: str | None, verify: bool) -> None:
    try:
        arena = Arena.open(path)
    except (CorruptError, MismatchError) as error:
        inspection.rows.append((name, "-", "UNREADABLE", *["-"] * 5))
        inspection.bad(f"{name}: {error}")
        return
    with closing(arena):
        for slot in range(arena.control.slots):
            if only in (None, slot_name(slot)):
                _inspect_slot(inspection, name, arena, slot, verify)
        control = arena.control
        inspection.notes.append(f"{name}: newest committed snapshot: {_name(control.whole())}")
        for what, snapshot in (("being protected", control.target()), ("protected", control.protected())):
            if snapshot is not None:
                inspection.notes.append(f"{name}: {what} on all nodes: {_name(snapshot)}")


def _inspect_ranks(inspection: Inspection, node_dir: Path) -> None:
    """Notes the position of each live rank of the node."""
    if not (node_dir / PULSE_NAME).exists():  # open() would create it
        return
    now_ns = time.monotonic_ns()
    for pulse in Liveness(node_dir).judge(Heartbeat.open(node_dir, None).ranks()):
        if pulse.lives is not False:
            inspection.notes.append(
                f"{node_dir.name}: rank {pulse.rank}, pid {pid_of(pulse.owner)}: {pulse.where}; last heartbeat "
                f"{max(0, now_ns - pulse.beat_ns) / 1e9:.1f} s ago"
            )


def _name(snapshot: SnapshotId | None) -> str:
    return "none" if snapshot is None else f"iteration {snapshot.iteration} of lineage {snapshot.lineage.hex()[:8]}"


def _inspect_slot(inspection: Inspection, name: str, arena: Arena, slot: int, verify: bool) -> None:
    record = arena.control.record(slot)
    bad = _problems(arena, slot, record, verify)
    state = "UNUSABLE" if arena.slot_error(slot) else "TORN" if record.torn else arena.state(slot).name
    if not arena.allocated(slot):
        state = "ABSENT"
    iteration, lineage = "-", "-"
    if record.snapshot is not None:
        iteration, lineage = str(record.snapshot.iteration), record.snapshot.lineage.hex()[:8]
    good = "unchecked" if arena.unchecked(slot) else "yes"
    verified = "-" if not (verify and record.sealed) else "BAD" if bad else good
    size, gap = str(arena.image.file_bytes), _gap(arena, slot, record)
    inspection.rows.append((name, str(slot), state, iteration, lineage, size, gap, verified))
    if bad:
        inspection.bad(f"{name} slot {slot}: bad: {listed(bad, _MOST_NAMED)}")


def _gap(arena: Arena, slot: int, record: SlotRecord) -> str:
    """Time from the seal to the checksums: corruption in that gap is not detected."""
    if not record.sealed:
        return "-"
    if record.hashed:  # checksums were there before the seal
        return "0s"
    return "open" if arena.unchecked(slot) else f"{arena.gap_secs(slot):.3f}s"


def _problems(arena: Arena, slot: int, record: SlotRecord, verify: bool) -> list[str]:
    if not arena.allocated(slot):
        return []
    error = arena.slot_error(slot)
    if error is not None:
        return [error]
    if record.torn:
        return ["record"]
    if not (verify and record.sealed):
        return []
    bad = arena.verify(slot).names
    now = arena.control.record(slot)
    # Bytes of a slot that a live rank has reused meanwhile are not corrupt.
    return [] if (now.state, now.sequence) != (record.state, record.sequence) and not now.torn else bad


def _inspect_file(inspection: Inspection, path: Path) -> None:
    try:
        mapping = open_mapping(path, None, writable=False)
        with closing(mapping):
            image = parse_image(mapping.data)
            if len(mapping.data) != image.file_bytes:
                raise CorruptError(f"{len(mapping.data)} bytes, expected {image.file_bytes}")
    except (CorruptError, MismatchError) as error:
        inspection.rows.append((path.name, "-", "UNREADABLE", *["-"] * 5))
        inspection.bad(f"{path}: {error}")
        return
    shard = image.manifest.shard
    inspection.rows.append((path.name, "-", "-", "-", "-", str(image.file_bytes), "-", "-"))
    inspection.notes.append(f"{path}: shard {shard}, {len(image.manifest.fragments)} fragments; no control block")
