"""One run of a job of ``benchmarks/recovery.py`` on two simulated nodes, with a recovery from each fault: the time of
each part."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ftckpt.memory.directory import job_node_path
from launch.demo_job import FRAMEWORKS, NODES, SMALL, Tail, agent_environment, clean, free_endpoint
from tests.support.processes import ARENA, Processes, RunError, is_running

_STARTING = ("detect", "teardown", "regroup", "start", "import", "rendezvous", "groups", "build")
PARTS = (*_STARTING, "decide", "load", "step")
"""The parts of the time from the kill to the first step that all ranks have finished, in order."""
FAULTS = ("rank", "all", "node")
MIN_STEPS = 4
"""Steps of an attempt before its fault."""
SAVE_EVERY = 5
TIMEOUT_SECS = 120.0
"""Deadline of a start, of a wait for the next fault, and of a recovery."""
_RENDEZVOUS = "join_timeout=600,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
"""Heartbeats of torch's agents come up to two seconds apart."""
_LOOK_SECS = 0.01
_NOTICED = re.compile(rb"Worker group (FAILED|UNHEALTHY)|Detected \d+ new nodes")
JOINS = b"Rendezvous'ing worker group"
"""In the log of an agent."""
WARM_SECS = 60.0
"""After which an agent counts as prepared for a restart, whatever it says."""
STANDBY_SECS = 3.0
"""In which an agent that is there joins its rendezvous."""
_JOB_SCRIPT = str(Path(__file__).with_name("recovery_job.py"))


class Launcher(NamedTuple):
    """A command that takes torchrun's arguments: a module, and arguments of its own.

    ``needs``: the module that implements it; ``package``: its distribution, unless that is torch or ftckpt. ``warm``:
    the line in the log of an agent that is prepared for a restart. ``takes_script``: no runner is needed.
    """

    module: tuple[str, ...]
    needs: str
    package: str = ""
    warm: bytes = JOINS
    takes_script: bool = False

    @property
    def is_there(self) -> bool:
        try:
            return importlib.util.find_spec(self.needs) is not None
        except ModuleNotFoundError:  # not even the package that it is in
            return False


_NVRX = "nvidia_resiliency_ext.fault_tolerance"
LAUNCHERS = {
    "torchrun": Launcher(("torch.distributed.run",), "torch.distributed.run"),
    "ftckpt run": Launcher(("ftckpt.cli.main", "run"), "ftckpt.cli.run", warm=b"are preloaded", takes_script=True),
    "ft_launcher": Launcher(
        (f"{_NVRX}.launcher", "--ignore-missing-fault-tol-cfg"), _NVRX, package="nvidia-resiliency-ext"
    ),
}


class Job(NamedTuple):
    """A script of ``launch/`` under the runner ``module``, "" for none, on ``per_node`` ranks of each node."""

    module: str
    arguments: tuple[str, ...]
    configure: Callable[[Path, Mapping[str, Any]], list[str]]
    per_node: int


_MODEL = ("--layers", "4", "--hidden", "64", "--seq", "64")
JOBS = {
    "megatron": Job("ftckpt.megatron", FRAMEWORKS["megatron"].arguments, FRAMEWORKS["megatron"].configure, 4),
    "deepspeed": Job("ftckpt.deepspeed", (*_MODEL, "--pp", "2"), FRAMEWORKS["deepspeed"].configure, 2),
    "fsdp2": Job("", (*_MODEL, "--wrap", "fsdp2"), FRAMEWORKS["megatron"].configure, 2),
}


@dataclass
class Rank:
    """One process of a rank, and its notes: the newest by name, and the number of steps."""

    pid: int
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: int = 0

    def at(self, *names: str) -> float | None:
        """The time of the first of these that it has noted."""
        return next((self.notes[name]["time"] for name in names if name in self.notes), None)


class StateSource(NamedTuple):
    """Where a restart finds the state: in ftckpt's memory, with ``settings``, or on storage, where the script saves
    ``every`` so many iterations, in the background if it ``is_async``."""

    is_stored: bool
    settings: Mapping[str, Any] = {"interval": 1}
    every: int = SAVE_EVERY
    is_async: bool = False


class Run:
    """The agents of one run and their ranks."""

    def __init__(self, job: str, launcher: str, source: StateSource, pause_secs: float, folder: Path) -> None:
        self._job, self._source, self._name = JOBS[job], source, f"bench-{uuid.uuid4().hex[:8]}"
        self._nodes, self._num_nodes = list(NODES), len(NODES)
        self._folder, self._stamps, self._events = folder, folder / "stamps", folder / "events"
        self._stamps.mkdir()
        self._tail, self._processes = Tail(), Processes()
        self._pids: set[int] = set()
        self._ranks: dict[int, Rank] = {}
        self._protected: set[int] = set()
        """Process ids of rank 0 that have reported a protected snapshot."""
        self._noticed = 0.0
        self._secs_of_step = 0.0
        self.steps: list[tuple[float, int]] = []
        """Of rank 0: when it finished which iteration."""
        self.save_secs: list[float] = []
        self._launcher = LAUNCHERS[launcher]
        self._command = self._words(job, pause_secs)
        # Agents of torchrun would keep the address of the first store when its node is lost.
        self._env = {**agent_environment(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "LOGLEVEL": "INFO"}
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)  # else each rank of each attempt compiles the script's modules
        if not self._job.module:  # it trains on the CPU
            del self._env["FTCKPT_DEVICE"]

    def _words(self, job: str, pause_secs: float) -> list[str]:
        source, stored = self._source, str(self._folder / "saved") if self._source.is_stored else ""
        settings = {**SMALL, "job": self._name, "events": str(self._events), **source.settings}
        how = [stored, str(source.every), "async" if source.is_async else "sync"]
        script = [_JOB_SCRIPT, job, str(self._stamps), str(pause_secs), *how]
        flags = self._job.configure(self._folder, {} if source.is_stored else settings)
        if source.is_stored:
            (self._folder / "saved").mkdir()
        module = "" if self._launcher.takes_script else self._job.module
        agent = {"--nnodes": len(NODES), "--nproc-per-node": self._job.per_node, "--local-addr": "127.0.0.1"}
        agent |= {"--rdzv-backend": "c10d", "--rdzv-id": self._name, "--rdzv-endpoint": free_endpoint()}
        agent |= {"--max-restarts": 1000, "--monitor-interval": 0.1}
        return [
            *(sys.executable, "-m", *self._launcher.module),
            *(str(word) for option in agent.items() for word in option),
            *(["-m", "--", module] if module else ["--"]),
            *(*script, *self._job.arguments, "--iterations", "1000000"),
            *("--log-file", str(self._folder / "log.jsonl"), *flags),
        ]

    def _start(self, node: str) -> None:
        """Start the agent of a node; it is a standby where two others train."""
        at = self._command.index("--rdzv-id")
        conf = ["--rdzv-conf", f"{_RENDEZVOUS},is_host={int(node == NODES[0])}"]
        self._processes.start(node, [*self._command[:at], *conf, *self._command[at:]], self._env, self._log(node))

    def _log(self, node: str) -> Path:
        return self._folder / f"{node}.log"

    def _log_text(self, node: str) -> bytes:
        return self._log(node).read_bytes()

    def _wait_until_warm(self, *nodes: str) -> None:
        """Wait until agents are prepared for a restart."""
        end = time.monotonic() + WARM_SECS
        self._until(
            lambda: time.monotonic() > end or all(self._launcher.warm in self._log_text(node) for node in nodes),
            "agents were prepared for a restart",
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.stop()
        clean(self._name)

    def measure(self, faults: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Each fault in turn, and the recovery from it.

        Raises:
            RunError: training did not start, or did not recover in time.
        """
        self.start()
        return {fault: self.recover(fault) for fault in faults}

    def start(self) -> None:
        """Starts the job; returns when it trains and agents are prepared for a restart."""
        for node in NODES:
            self._start(node)
        self._until(self._trains, "training began")
        self._wait_until_warm(*NODES)

    def wait_for_state(self) -> None:
        """Trains until a restart of all nodes but one would find a state."""
        self._until(self._is_ready, "a state to restore was there")

    def train_until(self, when: float) -> int:
        """The iterations that all ranks have finished at this time, or when they train again."""
        self._until(lambda: time.time() >= when and self._trains(), "training went on")
        return min(rank.notes["step"]["iteration"] for rank in self._ranks.values())

    def recover(self, fault: str, at: float | None = None) -> dict[str, Any]:
        """Strikes at a time, or when there is a state to restore, and returns when training is back."""
        standby = self._start_standby() if fault == "node" else ""
        if at is not None:
            self.train_until(at)
        else:
            self.wait_for_state()
            time.sleep(random.uniform(0.0, self._secs_of_step))
            self._look()
        old, before = dict(self._ranks), len(self._pids)
        last = max(rank.notes["step"]["iteration"] for rank in old.values())
        self._noticed, struck = 0.0, time.time()
        self._strike(fault, standby)
        ended = 0.0

        def is_back() -> bool:
            nonlocal ended
            if not ended and not any(is_running(rank.pid) for rank in old.values()):
                ended = time.time()
            return self._trains()

        self._ranks = {}
        self._until(is_back, f"training came back from fault {fault}")
        begun = min(rank.notes["process"]["time"] for rank in self._ranks.values())
        for rank in () if self._source.is_stored else self._ranks:
            self._ranks[rank].notes.update(self._events_of(rank))
        parts = parts_of(struck, self._noticed, min(ended or begun, begun), self._ranks.values())
        loaded = self._ranks[0].notes["loaded"]
        source, starts = loaded.get("source", "storage"), (len(self._pids) - before) / len(old)
        lost = last - (loaded["iteration"] or 0)
        return {"secs": sum(parts.values()), "parts": parts, "lost": lost, "source": source, "starts": starts}

    def _start_standby(self) -> str:
        """The node that waits to replace one."""
        # Not earlier: after the loss of a rank torch's rendezvous takes the standby as a node of the job, and each
        # node in turn as a new one, for which the others restart, without end.
        standby = f"node{self._num_nodes}"
        self._num_nodes += 1
        self._start(standby)
        self._until(lambda: JOINS in self._log_text(standby), "the standby was there")
        time.sleep(STANDBY_SECS)
        self._wait_until_warm(standby)
        return standby

    def _strike(self, fault: str, standby: str) -> None:
        if fault == "node":
            lost = self._nodes.pop()  # the first one hosts the rendezvous
            self._processes.lose(lost)
            if not self._source.is_stored:
                shutil.rmtree(job_node_path(ARENA, self._name, lost))
            self._nodes.append(standby)
            return
        ranks = list(self._ranks) if fault == "all" else [max(self._ranks) // 2 + 1]
        for rank in ranks:
            os.kill(self._ranks[rank].pid, signal.SIGKILL)

    def _is_ready(self) -> bool:
        """Whether a fault may strike: this attempt has a state to restore."""
        if not self._trains() or any(rank.steps < MIN_STEPS for rank in self._ranks.values()):
            return False
        return "saved" in self._ranks[0].notes if self._source.is_stored else self._ranks[0].pid in self._protected

    def _trains(self) -> bool:
        """Whether all ranks have finished a step."""
        ranks = self._ranks.values()
        return len(ranks) == len(NODES) * self._job.per_node and all(rank.steps for rank in ranks)

    def _events_of(self, rank: int) -> dict[str, dict[str, Any]]:
        """ftckpt's events of a start, as notes."""
        found: dict[str, dict[str, Any]] = {}
        lines = (self._events / f"rank{rank}.jsonl").read_bytes().splitlines()
        for event in map(json.loads, lines):
            if event["pid"] != self._ranks[rank].pid:
                continue
            if event["event"] == "loaded":
                found["decided"] = {"time": event["time"] - event["secs"]}
            elif event["event"] == "restored":
                found["loaded"] = {key: event[key] for key in ("time", "iteration", "source")}
        return found

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_SECS
        while True:
            self._look()
            if condition():
                return
            ended = [agent.returncode for agent in self._processes.agents if agent.poll() is not None]
            if ended or time.monotonic() > deadline:
                why = f"an agent ended with code {ended[0]}" if ended else f"{TIMEOUT_SECS:.0f} s are over"
                raise RunError(f"{why} before {what}\n{self._ends_of_logs()}")
            time.sleep(_LOOK_SECS)

    def _look(self) -> None:
        """Reads new notes, events and log lines."""
        for path in self._stamps.iterdir():
            rank, pid, _ = path.name.split(".")
            for line in self._tail.lines(path):
                self._on_note(int(rank), int(pid), json.loads(line))
        for line in self._tail.lines(self._events / "rank0.jsonl"):
            if b'"protected"' in line and (event := json.loads(line))["event"] == "protected":
                self._protected.add(event["pid"])
        for path in self._folder.glob("*.log"):
            if any(_NOTICED.search(line) for line in self._tail.lines(path)):
                self._noticed = self._noticed or time.time()

    def _on_note(self, rank: int, pid: int, note: dict[str, Any]) -> None:
        if pid not in self._pids:  # a later attempt
            self._pids.add(pid)
            self._ranks[rank] = Rank(pid)
        if (mine := self._ranks.get(rank)) is None or mine.pid != pid:
            return
        if note["what"] == "step":
            mine.steps += 1
            if before := mine.at("step"):
                self._secs_of_step = note["time"] - before
            if mine.steps == 1:
                mine.notes["first step"] = note
        mine.notes[note["what"]] = note
        if rank == 0 and note["what"] == "step":
            self.steps.append((note["time"], note["iteration"]))
        if rank == 0 and note["what"] == "saved":
            self.save_secs.append(note["secs"])

    def _ends_of_logs(self) -> str:
        logs = sorted(self._folder.glob("node*.log"))
        return "\n".join(f"--- {log.stem}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs)


def parts_of(struck: float, noticed: float, ended: float, ranks: Any) -> dict[str, float]:
    """Seconds of each part, which ends when the last rank has reached its end.

    Args:
        noticed: the time when a launcher reported the lost rank; 0: never.
        ended: the time when the last process of the previous attempt was gone.
        ranks: the ranks of the attempt that trained.
    """
    ranks = list(ranks)
    begun = [rank.notes["process"]["time"] for rank in ranks]

    def last(*names: str) -> float:
        return max(rank.at(*names) or 0.0 for rank in ranks)

    ends = [noticed, ended, min(begun), max(begun), last("imported"), last("rendezvous"), last("built")]
    ends += [last("decided", "loaded"), last("loaded"), last("first step")]
    parts, before = {}, struck
    for name, end in zip((part for part in PARTS if part != "groups"), ends, strict=True):
        parts[name] = max(0.0, end - before)
        before = max(before, end)
    groups_secs = min(parts["build"], max(rank.notes["built"]["groups_secs"] for rank in ranks))
    parts |= {"groups": groups_secs, "build": parts["build"] - groups_secs}
    return {name: round(parts[name], 4) for name in PARTS}
