"""What it costs training to bring its state to storage, and how soon it is there: ftckpt beside its peers.

    python benchmarks/persist.py --json FILE

Two ranks train in plain torch and save now and then; beside them a data loader reads files from the same disk and
decodes them. Systems take turns, in another order in each repeat, each in processes of its own, on the same state.
The exit code is 1 where a goal is missed, with a line for each.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import persist_beside, persist_jobs
from benchmarks.common import conclude, environment, parser_of, print_table
from benchmarks.persist_systems import NO_CHECKPOINT, SYSTEMS, Writer
from ftckpt.store.directory import clean_job
from tests.support.pool import run_ranks

RANKS = 2
TIMEOUT_SECS = 240.0
MOST_BLOCKED = 0.01
"""Of what ``torch.save`` blocks."""
LEAST_RATE = 0.8
"""Of the rate of a plain write beside the same job."""
WARM_UP = 2
"""Iterations at the begin of each turn that do not count."""
UNCOUNTED = 1
"""Checkpoints of each turn that do not count: a first one allocates, starts processes, and plans."""


class Sizes(NamedTuple):
    """MiB of state per rank; seconds of an iteration on the device; iterations between checkpoints; how many of them
    count in a turn; repeats."""

    mib: int
    device_secs: float
    interval: int
    counted: int
    repeats: int


FULL = Sizes(192, 0.15, 12, 2, 3)
QUICK = Sizes(6, 0.01, 8, 1, 1)


class Place(NamedTuple):
    """Folders of this run: on the disk, and on a tmpfs for arenas."""

    disk: Path
    tmpfs: Path


def run_turn(name: str, sizes: Sizes, place: Place, writer: str) -> dict[str, Any]:
    """One start of the ranks: raw rows of the job and of the loader."""
    folder = place.disk / "turn"
    folder.mkdir()
    job = f"bench-{uuid.uuid4().hex[:8]}"
    loaded = place.disk / "loaded"  # no pipe: nobody empties it while ranks train
    command = [sys.executable, persist_beside.__file__, "load", str(place.disk / "data")]
    with loaded.open("w") as out:
        loader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out)
    more = {"name": job, "arena": str(place.tmpfs), "writer": writer}
    turn = persist_jobs.Turn(
        name, str(folder), sizes.mib, sizes.device_secs, sizes.interval, UNCOUNTED + sizes.counted, more
    )
    stand_in = bool(SYSTEMS[name][1].get("stand_in"))
    try:
        results = run_ranks(persist_jobs.train, RANKS, turn, timeout_secs=TIMEOUT_SECS, stand_in=stand_in)
    finally:
        loader.communicate()
        clean_job(place.tmpfs, job)
        shutil.rmtree(folder)
        os.sync()  # what this turn has left to write is no matter of the next one's
    loads = [tuple(map(float, line.split())) for line in loaded.read_text().splitlines()]
    return {"system": name, "ranks": [result.value for result in results], "loader": loads}


def checkpoints_of(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each checkpoint of a turn that counts has cost.

    ``calls_secs`` are all calls from its boundary until it is known to be durable, of the rank that they block
    most; ``blocked_secs`` are its own boundary and fence, and what the others take beyond the same calls while
    nothing is on its way: a snapshot in memory each iteration is not the price of storage. ``lost_secs``:
    ``blocked_secs``, and by how much iterations are longer.
    """
    ranks, rows = turn["ranks"], turn["ranks"][0]["rows"]
    boundaries = {row[0]: row[2] for row in rows}
    windows = [(boundaries[asked], durable) for asked, durable in ranks[0]["checkpoints"]]
    # ftckpt chooses for itself, where one has taken longer than an interval: nobody has asked for that one.
    committed = {one["iteration"]: one["time"] for one in ranks[0]["notes"].get("committed", ())}
    busy = windows + [(boundaries[iteration], at) for iteration, at in committed.items() if iteration in boundaries]
    quiet = [index for index, row in enumerate(rows) if row[0] > WARM_UP and not _beside(row, busy)]
    quiet_secs = statistics.median(_secs(rows[index]) for index in quiet)
    quiet_loads = [secs for at, secs in turn["loader"] if rows[WARM_UP][1] < at and not _within(at, busy)]
    found = []
    for (asked, _), (begin, durable) in list(zip(ranks[0]["checkpoints"], windows, strict=True))[UNCOUNTED:]:
        first = next(index for index, row in enumerate(rows) if row[0] == asked)
        # The iteration behind it is the first whose boundary can tell that it is durable.
        last = next((index for index, row in enumerate(rows) if row[2] >= durable), len(rows) - 1) + 1
        blocked, calls = [], []
        for rank in ranks:
            span = rank["rows"][first : last + 1]
            usual = statistics.median(_calls(rank["rows"][index]) for index in quiet)
            calls.append(span[0][4] + sum(map(_calls, span[1:])))
            # Its own are one boundary and one fence: as many calls as an iteration has.
            blocked.append(calls[-1] - usual * (len(span) - 2))
        beside = [_secs(row) for row in rows if _beside(row, [(begin, durable)])]
        found.append({
            "asked": asked, "blocked_secs": max(blocked), "calls_secs": max(calls), "durable_secs": durable - begin,
            "iterations_beside": len(beside), "slower": _ratio(beside, [quiet_secs]),
            "loader_slower": _ratio([secs for at, secs in turn["loader"] if begin <= at <= durable], quiet_loads),
            "lost_secs": max(blocked) + sum(secs - quiet_secs for secs in beside),
        })  # fmt: skip
    return found


def _calls(row: Sequence[float]) -> float:
    """What a system blocked at the fence and the boundary of an iteration."""
    return row[3] + row[4]


def _secs(row: Sequence[float]) -> float:
    """Of an iteration, without what the system blocked."""
    return row[2] - row[1] - row[3]


def _within(at: float, windows: Iterable[tuple[float, float]]) -> bool:
    return any(begin <= at <= end for begin, end in windows)


def _beside(row: Sequence[float], windows: Iterable[tuple[float, float]]) -> bool:
    """Whether half of an iteration or more lies in one of the windows."""
    return _within((row[1] + row[2]) / 2, windows)


def _ratio(some: Iterable[float], others: Iterable[float]) -> float | None:
    """Of medians; None where there are none of the first."""
    values = list(some)
    return statistics.median(values) / statistics.median(others) if values else None


def write_rates(turns: Iterable[Mapping[str, Any]], alone: Sequence[float], nbytes: int) -> dict[str, float]:
    """Median bytes a second: of the flush, and of plain writes beside the same job and alone."""
    rates: dict[str, list[float]] = {"plain, alone": [nbytes / secs for secs in alone]}
    for turn in turns:
        notes = turn["ranks"][0]["notes"]
        if turn["system"] == "ftckpt":
            rates.setdefault("flush", []).extend(one["bytes"] / one["secs"] for one in notes["flushed"][UNCOUNTED:])
        elif turn["system"] == "plain write":
            rates.setdefault("plain, beside", []).extend(nbytes / secs for secs in notes["write_secs"][UNCOUNTED:])
    return {name: statistics.median(values) for name, values in rates.items()}


def summary_of(turns: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By system, medians over its checkpoints."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(turn["system"] for turn in turns):
        mine = [turn for turn in turns if turn["system"] == name]
        iterations = [_secs(row) for turn in mine for row in turn["ranks"][0]["rows"][WARM_UP:]]
        checkpoints = [one for turn in mine for one in checkpoints_of(turn)]
        found[name] = {"checkpoints": len(checkpoints), "iteration_secs": statistics.median(iterations)}
        for key in ("blocked_secs", "calls_secs", "durable_secs", "slower", "loader_slower", "lost_secs"):
            values = [one[key] for one in checkpoints if one[key] is not None]
            found[name][key] = statistics.median(values) if values else None
    return found


def verdict(systems: Mapping[str, Mapping[str, Any]], rates: Mapping[str, float]) -> list[str]:
    """Which goals are missed, and by how much."""
    missed = []
    ours = systems["ftckpt"]["blocked_secs"]
    share = ours / systems["torch.save"]["blocked_secs"]
    if share >= MOST_BLOCKED:
        missed.append(f"blocked: {share:.2%} of what torch.save blocks; the goal is below {MOST_BLOCKED:.0%}")
    for name, one in systems.items():
        if name not in ("ftckpt", *NO_CHECKPOINT) and ours >= one["blocked_secs"]:
            missed.append(f"blocked: {ours * 1e3:.1f} ms, {name} {one['blocked_secs'] * 1e3:.1f} ms")
    rate = rates["flush"] / rates["plain, beside"]
    if rate < LEAST_RATE:
        missed.append(f"write rate: {rate:.0%} of a plain write beside the same job; the goal is {LEAST_RATE:.0%}")
    return missed


def show(systems: Mapping[str, Mapping[str, Any]], rates: Mapping[str, float]) -> None:
    """The tables."""

    def cell(value: float | None, scale: float, form: str) -> str:
        return "–" if value is None else form.format(value * scale)

    def excess(value: float | None) -> str:
        return "–" if value is None else f"{value - 1:+.0%}"

    print_table(
        ["", "blocked, ms", "all calls, ms", "durable, s", "iterations beside", "loader beside", "lost, ms"],
        [
            [
                name, cell(one["blocked_secs"], 1e3, "{:.1f}"), cell(one["calls_secs"], 1e3, "{:.1f}"),
                cell(one["durable_secs"], 1, "{:.2f}"), excess(one["slower"]), excess(one["loader_slower"]),
                cell(one["lost_secs"], 1e3, "{:.0f}"),
            ]
            for name, one in systems.items()
        ],
    )  # fmt: skip
    print_table(["write", "GB/s"], [[name, f"{rate / 1e9:.2f}"] for name, rate in rates.items()])


def deepspeed_writer() -> str:
    """Its fast one where libaio is, otherwise the one in Python: it has no third."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return "fast" if AsyncIOBuilder().is_compatible() else "python"


def measure(place: Place, sizes: Sizes, names: Sequence[str]) -> dict[str, Any]:
    """All turns, interleaved; the raw rows."""
    persist_beside.make_files(place.disk / "data")
    writer, alone, turns = deepspeed_writer(), [], []
    plain = Writer(0)
    for repeat in range(sizes.repeats):
        shift = repeat * len(names) // sizes.repeats
        for name in [*names[shift:], *names[:shift]]:
            turn = run_turn(name, sizes, place, writer)
            turns.append({"repeat": repeat, **turn})
            if not plain.nbytes:
                plain.close()
                plain = Writer(sum(rank["nbytes"] for rank in turn["ranks"]))
            costs = ", ".join(
                f"blocked {one['blocked_secs'] * 1e3:.1f} ms, durable after {one['durable_secs']:.2f} s"
                for one in checkpoints_of(turn)
            )
            print(f"repeat {repeat + 1} of {sizes.repeats}, {name}: {costs}", file=sys.stderr, flush=True)
        for number in itertools.count():
            plain.begin(place.disk / "plain")
            secs, _ = plain.end()
            (place.disk / "plain").unlink()
            os.sync()
            if number == sizes.counted:
                break
            alone.append(secs)
    plain.close()
    return {"deepspeed_writer": writer, "nbytes": plain.nbytes, "plain_alone_secs": alone, "turns": turns}


def main(argv: Sequence[str]) -> int:
    """Run, print the tables, write the file; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="sizes that take seconds and say nothing; no goal counts"
    )
    parser.add_argument("--mib", type=int, help=f"of state per rank; default: {FULL.mib}")
    parser.add_argument("--repeats", type=int, help=f"default: {FULL.repeats}")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="where checkpoints go: on no tmpfs")
    parser.add_argument("--only", choices=list(SYSTEMS), action="append", help="default: all; then no goal counts")
    args = parser.parse_args(argv)
    about = environment(argv, "benchmarks/persist.py")
    sizes = QUICK if args.quick else FULL
    sizes = sizes._replace(mib=args.mib or sizes.mib, repeats=args.repeats or sizes.repeats)
    name = f"ftckpt-persist-{uuid.uuid4().hex[:8]}"
    place = Place(Path(tempfile.mkdtemp(prefix=name, dir=args.disk)), Path("/dev/shm") / name)
    place.tmpfs.mkdir()
    try:
        raw = measure(place, sizes, args.only or list(SYSTEMS))
    finally:
        for folder in place:
            shutil.rmtree(folder, ignore_errors=True)
    systems = summary_of(raw["turns"])
    rates = write_rates(raw["turns"], raw["plain_alone_secs"], raw["nbytes"])
    show(systems, rates)
    content = {
        "benchmark": "persist", "environment": about, "sizes": sizes._asdict(), "ranks": RANKS,
        "state_bytes": raw["nbytes"], "deepspeed_writer": raw["deepspeed_writer"], "systems": systems,
        "write_bytes_per_sec": rates, "raw": raw,
    }  # fmt: skip
    return conclude(args.json, content, [] if args.only else verdict(systems, rates), args.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
