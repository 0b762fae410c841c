"""Each rung of the ladder of schedules against ftckpt off, on a job whose compute and copies are timed waits.

See ``benchmarks.simulated`` for what is real and what is not.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.common import attach, disk_bytes, read_events, scratch
from benchmarks.simulated import Listener, SlowCopies, TimedSteps, empty_layers
from ftckpt.schedule.iteration import IDLE, SCHEDULED, Iteration
from tests.support.pool import run_ranks

TIMEOUT_SECS = 600.0
BACKWARD = 2.0
"""A backward step takes this times as long as a forward step."""


@dataclass(frozen=True)
class Layout:
    """A job: ``forward_ms`` is the time of one forward step of one model chunk."""

    name: str
    tp: int
    pp: int
    dp: int
    vpp: int = 1
    micro_batches: int = 4
    layers: int = 4
    hidden: int = 192
    chunk_size: str = "64KiB"
    forward_ms: float = 25.0

    @property
    def ranks(self) -> int:
        """How many."""
        return self.tp * self.pp * self.dp

    @property
    def window_share(self) -> float:
        """Idle share of each stage in the model of its schedule, 1F1B or interleaved: sends take no time."""
        return (self.pp - 1) / (self.vpp * self.micro_batches + self.pp - 1)

    def argv(self) -> list[str]:
        """Flags of ``launch/train_gpt.py``. Own output weights: tied ones are reduced in the tail."""
        numbers = {
            "tp": self.tp, "pp": self.pp, "vpp": self.vpp, "layers": self.layers, "hidden": self.hidden, "seq": 16,
            "micro-batch": 1, "global-batch": self.micro_batches * self.dp, "dropout": 0,
        }  # fmt: skip
        return ["--untie", *(word for name, value in numbers.items() for word in (f"--{name}", str(value)))]


def window_share(iteration: Iteration) -> float:
    """Idle part of the time between the schedule's begin and the fence."""
    scheduled_secs = iteration.secs_of(SCHEDULED)
    return iteration.secs_of(frozenset({"window", "tail"})) / scheduled_secs if scheduled_secs else 0.0


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("tp2 pp2 dp2", tp=2, pp=2, dp=2, micro_batches=2, forward_ms=48.0),
        Layout("pp4 dp2", tp=1, pp=4, dp=2, forward_ms=24.0),
        Layout("pp4 vpp2", tp=1, pp=4, dp=1, vpp=2, layers=8, chunk_size="256KiB", forward_ms=20.0),
    )
}
QUICK_LAYOUT = Layout("pp2 dp2", tp=1, pp=2, dp=2, micro_batches=2, layers=2, hidden=128, forward_ms=25.0)


@dataclass(frozen=True)
class Rung:
    """One way to copy. ``capacity`` is what the windows can take over the bytes; None is ftckpt off."""

    schedule: str
    capacity: float | None
    warm_up: int

    @property
    def name(self) -> str:
        """In tables."""
        return self.schedule if self.capacity is None else f"{self.schedule} {self.capacity:g}"


# Windows that take a fifth more than all bytes, and half of them.
AMPLE, SCARCE = 1.2, 0.5
RUNGS = (
    Rung("off", None, 1),
    Rung("sync", AMPLE, 1),
    Rung("thread", AMPLE, 1),
    Rung("stream", AMPLE, 1),
    Rung("bubble", AMPLE, 5),
    Rung("bubble", SCARCE, 5),
)
"""Copies find their windows once these have been measured in four iterations: the warm-up of ``bubble``."""
MEASURED = 3
"""Iterations per repeat and rung that count."""


@dataclass
class Turn:
    """What one rank saw of one rung in one repeat; ``copied`` are events, one per iteration that counts."""

    rung: str
    secs: list[float]
    nbytes: int = 0
    host_bytes: int = 0
    settled: bool = True
    blocked_secs: list[float] = field(default_factory=list)
    copied: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Report:
    """What one rank saw; ``spans`` are (idle with the start, forward, backward, window share) of iterations off."""

    turns: list[Turn] = field(default_factory=list)
    spans: list[tuple[float, float, float, float]] = field(default_factory=list)

    def idle_secs(self) -> float:
        """What an iteration has, at the median."""
        return statistics.median(idle for idle, _, _, _ in self.spans)


class Runner:
    """One rank's job and all rungs on it, in turn."""

    def __init__(self, layout: Layout, interference: float, folder: Path) -> None:
        import train_gpt

        warnings.filterwarnings("ignore", module="megatron")
        self._step = train_gpt.train_step
        self._job = train_gpt.build(train_gpt.parse_args(layout.argv()))
        self._layout = layout
        self._folder = folder
        self._interference = interference
        self._copies = SlowCopies()
        forward = layout.forward_ms / 1e3
        self._timers = self._job.config.timers = TimedSteps(forward, BACKWARD * forward, self._copies)
        empty_layers(self._job.model)
        self._step(self._job)
        self.report = Report()

    def run(self, rung: Rung, name: str) -> None:
        """One repeat of one rung. Collective."""
        dist.barrier()
        if rung.capacity is None:
            self._run_off(rung)
            return
        # Without a stream of their own copies stand in training's queue: compute waits for all of them.
        self._timers.interference = 1.0 if rung.schedule == "thread" else self._interference
        checkpointer = attach(
            self._job, self._folder, name, schedule=rung.schedule, chunk_size=self._layout.chunk_size,
            overhead_budget=0.0, objects_size="1MiB",
        )  # fmt: skip
        rank = dist.get_rank()
        nbytes = read_events(self._folder, name, rank, "plan")[-1]["copied_bytes"]
        self._copies.bytes_per_sec = rung.capacity * nbytes / self.report.idle_secs()
        turn = Turn(rung.name, self._iterate(checkpointer, rung), nbytes)
        # Every rank's arena is there and filled when rank 0 counts; none is removed before it has.
        dist.barrier()
        turn.host_bytes = disk_bytes(self._folder / "arena") if rank == 0 else 0
        dist.barrier()
        checkpointer.close()
        self._note(turn, name, rank)
        self.report.turns.append(turn)

    def _run_off(self, rung: Rung) -> None:
        import ftckpt.megatron
        from ftckpt.megatron import hooks

        listener = Listener()
        hooks.install()
        hooks.follow(listener, self._job.optimizer, None)  # type: ignore[arg-type]
        secs = self._iterate(listener, rung)
        ftckpt.megatron.remove()
        self.report.turns.append(Turn(rung.name, secs))
        for iteration in listener.iterations[rung.warm_up :]:
            idle, forward, backward = (
                iteration.secs_of(kinds) for kinds in (IDLE, frozenset({"forward"}), frozenset({"backward"}))
            )
            self.report.spans.append((idle, forward, backward, window_share(iteration)))

    def _iterate(self, checkpointer: Any, rung: Rung) -> list[float]:
        """Train; returns the seconds of the iterations that count, boundary to boundary."""
        secs = []
        for _ in range(rung.warm_up + MEASURED):
            begin = time.perf_counter()
            checkpointer.step(self._job.iteration)
            self._step(self._job)
            secs.append(time.perf_counter() - begin)
            self._copies.clear()
        checkpointer.step(self._job.iteration)  # the last iteration is told of at its end
        return secs[rung.warm_up :]

    def _note(self, turn: Turn, name: str, rank: int) -> None:
        last = self._job.iteration
        events = read_events(self._folder, name, rank)
        copied = {e["iteration"]: e for e in events if e["event"] == "copied"}
        turn.copied = [copied[iteration] for iteration in range(last - MEASURED, last)]
        blocked = {e["iteration"]: e["blocked_secs"] for e in events if e["event"] == "snapshot"}
        turn.blocked_secs = [blocked[iteration] for iteration in range(last - MEASURED, last)]
        if turn.rung.startswith("bubble"):
            plans = [e for e in events if e["event"] == "planned" and e["time"] < turn.copied[0]["time"]]
            turn.settled = bool(plans) and plans[-1]["measured"]


def measure(rank: int, world_size: int, layout: Layout, args: argparse.Namespace, folder: Path) -> Report:
    """One rank's run. In each repeat ftckpt off comes first, and the other rungs begin with another one."""
    runner = Runner(layout, args.interference, folder)
    off, *others = RUNGS
    for repeat in range(args.repeats):
        # A machine that warms up or slows down in a repeat would otherwise favour the same rung each time.
        first = repeat % len(others)
        for rung in (off, *others[first:], *others[:first]):
            runner.run(rung, f"{rung.name.replace(' ', '-')}-{repeat}")
    return runner.report


def run_layout(layout: Layout, args: argparse.Namespace) -> list[Report]:
    """All rungs on one layout; returns what each rank saw."""
    with scratch(args.arena) as [folder]:
        results = run_ranks(measure, layout.ranks, layout, args, folder, timeout_secs=TIMEOUT_SECS)
    return [result.value for result in results]
