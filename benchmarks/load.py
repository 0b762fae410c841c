"""The time to load a state into a job that is ready: from memory, parity and storage, by ftckpt and by peers.

    python benchmarks/load.py --json FILE

The same job on both sides, its tensors allocated; a load ends when the bytes are in them. Peers save and convert
before. ``disk``: files out of the page cache, which is checked. Each side loads once in each process, and ftckpt
verifies every byte; free memory is touched before, see ``load_jobs``.

The exit code is 1 if a goal is missed, with a line for each.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import load_jobs
from benchmarks.common import conclude, environment, parser_of, print_table, scratch, turns, write_json
from benchmarks.load_jobs import FRAMEWORKS, Case, Place
from ftckpt.memory.directory import clean_job, end_smp, job_node_path, list_arenas
from tests.support.pool import run_ranks

LAYOUTS, SOURCES = ("same", "other"), ("memory", "parity", "disk")
TIMEOUT_SECS = 240.0
END_SECS = 20.0

Row = dict[str, Any]


class Sizes(NamedTuple):
    """Layers and width of the model; repeats."""

    layers: int
    hidden: int
    repeats: int


FULL = Sizes(4, 1024, 5)
QUICK = Sizes(4, 64, 1)


class Ground:
    """One framework's files: its saved state, and a new arena for each restart."""

    def __init__(self, tmpfs: Path, disk: Path, case: Case) -> None:
        self.case, self.framework = case, FRAMEWORKS[case.framework]
        self.tmpfs, self.disk = tmpfs / case.framework, disk / case.framework
        self.arena, self.kept, self.storage = self.tmpfs / "arena", self.tmpfs / "kept", self.disk / "storage"
        self.peer = {"tmpfs": Place(str(self.tmpfs / "peer")), "disk": Place(str(self.disk / "peer"), is_cold=True)}
        for folder in (self.arena, self.storage):
            folder.mkdir(parents=True)

    @property
    def node_dir(self) -> Path:
        """The directory of the arenas."""
        return job_node_path(self.arena, "load", "node")

    def leave(self) -> None:
        """Saves the state for all loads."""
        raw, made = self.disk / "raw", self.disk / "peer"
        settings = {"arena": str(self.arena), "protect": "node", "persist": str(self.storage), "persist_interval": 1}
        self._run(load_jobs.leave, self.case, settings, str(raw))
        self._run(load_jobs.convert, self.case, str(raw), str(made), ranks=1)
        shutil.rmtree(raw, ignore_errors=True)
        shutil.copytree(made, self.tmpfs / "peer")
        if not end_smp(self.node_dir, END_SECS):
            raise RuntimeError(f"the SMP of {self.node_dir} did not stop")
        self.arena.rename(self.kept)

    def restart(self, layout: str, source: str) -> Row:
        """A restart by ftckpt."""
        events = self.disk / "events"
        place = Place(str(self.storage), is_cold=True) if source == "disk" else Place("")
        settings = {"arena": str(self.arena), "protect": "none", "events": str(events)}
        if place.path:
            self.arena.mkdir()
            settings |= {"persist": str(self.storage), "persist_interval": 1 << 30}
        else:
            # No holes: in a job's arenas all slots have memory, and a restart would have to allocate it.
            subprocess.run(["cp", "-a", "--sparse=never", str(self.kept), str(self.arena)], check=True)
        if source == "parity":
            shutil.rmtree(list_arenas(self.node_dir)[0])
        try:
            case = self.case._replace(layout=layout)
            ranks = self._run(load_jobs.take, case, settings, place, layout=layout)
        finally:
            clean_job(self.arena, "load")
            shutil.rmtree(self.arena)
            shutil.rmtree(events, ignore_errors=True)
        row: Row = {"who": "ftckpt", "layout": layout, "source": source}
        row |= {name: max(rank[name] for rank in ranks) for name in ("secs", "whole_secs")}
        row |= {name: sum(rank[name] for rank in ranks) for name in ("cpu_secs", "read_bytes")}
        return {**row, "found": ranks[0]["source"]}

    def load(self, layout: str) -> list[Row]:
        """Loads by the peer."""
        case, rows = self.case._replace(layout=layout), []
        for source, place in self.peer.items():
            ranks = self._run(load_jobs.load, case, place, layout=layout)
            secs, cpu_secs = max(one[0] for one in ranks), sum(one[1] for one in ranks)
            row = {"who": self.framework.peer.name, "layout": layout, "source": source}
            rows.append({**row, "secs": secs, "whole_secs": secs, "cpu_secs": cpu_secs})
        return rows

    def rows(self, number: int) -> list[Row]:
        """One repeat: all sides, in another order than in the one before."""
        sides: list[Callable[[], list[Row]]] = [
            *(lambda at=(layout, source): [self.restart(*at)] for layout in LAYOUTS for source in SOURCES),
            *(lambda at=layout: self.load(at) for layout in LAYOUTS),
        ]
        rows = [row for side in turns(sides, number) for row in side()]
        return [{"framework": self.case.framework, "repeat": number, **row} for row in rows]

    def close(self) -> None:
        """Removes everything."""
        for arena in (self.arena, self.kept):
            if arena.exists():
                clean_job(arena, "load")
        for folder in (self.tmpfs, self.disk):
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, action: Any, *args: Any, layout: str = "same", ranks: int = 0) -> list[Any]:
        count = ranks or self.framework.ranks[layout]
        results = run_ranks(action, count, *args, timeout_secs=TIMEOUT_SECS, stand_in=self.framework.stand_in)
        return [result.value for result in results]


def medians(rows: Sequence[Row]) -> list[Row]:
    """One row for each framework, layout, who and source."""
    keys = ("framework", "layout", "who", "source")
    found = []
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        mine = [row for row in rows if tuple(row[name] for name in keys) == key]
        secs = {name: statistics.median(row[name] for row in mine) for name in ("secs", "whole_secs")}
        found.append({**dict(zip(keys, key, strict=True)), **secs})
    return found


def verdict(found: Sequence[Row]) -> list[str]:
    """A line per missed goal. For ftckpt the complete ``restore`` counts."""
    missed = []
    secs = {
        (one["framework"], one["layout"], "ftckpt" if one["who"] == "ftckpt" else "peer", one["source"]): one
        for one in found
    }
    for (framework, layout, who, source), one in secs.items():
        if who != "ftckpt":
            continue
        name = f"{framework}, {layout} layout, {source}"
        # From memory, against the peer at its best.
        peer = secs.get((framework, layout, "peer", source), secs[framework, layout, "peer", "tmpfs"])
        if source != "parity" and one["whole_secs"] > peer["whole_secs"]:
            missed.append(f"{name}: {one['whole_secs']:.2f} s, {peer['who']} {peer['whole_secs']:.2f} s")
    return missed


def show(found: Sequence[Row]) -> None:
    """The table."""

    def cells(one: Row) -> list[str]:
        return [f"{one['secs']:.2f}", f"{one['whole_secs']:.2f}" if one["who"] == "ftckpt" else ""]

    print_table(
        ["job", "layout", "by", "from", "load, s", "whole, s"],
        [[one["framework"], one["layout"], one["who"], one["source"], *cells(one)] for one in found],
    )


def measure(grounds: Sequence[Ground], repeats: int, keep: Callable[[Mapping[str, Any]], None]) -> None:
    """Measures one framework after the other. ``keep`` gets all rows after each repeat, which may take minutes."""
    rows: list[Row] = []
    stored = {}
    for ground in grounds:
        name = ground.case.framework
        try:
            ground.leave()
            peer = {ground.framework.peer.name: _bytes_of(ground.disk / "peer")}
            stored[name] = {"ftckpt": _bytes_of(ground.storage), **peer}
            for repeat in range(repeats):
                found = ground.rows(repeat)
                rows += found
                keep({"stored_bytes": stored, "rows": rows})
                texts = (f"{row['who']} {row['layout']} {row['source']} {row['whole_secs']:.2f} s" for row in found)
                line = f"repeat {repeat + 1} of {repeats}, {name}: {', '.join(texts)}"
                print(line, file=sys.stderr, flush=True)
        finally:
            ground.close()


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(argv: Sequence[str]) -> int:
    """Measures, prints the table and writes the file; returns the exit code."""
    parser = parser_of(__doc__, disk="for storage")
    parser.add_argument("--repeats", type=int, help=f"default: {FULL.repeats}")
    parser.add_argument("--only", choices=list(FRAMEWORKS), action="append", help="default: all")
    args = parser.parse_args(argv)
    sizes = QUICK if args.quick else FULL
    sizes = sizes._replace(repeats=args.repeats or sizes.repeats)
    about = environment(argv, "benchmarks/load.py")
    content: dict[str, Any] = {"benchmark": "load", "environment": about, "sizes": sizes._asdict()}

    def keep(raw: Mapping[str, Any]) -> None:
        content.update(raw, medians=medians(raw["rows"]))
        write_json(args.json, content)

    with scratch(Path("/dev/shm"), args.disk) as (tmpfs, disk):
        cases = [Case(name, sizes.layers, sizes.hidden) for name in args.only or FRAMEWORKS]
        measure([Ground(tmpfs, disk, case) for case in cases], sizes.repeats, keep)
    show(content["medians"])
    return conclude(args.json, content, verdict(content["medians"]), args.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
