"""Runs a job of the demo: two torchrun agents, each a simulated node, watched until they end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ftckpt.arena.directory import clean_job
from ftckpt.testing.faults import PLAN_VAR, Fault, dumps
from launch.demo_frameworks import ROOT, Framework, Settings

ARENA = Path("/dev/shm")
NODES = ("node0", "node1")
RANKS_PER_NODE = 4
WORLD_SIZE = len(NODES) * RANKS_PER_NODE

_TOKEN_VAR = "FTCKPT_DEMO_TOKEN"
_POLL_SECS = 0.02
_STOP_SECS = 20.0


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


@dataclass(frozen=True)
class Run:
    """One training run: where it writes, more arguments of its script, ftckpt's settings, and what happens to it."""

    name: str
    folder: Path
    framework: Framework
    training: Sequence[str]
    ftckpt: Settings = field(default_factory=dict)
    faults: Sequence[Fault] = ()
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


class Processes:
    """The processes of one run, and nobody else's: they carry a random token in their environment."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], env: dict[str, str], output: Path) -> None:
        """Start an agent in a session of its own, so that Ctrl-C reaches the demo alone."""
        with open(output, "wb") as out:
            agent = subprocess.Popen(
                command, env={**env, _TOKEN_VAR: self._token}, cwd=ROOT, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        self.agents.append(agent)

    def left(self) -> list[int]:
        """Process ids of agents, workers and their children that still run."""
        wanted = f"{_TOKEN_VAR}={self._token}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0") and is_running(int(entry.name)):
                    found.append(int(entry.name))
        return found

    def stop(self) -> None:
        """Kill what is left: agents first, so that they start nothing anew."""
        for agent in self.agents:
            agent.kill()
        deadline = time.monotonic() + _STOP_SECS
        while (pids := self.left()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_SECS)
        for agent in self.agents:
            agent.wait(_STOP_SECS)

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def execute(run: Run, job: str, tell: Callable[[str, dict[str, Any]], None]) -> Watch:
    """Run it to its end; ``tell`` gets each log line ("iteration"), event, and fault that fired ("fault").

    Whatever happens, afterwards no process of the run is left and no shared memory of ``job``.

    Raises:
        DemoError: an agent failed, a deadline passed, a fault did not fire, or something was left behind.
    """
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    plan = run.folder / "faults.json"
    plan.write_text(dumps(run.faults))
    try:
        with Processes() as processes:
            _start(run, processes, plan)
            watch = _watch(run, processes, tell)
            missed = [fault.point for fault in run.faults if not all(fault.fired(r) for r in victims(fault))]
            if missed:
                raise DemoError(f"{run.name}: faults at {', '.join(missed)} did not fire: nothing was tested")
            if left := processes.left():
                raise DemoError(f"{run.name}: processes {left} are left")
        if (ARENA / f"ftckpt-{job}").exists():
            raise DemoError(f"{run.name}: {ARENA / f'ftckpt-{job}'} is left")
    finally:
        clean_job(ARENA, job)
    return watch


def victims(fault: Fault) -> list[int]:
    """The ranks that a fault kills."""
    return list(range(WORLD_SIZE)) if fault.rank == "all" else [fault.rank]


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _start(run: Run, processes: Processes, plan: Path) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH", "PET_"))}
    clean.setdefault("FTCKPT_DEVICE", "cpu")
    clean |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    clean |= {"PYTHONPATH": str(ROOT), PLAN_VAR: str(plan.resolve())}
    endpoint = f"127.0.0.1:{_free_port()}"
    outputs = ("--log-file", str(run.log.resolve()), "--dump-final", str(run.final.resolve()))
    settings = {**run.ftckpt, "events": str(run.events.resolve())} if run.ftckpt else {}
    module = run.framework.command(run.folder, [*run.training, *outputs], settings)
    for node in NODES:
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(NODES)), "--nproc-per-node", str(RANKS_PER_NODE)),
            *("--local-addr", "127.0.0.1"),
            *("--rdzv-backend", "c10d", "--rdzv-id", "demo", "--rdzv-endpoint", endpoint),
            *("--rdzv-conf", "last_call_timeout=1,join_timeout=120"),
            # The two dashes end torchrun's own options.
            *("--max-restarts", "9", "--monitor-interval", "0.1", "-m", "--"),
            *module,
        ]
        processes.start(command, {**clean, "FTCKPT_NODE": node}, run.folder / f"{node}.log")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _watch(run: Run, processes: Processes, tell: Callable[[str, dict[str, Any]], None]) -> Watch:
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
            tell(kind, found)
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
            markers = [fault.marker_of(rank) for rank in victims(fault)]
            if all(marker.exists() for marker in markers):
                self._waiting.remove(fault)
                yield "fault", {"fault": fault, "num_killed": len(markers)}
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
    return "\n".join(
        f"--- {node}:\n{(run.folder / f'{node}.log').read_text(errors='replace')[-3000:]}" for node in NODES
    )
