"""What following the schedule and recording events costs the training thread, per iteration.

Drives the very code that training drives, without training: the timers of Megatron's schedule around each compute
step, the plan, a snapshot of many chunks, the event log on a tmpfs or disk. The iteration that it is compared with is
the shortest imaginable on a large model: 10 ms for a forward and 20 ms for a backward step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import environment, median_ms, print_table, write_json
from ftckpt.capture.copier import Flight
from ftckpt.config import Config
from ftckpt.events import Events
from ftckpt.windows.clock import HostClock
from ftckpt.windows.pacer import Pacer

STEP_SECS = 0.030
"""A forward and a backward step of one micro-batch."""
CHUNKS, CHUNK_BYTES = 750, 16 << 20
"""12 GB per rank."""
ITERATIONS = 200


def flight_of(base: float) -> Flight:
    """A snapshot all of whose chunks have landed."""
    flight = Flight([], None, lambda chunk: None, lambda: None, base)  # type: ignore[arg-type]
    flight.timed = [(i * 1e-5, (i + 1) * 1e-5, CHUNK_BYTES) for i in range(CHUNKS)]
    flight.end()
    return flight


def iteration_secs(pacer: Pacer, events: Events, micro_batches: int, number: int) -> float:
    """Seconds that the training thread spends in ftckpt's following and recording in one iteration."""
    begin = time.perf_counter()
    pacer.boundary()
    pacer.learn()
    base = pacer.begin(CHUNKS * CHUNK_BYTES, CHUNK_BYTES)
    pacer.follow(flight_of(base), number)
    events.emit("snapshot", iteration=number, slot=0, blocked_secs=0.0)
    pacer.enter("window")
    for kind in ("forward", "backward"):
        for _ in range(micro_batches):
            pacer.enter(kind)
            pacer.enter("window")
    for kind in ("tail", "fence", "optimizer"):
        pacer.enter(kind)
    events.emit("fence", blocked_secs=0.0)
    return time.perf_counter() - begin


def measure(micro_batches: int, folder: Path | None) -> list[float]:
    """Seconds of each iteration; events go to ``folder``."""
    events = Events(folder, 0)
    pacer = Pacer(Config(), HostClock(), events, {"tp": 0, "pp": 0, "dp": 0})
    secs = [iteration_secs(pacer, events, micro_batches, number) for number in range(1, ITERATIONS + 1)]
    events.close()
    return secs


def case_of(micro_batches: int, folder: Path) -> dict[str, Any]:
    """With and without an event log."""
    off, on = measure(micro_batches, None), measure(micro_batches, folder / str(micro_batches))
    log_bytes = (folder / str(micro_batches) / "rank0.jsonl").stat().st_size
    whole = micro_batches * STEP_SECS
    return {
        "micro_batches": micro_batches,
        "iteration_secs": whole,
        "followed_ms_median": median_ms(off),
        "recorded_ms_median": median_ms(on),
        "recorded_ms_mean": sum(on) / len(on) * 1e3,
        "recording_share": (sum(on) - sum(off)) / len(on) / whole,
        "share": sum(on) / len(on) / whole,
        "log_bytes_per_iteration": log_bytes / ITERATIONS,
        "log_mib_per_day": log_bytes / ITERATIONS * 86400 / whole / (1 << 20),
    }


def main(argv: Sequence[str]) -> int:
    """Exit status 1 where recording costs 0.1 % of an iteration or more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        cases = [case_of(micro_batches, Path(folder)) for micro_batches in (8, 32, 128, 512)]
    heads = [
        "micro-batches",
        "iteration s",
        "following ms",
        "with events ms",
        "mean ms",
        "events %",
        "all %",
        "log B",
        "log MiB/day",
    ]
    print_table(
        heads,
        [
            [
                str(c["micro_batches"]), f"{c['iteration_secs']:.2f}", f"{c['followed_ms_median']:.3f}",
                f"{c['recorded_ms_median']:.3f}", f"{c['recorded_ms_mean']:.3f}", f"{c['recording_share']:.4%}",
                f"{c['share']:.4%}", f"{c['log_bytes_per_iteration']:.0f}", f"{c['log_mib_per_day']:.1f}",
            ]
            for c in cases
        ],
    )  # fmt: skip
    write_json(
        args.json, {"benchmark": "events", "environment": environment(argv, "benchmarks/events.py"), "cases": cases}
    )
    return int(any(c["recording_share"] >= 1e-3 for c in cases))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
