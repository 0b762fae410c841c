"""How fast a state comes back in another layout: from memory, or by the checkpoints of Megatron and of DeepSpeed.

The same model in every case, four ranks, imports done before. ftckpt: the snapshot lies in memory (what training
waited for it is in the table), the restart finds it, checks every byte, and moves it. Megatron:
``dist_checkpointing`` saves, another layout loads. DeepSpeed: ``save_checkpoint``, ``ds_to_universal``, another
layout loads. Each peer on a tmpfs and on the disk of ``--disk`` (no fsync is asked for, so that the page cache helps
them), each once before that does not count: what Python loads and compiles at a first time is no cost of theirs.

A time is ``fixed + per byte × bytes``, by two sizes of the model. ``ratio_vs_*`` compare the parts per byte of a
peer's load alone with those of ftckpt, ``whole_ratio_vs_*`` with those of its whole ``restore()``.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import reshape_jobs as jobs
from benchmarks.common import environment, print_table, write_json
from tests.support.pool import run_ranks

RANKS = 4
SIZES = {"small": ("--layers", "4", "--hidden", "512"), "large": ("--layers", "16", "--hidden", "1024")}
COMMON = ("--heads", "8", "--seq", "32")
MEGATRON = ("--micro-batch", "2", "--global-batch", "8")
SOURCE, TARGET = ("--tp", "2"), ("--pp", "2")
DEEPSPEED_SOURCE, DEEPSPEED_TARGET = ("--pp", "2"), ("--pp", "4")
TIMEOUT_SECS = 600.0
GIB = 1 << 30


@dataclass
class Times:
    """Seconds of each repeat, by part; ``total`` is what counts against the others."""

    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **secs: float) -> None:
        """One repeat."""
        for name, value in {**secs, "total": sum(secs.values())}.items():
            self.parts.setdefault(name, []).append(value)

    def median(self, part: str = "total") -> float:
        """Over the repeats."""
        return statistics.median(self.parts[part])


@dataclass
class Place:
    """Where this run keeps its files."""

    tmpfs: Path
    disk: Path

    def folders(self, name: str) -> list[str]:
        """Empty ones on the tmpfs, for what does not count, then on the tmpfs and on the disk."""
        first, *counted = (self.tmpfs / f"{name}-first", self.tmpfs / name, self.disk / name)
        return [str(jobs.clear(path)) for path in (first, *counted)]

    def clear(self) -> None:
        """Make room for the next one."""
        for root in (self.tmpfs, self.disk):
            jobs.clear(root)


def latest(results: Sequence[Any]) -> list[float]:
    """By measurement that counts, the seconds of the rank that took longest."""
    return [max(values) for values in zip(*(result.value for result in results), strict=True)][1:]


def measure_ftckpt(place: Place, size: Sequence[str], times: dict[str, Times]) -> dict[str, Any]:
    """One repeat; returns what was read and what was needed."""
    arena, events = jobs.clear(place.tmpfs / "arena"), jobs.clear(place.disk / "events")
    argv = [*size, *COMMON, *MEGATRON]
    left = run_ranks(jobs.leave_snapshot, RANKS, [*argv, *SOURCE], str(arena), timeout_secs=TIMEOUT_SECS)
    taken = run_ranks(jobs.take_snapshot, RANKS, [*argv, *TARGET], str(arena), str(events), timeout_secs=TIMEOUT_SECS)
    results = [result.value for result in taken]
    times.setdefault("ftckpt, memory", Times()).add(reshape=max(one["reshape_secs"] for one in results))
    whole = times.setdefault("ftckpt, whole restore()", Times())
    whole.add(restore=max(one["restore_secs"] for one in results))
    times.setdefault("ftckpt, training waited", Times()).add(snapshot=max(result.value for result in left))
    needed = dict(pair for one in results for pair in one["needed"])
    return {"read_bytes": sum(one["read_bytes"] for one in results), "needed_bytes": sum(needed.values())}


def measure_megatron(place: Place, size: Sequence[str], times: dict[str, Times]) -> None:
    """One repeat, on both file systems."""
    argv, paths = [*size, *COMMON, *MEGATRON], place.folders("megatron")
    saved = latest(run_ranks(jobs.save_megatron, RANKS, [*argv, *SOURCE], paths, timeout_secs=TIMEOUT_SECS))
    loaded = latest(run_ranks(jobs.load_megatron, RANKS, [*argv, *TARGET], paths, timeout_secs=TIMEOUT_SECS))
    for where, save, load in zip(("tmpfs", "disk"), saved, loaded, strict=True):
        times.setdefault(f"Megatron, {where}", Times()).add(save=save, load=load)


def measure_deepspeed(place: Place, size: Sequence[str], times: dict[str, Times]) -> None:
    """One repeat, on both file systems."""
    argv, paths, made = [*size, *COMMON], place.folders("deepspeed"), place.folders("deepspeed-universal")
    options: dict[str, Any] = {"stand_in": False, "timeout_secs": TIMEOUT_SECS}
    saved = latest(run_ranks(jobs.save_deepspeed, RANKS, [*argv, *DEEPSPEED_SOURCE], paths, **options))
    converted = latest(run_ranks(jobs.convert_deepspeed, 1, paths, made, **options))
    loaded = latest(run_ranks(jobs.load_deepspeed, RANKS, [*argv, *DEEPSPEED_TARGET], made, **options))
    for where, save, convert, load in zip(("tmpfs", "disk"), saved, converted, loaded, strict=True):
        times.setdefault(f"DeepSpeed, {where}", Times()).add(save=save, convert=convert, load=load)


def measure(place: Place, sizes: dict[str, Sequence[str]], repeats: int, peers: bool) -> dict[str, Any]:
    """All of them, interleaved: by size the times, and the bytes of the state."""
    results: dict[str, Any] = {name: {"times": {}} for name in sizes}
    for repeat in range(repeats):
        for name, size in sizes.items():
            times = results[name]["times"]
            results[name]["bytes"] = measure_ftckpt(place, size, times)
            place.clear()
            for measure_peer in (measure_megatron, measure_deepspeed) if peers else ():
                measure_peer(place, size, times)
                place.clear()
            line = ", ".join(f"{who} {one.parts['total'][-1]:.2f} s" for who, one in times.items())
            print(f"repeat {repeat + 1} of {repeats}, {name}: {line}", file=sys.stderr, flush=True)
    return results


def split(results: dict[str, Any], who: str, part: str = "total") -> tuple[float, float]:
    """Seconds that do not depend on the size, and seconds per GiB of state."""
    (small, large) = (results[name] for name in SIZES)
    sizes = [one["bytes"]["needed_bytes"] / GIB for one in (small, large)]
    secs = [one["times"][who].median(part) for one in (small, large)]
    slope = (secs[1] - secs[0]) / (sizes[1] - sizes[0])
    return secs[0] - slope * sizes[0], slope


def report(results: dict[str, Any]) -> dict[str, Any]:
    """The table, and what goes into the file."""
    large = results["large"]
    splits = {who: split(results, who) for who in large["times"]}
    rows = []
    for who, (fixed, slope) in splits.items():
        times = large["times"][who]
        parts = ", ".join(f"{name} {times.median(name):.2f}" for name in times.parts if name != "total")
        rows.append([who, f"{times.median():.2f} s", f"{fixed:.2f} s", f"{slope:.2f} s/GiB", parts])
    gib = large["bytes"]["needed_bytes"] / GIB
    print_table(["", f"{gib:.2f} GiB", "fixed", "per byte", "parts"], rows)
    ratios = {
        f"{kind}ratio_vs_{name}{end}": split(results, f"{who}, {where}", "load")[1] / splits[ours][1]
        for kind, ours in (("", "ftckpt, memory"), ("whole_", "ftckpt, whole restore()"))
        for name, who in (("megatron_dist", "Megatron"), ("ds_universal", "DeepSpeed"))
        for end, where in (("", "tmpfs"), ("_disk", "disk"))
        if f"{who}, {where}" in splits
    }
    return {
        "state_gib": gib,
        "medians_secs": {
            name: {who: {part: one.median(part) for part in one.parts} for who, one in size["times"].items()}
            for name, size in results.items()
        },
        "fixed_secs": {who: fixed for who, (fixed, _) in splits.items()},
        "secs_per_gib": {who: slope for who, (_, slope) in splits.items()},
        **ratios,
        "bytes_read_over_bytes_needed": large["bytes"]["read_bytes"] / large["bytes"]["needed_bytes"],
    }


def main(argv: Sequence[str]) -> int:
    """Run, print the table, write the file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a folder that is on no tmpfs")
    parser.add_argument("--alone", action="store_true", help="without the peers, which need most of the memory")
    parser.add_argument("--tiny", action="store_true", help="sizes that take seconds and say nothing")
    args = parser.parse_args(argv)
    about = environment(argv, "benchmarks/reshape.py")
    sizes = dict(SIZES)
    if args.tiny:
        sizes = {"small": ("--layers", "4", "--hidden", "64"), "large": ("--layers", "4", "--hidden", "128")}
    name = f"ftckpt-reshape-{uuid.uuid4().hex[:8]}"
    place = Place(Path("/dev/shm") / name, Path(tempfile.mkdtemp(prefix=name, dir=args.disk)))
    try:
        result = report(measure(place, sizes, args.repeats, not args.alone))
    finally:
        for root in (place.tmpfs, place.disk):
            shutil.rmtree(root, ignore_errors=True)
    for name, value in result.items():
        if "ratio_vs" in name or name == "bytes_read_over_bytes_needed":
            print(f"{name} {value:.2f}")
    if args.json:
        write_json(args.json, {**about, **result})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
