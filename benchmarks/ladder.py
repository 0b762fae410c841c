"""Each schedule of copies against ftckpt off, on a job whose compute and copies are timed waits.

``benchmarks.simulated`` describes the simulated parts.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from benchmarks.common import scratch, turns
from benchmarks.jobs import MegatronJob
from benchmarks.simulated import Listener, SlowCopies, TimedSteps, empty_layers
from ftckpt.schedule.iteration import IDLE, Iteration
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
        return self.tp * self.pp * self.dp

    @property
    def window_share(self) -> float:
        """Idle share of each stage in the model of its schedule, 1F1B or interleaved: sends take no time."""
        return (self.pp - 1) / (self.vpp * self.micro_batches + self.pp - 1)

    def argv(self) -> list[str]:
        """Flags of ``launch/train_gpt.py``. Untied output weights: tied ones are reduced in the tail."""
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "layers": self.layers, "hidden": self.hidden}
        batch = {"seq": 16, "micro-batch": 1, "global-batch": self.micro_batches * self.dp, "dropout": 0}
        return ["--untie", *(f"--{name}={value}" for name, value in {**sizes, **batch}.items())]


def window_share(iteration: Iteration) -> float:
    """The idle share of the time from the start of the schedule to the fence."""
    scheduled_secs = iteration.secs_of(frozenset({"window", "forward", "backward", "tail"}))
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


class Rung(NamedTuple):
    """A schedule of copies. ``capacity``: bytes that the windows can take / bytes of a snapshot; None: ftckpt off."""

    schedule: str
    capacity: float | None
    warm_up: int

    @property
    def name(self) -> str:
        return self.schedule if self.capacity is None else f"{self.schedule} {self.capacity:g}"


AMPLE, SCARCE = 1.2, 0.5
RUNGS = (
    Rung("off", None, 1),
    Rung("sync", AMPLE, 1),
    Rung("thread", AMPLE, 1),
    Rung("stream", AMPLE, 1),
    Rung("bubble", AMPLE, 5),
    Rung("bubble", SCARCE, 5),
)
"""``bubble`` warms up for longer: windows must have been measured in four iterations."""
MEASURED = 3
"""Counted iterations per repeat and rung."""


@dataclass
class Turn:
    """One repeat of one rung on one rank; ``copied`` has an event per counted iteration."""

    rung: str
    secs: list[float]
    nbytes: int = 0
    settled: bool = True
    blocked_secs: list[float] = field(default_factory=list)
    copied: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Report:
    """The turns of one rank. ``spans``: (idle with the start, forward, backward, window share) of iterations off."""

    turns: list[Turn] = field(default_factory=list)
    spans: list[tuple[float, float, float, float]] = field(default_factory=list)

    def idle_secs(self) -> float:
        """The median idle time of an iteration."""
        return statistics.median(idle for idle, _, _, _ in self.spans)


class Runner:
    """One rank's job, and all rungs on it in turn."""

    def __init__(self, layout: Layout, interference: float, folder: Path) -> None:
        self._job, self._layout, self._folder = MegatronJob(layout.argv()), layout, folder
        self._interference, self._copies, self._rank = interference, SlowCopies(), dist.get_rank()
        forward = layout.forward_ms / 1e3
        self._timers = self._job.job.config.timers = TimedSteps(forward, BACKWARD * forward, self._copies)
        empty_layers(self._job.job.model)
        self._job.train()
        self.report = Report()

    def run(self, rung: Rung, name: str) -> None:
        """One repeat of one rung. Collective."""
        dist.barrier()
        if rung.capacity is None:
            self._run_off(rung)
            return
        # Without a stream of their own copies are queued with training: compute waits for all of them.
        self._timers.interference = 1.0 if rung.schedule == "thread" else self._interference
        checkpointer = self._job.start(self._config(rung, name))
        nbytes = self._events(name, "plan")[-1]["copied_bytes"]
        self._copies.bytes_per_sec = rung.capacity * nbytes / self.report.idle_secs()
        turn = Turn(rung.name, self._iterate(checkpointer, rung), nbytes)
        checkpointer.close()
        self._add_events(turn, name)
        self.report.turns.append(turn)

    def _config(self, rung: Rung, name: str) -> Any:
        from ftckpt.config import Config

        (self._folder / "arena").mkdir(exist_ok=True)
        places = {
            "job": name,
            "node": "node",
            "arena": str(self._folder / "arena"),
            "events": str(self._folder / name),
        }
        costs = {"interval": 1, "overhead_budget": 0.0, "protect": "none", "replica_check_interval": 0}
        sizes = {"chunk_size": self._layout.chunk_size, "objects_size": "1MiB"}
        return Config(enabled=True, on_error="raise", schedule=rung.schedule, **places, **costs, **sizes)

    def _run_off(self, rung: Rung) -> None:
        import ftckpt.megatron
        from ftckpt.megatron import hooks

        listener = Listener()
        hooks.install()
        hooks.follow(listener, self._job.job.optimizer, None)  # type: ignore[arg-type]
        secs = self._iterate(listener, rung)
        ftckpt.megatron.remove()
        self.report.turns.append(Turn(rung.name, secs))
        for iteration in listener.iterations[rung.warm_up :]:
            kinds = (IDLE, frozenset({"forward"}), frozenset({"backward"}))
            idle, forward, backward = (iteration.secs_of(kind) for kind in kinds)
            self.report.spans.append((idle, forward, backward, window_share(iteration)))

    def _iterate(self, checkpointer: Any, rung: Rung) -> list[float]:
        """Trains; returns the seconds of the counted iterations, from boundary to boundary."""
        secs = []
        for _ in range(rung.warm_up + MEASURED):
            begin = time.perf_counter()
            checkpointer.step(self._job.iteration)
            self._job.train()
            secs.append(time.perf_counter() - begin)
            self._copies.clear()
        checkpointer.step(self._job.iteration)  # it reports the last iteration
        return secs[rung.warm_up :]

    def _events(self, name: str, kind: str) -> list[dict[str, Any]]:
        lines = (self._folder / name / f"rank{self._rank}.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def _add_events(self, turn: Turn, name: str) -> None:
        counted = range(self._job.iteration - MEASURED, self._job.iteration)
        copied = {event["iteration"]: event for event in self._events(name, "copied")}
        blocked = {event["iteration"]: event["blocked_secs"] for event in self._events(name, "snapshot")}
        turn.copied = [copied[iteration] for iteration in counted]
        turn.blocked_secs = [blocked[iteration] for iteration in counted]
        if turn.rung.startswith("bubble"):
            plans = [event for event in self._events(name, "planned") if event["time"] < turn.copied[0]["time"]]
            turn.settled = bool(plans)


def measure(rank: int, world_size: int, how: tuple[Layout, int, float], folder: Path) -> Report:
    """One rank's run. In each repeat ftckpt off comes first, and the other rungs start with another one: a machine
    that changes its speed in a repeat would otherwise favour the same rung each time."""
    layout, repeats, interference = how
    runner = Runner(layout, interference, folder)
    for repeat in range(repeats):
        for rung in (RUNGS[0], *turns(RUNGS[1:], repeat)):
            runner.run(rung, f"{rung.name.replace(' ', '-')}-{repeat}")
    return runner.report


def run_layout(layout: Layout, repeats: int, interference: float, arena: Path) -> list[Report]:
    """All rungs on one layout; the report of each rank."""
    with scratch(arena) as [folder]:
        how = layout, repeats, interference
        results = run_ranks(measure, layout.ranks, how, folder, timeout_secs=TIMEOUT_SECS)
    return [result.value for result in results]
