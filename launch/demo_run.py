"""Runs a job of the demo: two torchrun agents, each a simulated node, watched until they end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftckpt.arena.directory import clean_job, job_node_path
from ftckpt.errors import ArenaError
from ftckpt.testing.faults import PLAN_VAR, Fault, dumps
from launch.demo_frameworks import ROOT, Framework, Settings
from launch.demo_node import Losing
from launch.demo_processes import STOP_SECS, DemoError, Processes, is_running
from launch.demo_scenes import WORLD_SIZE, NodeLoss, marks_of, occasions

ARENA = Path("/dev/shm")
NODES = ("node0", "node1")
RANKS_PER_NODE = WORLD_SIZE // len(NODES)

# An agent that is silent for six seconds is gone: the others wait that long before its replacement may join. Where
# fewer nodes are enough they go on without one after the last call, in which all agents must have come at first.
_RENDEZVOUS = "join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=6"
_LAST_CALL_SECS = 10
_POLL_SECS = 0.02


@dataclass(frozen=True)
class Run:
    """One training run: where it writes, more arguments of its script, ftckpt's settings, and what happens to it.

    It goes on with ``least_nodes`` where no more are left. ``digested``: it logs what all ranks together hold.
    """

    name: str
    folder: Path
    framework: Framework
    training: Sequence[str]
    ftckpt: Settings = field(default_factory=dict)
    faults: Sequence[Fault | NodeLoss] = ()
    least_nodes: int = len(NODES)
    digested: bool = False
    timeout_secs: float = 600.0
    stall_secs: float = 180.0

    @property
    def log(self) -> Path:
        """One line per iteration that was trained, those that were trained again included."""
        return self.folder / "log.jsonl"

    @property
    def events(self) -> Path:
        """ftckpt's event logs."""
        return self.folder / "events"

    @property
    def digests(self) -> Path:
        """What all ranks together hold, after each iteration and after a restart."""
        return self.folder / "digests.jsonl"

    @property
    def final(self) -> Path:
        """Hashes of each rank's final state."""
        return self.folder / "final"


@dataclass
class Watch:
    """What was seen while a run went on; ``gone``: when processes disappeared (epoch seconds)."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    gone: dict[int, float] = field(default_factory=dict)
    secs: float = 0.0


def execute(run: Run, job: str, tell: Callable[[str, dict[str, Any]], None]) -> Watch:
    """Run it to its end; ``tell`` gets each log line ("iteration"), event, and fault that fired ("fault").

    Whatever happens, afterwards no process of the run is left and no shared memory of ``job``.

    Raises:
        DemoError: an agent failed, a deadline passed, a fault did not fire, or something was left behind.
    """
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    plan = run.folder / "faults.json"
    plan.write_text(dumps(at for fault in run.faults if isinstance(fault, Fault) for at in occasions(fault)))
    try:
        with Processes() as processes:
            start = _starter(run, processes, plan)
            for node in NODES:
                start(node)
            losses = [fault for fault in run.faults if isinstance(fault, NodeLoss)]
            losing = [Losing(loss, job_node_path(ARENA, job, loss.node), processes, start) for loss in losses]
            watch = _watch(run, processes, tell, losing)
            missed = [fault.marker.name for fault in run.faults if marks_of(fault) is None]
            if missed:
                raise DemoError(f"{run.name}: no {', '.join(missed)}: faults that did not happen test nothing")
            if left := processes.left():
                raise DemoError(f"{run.name}: processes {left} are left")
        if (ARENA / f"ftckpt-{job}").exists():
            raise DemoError(f"{run.name}: {ARENA / f'ftckpt-{job}'} is left")
    finally:
        _clean(job)
    return watch


def _clean(job: str) -> None:
    """Delete what a failed run left. Threads of a killed process may hold its locks a moment longer than it lives."""
    deadline = time.monotonic() + STOP_SECS
    while True:
        try:
            clean_job(ARENA, job)
            return
        except ArenaError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECS)


def _starter(run: Run, processes: Processes, plan: Path) -> Callable[[str], None]:
    """What starts the agent of a node; the first node hosts the rendezvous and is never lost."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH", "PET_"))}
    clean.setdefault("FTCKPT_DEVICE", "cpu")
    clean |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    # Agents would keep the address of the first store when its node is lost: each attempt opens one of its own.
    clean |= {"PYTHONPATH": str(ROOT), PLAN_VAR: str(plan.resolve()), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    endpoint = f"127.0.0.1:{_free_port()}"
    outputs = ["--log-file", str(run.log.resolve()), "--dump-final", str(run.final.resolve())]
    if run.digested:
        outputs += ["--log-digest", str(run.digests.resolve())]
    settings = {**run.ftckpt, "events": str(run.events.resolve())} if run.ftckpt else {}
    module = run.framework.command(run.folder, [*run.training, *outputs], settings)
    last_call = 1 if run.least_nodes == len(NODES) else _LAST_CALL_SECS

    def start(node: str) -> None:
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", f"{run.least_nodes}:{len(NODES)}", "--nproc-per-node", str(RANKS_PER_NODE)),
            *("--local-addr", "127.0.0.1"),
            *("--rdzv-backend", "c10d", "--rdzv-id", "demo", "--rdzv-endpoint", endpoint),
            *("--rdzv-conf", f"{_RENDEZVOUS},last_call_timeout={last_call},is_host={int(node == NODES[0])}"),
            # The two dashes end torchrun's own options.
            *("--max-restarts", "9", "--monitor-interval", "0.1", "-m", "--"),
            *module,
        ]
        processes.start(node, command, clean, run.folder / f"{node}.log")

    return start


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _watch(
    run: Run, processes: Processes, tell: Callable[[str, dict[str, Any]], None], losing: Sequence[Losing]
) -> Watch:
    watch = Watch()
    begin = moved = time.monotonic()
    news = _News(run)
    while True:
        ended = all(agent.poll() is not None for agent in processes.agents)
        for kind, found in news.read():
            moved = time.monotonic()
            if kind == "iteration":
                watch.lines.append({**found, "seen": time.time()})
            elif kind == "event":
                watch.events.append(found)
            for loss in losing:
                loss.see(kind, found)
            tell(kind, found)
        for loss in losing:
            loss.poll()
        for pid in {event["pid"] for event in watch.events} - watch.gone.keys():
            if not is_running(pid):
                watch.gone[pid] = time.time()
        if any(agent.returncode for agent in processes.agents):
            raise DemoError(f"{run.name}: torchrun failed\n{_ends_of_logs(run)}")
        if ended:
            watch.secs = time.monotonic() - begin
            return watch
        now = time.monotonic()
        if now - begin > run.timeout_secs or now - moved > run.stall_secs:
            raise DemoError(f"{run.name}: no end after {now - begin:.0f} s\n{_ends_of_logs(run)}")
        time.sleep(_POLL_SECS)


class _News:
    """Reads what was appended to the run's files since the last time, and looks for new markers."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._offsets: dict[Path, int] = {}
        self._waiting = list(run.faults)

    def read(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for fault in list(self._waiting):
            if marks := marks_of(fault):
                self._waiting.remove(fault)
                yield "fault", {"fault": fault, **marks[0]}
        yield from (("iteration", line) for line in self._appended(self._run.log))
        for path in sorted(self._run.events.glob("rank*.jsonl")):
            yield from (("event", line) for line in self._appended(path))

    def _appended(self, path: Path) -> Iterator[dict[str, Any]]:
        offset = self._offsets.get(path, 0)
        if not path.exists() or path.stat().st_size == offset:
            return
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]  # a killed writer may leave half a line
        self._offsets[path] = offset + len(complete)
        for line in complete.splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


def _ends_of_logs(run: Run) -> str:
    logs = sorted(run.folder.glob("node*.log"))
    return "\n".join(f"--- {log.stem}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs)
