"""The ``ftckpt`` command: look at arenas, delete those of a dead job, draw what was copied when, plan protection,
convert checkpoints.

Exit status: 0 good, 1 something inspected is corrupt, 2 the command could not be carried out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

from ftckpt.arena.control import SlotRecord
from ftckpt.arena.image import parse_image
from ftckpt.arena.mapping import open_mapping
from ftckpt.arena.segment import CONTROL_NAME, Arena, clean_job, list_arenas, slot_name
from ftckpt.cli_convert import add_convert
from ftckpt.cli_plan import add_plan
from ftckpt.cli_smp import add_smp
from ftckpt.config import Config
from ftckpt.errors import ArenaError, ConfigError, CorruptError, FtckptError, MismatchError
from ftckpt.timeline.read import read_recording
from ftckpt.timeline.table import notes_of, summary, text_table
from ftckpt.timeline.write import write_timeline

_COLUMNS = ("ARENA", "SLOT", "STATE", "ITERATION", "LINEAGE", "BYTES", "GAP", "VERIFIED")

Row = tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


class Report:
    """Rows of the table, remarks below it, and whether anything is corrupt."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.corrupt = False

    def bad(self, note: str) -> None:
        """Remember that something is corrupt."""
        self.corrupt = True
        self.notes.append(note)

    def print(self) -> None:
        """Write the table and the remarks to stdout."""
        table = [_COLUMNS, *self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(len(_COLUMNS))]
        for row in table:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        for note in self.notes:
            print(note)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit status."""
    parser = _Parser(prog="ftckpt", description="in-memory snapshots of training state")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for add in (_add_inspect, _add_clean, _add_timeline, add_plan, add_smp, add_convert):
        add(commands)
    try:
        arguments = parser.parse_args(argv)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except (FtckptError, OSError) as error:
        print(f"ftckpt: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="show what arenas hold")
    parser.add_argument("path", type=Path, help="directory of a job, a node or an arena, or a slot file")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare checksums")
    parser.set_defaults(run=_inspect)


def _add_clean(commands: Any) -> None:
    parser = commands.add_parser("clean", help="delete the arenas of a job that no longer runs, on this node")
    parser.add_argument("job", help="name of the job")
    parser.add_argument("--arena", type=Path, default=Path(Config().arena), help="tmpfs (default: %(default)s)")
    parser.set_defaults(run=_clean)


def _add_timeline(commands: Any) -> None:
    parser = commands.add_parser("timeline", help="draw one iteration and the copies in it, from event logs")
    parser.add_argument(
        "events", type=Path, metavar="RUN", help="directory with event logs (--ftckpt-events) at any depth"
    )
    parser.add_argument(
        "--iteration", type=int, help="of the snapshot; default: the newest that all ranks left a timeline of"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where the files go (default: RUN)")
    parser.set_defaults(run=_timeline)


def _timeline(arguments: argparse.Namespace) -> int:
    recording = read_recording(arguments.events, arguments.iteration)
    html, trace = write_timeline(recording, arguments.output or arguments.events)
    print(text_table(recording))
    print(f"iteration {recording.iteration + 1}, snapshot of {recording.iteration}: {summary(recording)}")
    for note in notes_of(recording):
        print(f"note: {note}")
    print(f"picture {html}")
    print(f"trace   {trace} (opens in https://ui.perfetto.dev)")
    return 0


def _clean(arguments: argparse.Namespace) -> int:
    removed = clean_job(arguments.arena, arguments.job)
    for path in removed:
        print(f"removed {path}")
    if not removed:
        print(f"no arenas of job {arguments.job!r} under {arguments.arena}")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    path: Path = arguments.path
    report = Report()
    if path.is_file() and (path.parent / CONTROL_NAME).exists():
        _inspect_arena(report, path.parent, path.name, arguments.verify)
    elif path.is_file():
        _inspect_file(report, path)
    else:
        arenas = list(_arenas_under(path))
        if not arenas:
            raise ArenaError(f"{path}: no arenas here; name a directory of a job, a node or an arena")
        for arena in arenas:
            _inspect_arena(report, arena, None, arguments.verify)
    report.print()
    return 1 if report.corrupt else 0


def _arenas_under(path: Path) -> Iterable[Path]:
    if _is_arena(path):
        return [path]
    return [arena for child in list_arenas(path) for arena in ([child] if _is_arena(child) else list_arenas(child))]


def _is_arena(path: Path) -> bool:
    return (path / CONTROL_NAME).exists() or (path / slot_name(0)).exists()


def _inspect_arena(report: Report, path: Path, only: str | None, verify: bool) -> None:
    name = f"{path.parent.name}/{path.name}"
    try:
        arena = Arena.open(path)
    except (CorruptError, MismatchError) as error:
        report.rows.append((name, "-", "UNREADABLE", *["-"] * 5))
        report.bad(f"{name}: {error}")
        return
    with closing(arena):
        for slot in range(arena.control.slots):
            if only in (None, slot_name(slot)):
                _inspect_slot(report, name, arena, slot, verify)
        control = arena.control
        report.notes.append(f"{name}: newest snapshot known to be whole on all ranks: {_told(control.whole())}")
        for what, snapshot in (("being protected", control.target()), ("protected", control.protected())):
            if snapshot is not None:
                report.notes.append(f"{name}: {what} on all nodes: {_told(snapshot)}")


def _told(snapshot: tuple[bytes, int] | None) -> str:
    return "none" if snapshot is None else f"iteration {snapshot[1]} of lineage {snapshot[0].hex()[:8]}"


def _inspect_slot(report: Report, name: str, arena: Arena, slot: int, verify: bool) -> None:
    record = arena.control.record(slot)
    bad = _problems(arena, slot, record, verify)
    state = "UNUSABLE" if arena.slot_error(slot) else "TORN" if record.torn else arena.state(slot).name
    if not arena.allocated(slot):
        state = "ABSENT"
    iteration, lineage = (str(record.iteration), record.lineage.hex()[:8]) if record.sealed else ("-", "-")
    good = "unchecked" if arena.unchecked(slot) else "yes"
    verified = "-" if not (verify and record.sealed) else "BAD" if bad else good
    size, gap = str(arena.image.file_bytes), _gap(arena, slot, record)
    report.rows.append((name, str(slot), state, iteration, lineage, size, gap, verified))
    if bad:
        more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
        report.bad(f"{name} slot {slot}: bad: {', '.join(bad[:8])}{more}")


def _gap(arena: Arena, slot: int, record: SlotRecord) -> str:
    """Time from the seal until there were checksums, before which bad memory goes unnoticed."""
    if not record.sealed:
        return "-"
    if record.hashed:  # taken before the seal
        return "0s"
    check = arena.check(slot)
    return "open" if check is None else f"{check.gap_secs:.3f}s"


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
    bad = arena.verify(slot)
    now = arena.control.record(slot)
    # A live trainer that took the slot back while it was read has corrupted nothing.
    return [] if (now.state, now.sequence) != (record.state, record.sequence) and not now.torn else bad


def _inspect_file(report: Report, path: Path) -> None:
    try:
        mapping = open_mapping(path, None, writable=False)
        with closing(mapping):
            image = parse_image(mapping.data)
            if len(mapping.data) != image.file_bytes:
                raise CorruptError(f"{len(mapping.data)} bytes, expected {image.file_bytes}")
    except (CorruptError, MismatchError) as error:
        report.rows.append((path.name, "-", "UNREADABLE", *["-"] * 5))
        report.bad(f"{path}: {error}")
        return
    shard = image.manifest.shard
    report.rows.append((path.name, "-", "-", "-", "-", str(image.file_bytes), "-", "-"))
    report.notes.append(f"{path}: shard {shard}, {len(image.manifest.fragments)} fragments; no control block")


if __name__ == "__main__":
    sys.exit(main())
