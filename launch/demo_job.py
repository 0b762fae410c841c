"""The demo's jobs: eight ranks under two agents of ``ftckpt run``, two simulated nodes, with faults.

As a script it is a rank of such a job: it runs the example script of its first argument with the faults of the plan
in FTCKPT_TEST_FAULTS.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ftckpt.config import Config
from ftckpt.errors import ArenaError, FtckptError
from ftckpt.memory.directory import clean_job, job_node_path, list_arenas
from ftckpt.smp.client import SmpClient
from tests.support import faults
from tests.support.processes import ARENA, STOP_SECS, Processes, RunError, is_running
from tests.support.repository import ROOT

NODES = ("node0", "node1")
LOST_NODE, REPLACEMENT = "node1", "node2"
RANKS_PER_NODE = 4
WORLD_SIZE = RANKS_PER_NODE * len(NODES)
LAYOUTS = ("tp2pp2dp2", "tp2pp1dp2")
"""The layouts of eight ranks, and of the four ranks of one node."""

# Small chunks and objects for a small model: a slot must have several chunks, and arenas, parity and packages of both
# nodes must fit the 64 MB of /dev/shm that containers often have.
SMALL: Mapping[str, Any] = {"enabled": True, "chunk_size": "128KiB", "objects_size": "1MiB"}

# An agent that is silent for three seconds is lost; then a standby takes its place, or, if fewer nodes suffice, the
# others continue after the last call.
_RENDEZVOUS = "join_timeout=120,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
_POLL_SECS = 0.02
_REFERENCE_SPACING = 5
"""Iterations of the run without ftckpt from one printed line to the next."""
_STALL_SECS = 180.0
"""Time without progress after which a run has failed."""
_OCCASIONS = 8
"""Iterations in which the fault may find a snapshot being written, or training waits for SMPs."""
_EARLIER = 3
"""Iterations before the fault in which training already waits: protection takes some iterations."""
_ASK_SECS, _ANSWER_SECS = 1.0, 5.0
"""Interval of queries to SMPs, and the timeout of an answer."""

Settings = Mapping[str, Any]
"""Fields of ftckpt's ``Config``; empty: train without ftckpt."""


@dataclass(frozen=True)
class Framework:
    """The script ``launch/<script>.py`` with ``arguments``, and with those that ``configure`` makes of ftckpt's
    settings; it may write files into the run's folder.

    ``reshapes``: the job can continue with fewer ranks, and its script logs digests of all ranks' state.
    """

    title: str
    job: str
    out: Path
    script: str
    arguments: Sequence[str]
    configure: Callable[[Path, Settings], list[str]]
    reshapes: bool = False

    def command(self, folder: Path, training: Sequence[str], settings: Settings) -> list[str]:
        """The script for the launcher, and its arguments."""
        script = [str(Path(__file__).resolve()), self.script]
        return [*script, *self.arguments, *training, *self.configure(folder, settings)]


def _deepspeed_json(folder: Path, settings: Settings) -> list[str]:
    """The shipped configuration, small enough for a minute on two cores."""
    config = json.loads((ROOT / "configs" / "deepspeed_zero1_pp.json").read_text())
    section = config.pop("ftckpt")
    config |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    # AdamW as torch has it: DeepSpeed's own would be compiled.
    config["optimizer"]["params"] |= {"lr": 1e-3, "torch_adam": True}
    config["scheduler"]["params"] |= {"total_num_steps": 100, "warmup_num_steps": 4}
    if settings:
        config["ftckpt"] = {**section, **settings}
    path = (folder / "deepspeed.json").resolve()
    path.write_text(json.dumps(config, indent=2) + "\n")
    return ["--deepspeed_config", str(path)]


_MODEL = ("--tp", "2", "--pp", "2", "--layers", "4", "--hidden", "64", "--seq", "64")

FRAMEWORKS = {
    "megatron": Framework(
        title="Megatron-core",
        job="GPT as tensor 2 x pipeline 2 x data 2, bf16, distributed optimizer, dropout",
        out=Path("runs/demo"),
        script="train_gpt",
        arguments=(*_MODEL, "--global-batch", "16", "--micro-batch", "2"),
        configure=lambda _, settings: Config(**settings).flags(),
        reshapes=True,
    ),
    "deepspeed": Framework(
        title="DeepSpeed",
        job="PipelineModule as pipeline 2 x tensor 2 x data 2, bf16, ZeRO-1, tied embeddings, dropout",
        out=Path("runs/demo-deepspeed"),
        script="train_deepspeed",
        arguments=(*_MODEL, "--tie"),
        configure=_deepspeed_json,
    ),
}


@dataclass(frozen=True)
class Scene:
    """A fault: ``text`` with its iteration describes it.

    A rank, or all, are killed at ``point``. If ``rank`` is None, ``node`` is lost in the middle of an iteration, and
    ``replacement``, if any, takes its place; without a ``node`` all nodes end with their memory, and the first one
    starts again.
    """

    text: str
    rank: int | Literal["all"] | None = None
    point: str = ""
    ordinal: int = 0
    secs: float = 0.0
    node: str = ""
    replacement: str = ""


_NODE = f"all of {LOST_NODE} lost in iteration {{}}: its agent, its ranks, its SMP, its memory;"
SHRINK, LIMIT = "shrink", "limit"
RESHAPING = (SHRINK, LIMIT)
"""Scenes after which the job continues in another layout; each has a run of its own."""
SCENES = {
    "rank": Scene("rank 5 killed in the middle of iteration {}", 5, "forward", 3),
    # Ordinal 1: one chunk is in the slot already.
    "writing": Scene("rank 2 killed while it wrote the snapshot of iteration {}", 2, "copy", 1),
    "all": Scene(
        "all ranks killed before the optimizer step of iteration {}",
        "all",
        "before_step",
        secs=60.0,
    ),
    "node": Scene(f"{_NODE} {REPLACEMENT} takes its place", node=LOST_NODE, replacement=REPLACEMENT),
    SHRINK: Scene(f"{_NODE} nothing takes its place", node=LOST_NODE),
    LIMIT: Scene("all nodes ended in iteration {}, their memory emptied; one node starts again"),
}


@dataclass(frozen=True)
class Strike:
    """A scene's fault in a run, in ``iteration`` or at the first later occasion; the file ``marker`` shows that it
    struck."""

    name: str
    iteration: int
    marker: Path

    @property
    def scene(self) -> Scene:
        return SCENES[self.name]

    @property
    def ranks(self) -> list[int]:
        """The ranks that kill themselves."""
        rank = self.scene.rank
        return [] if rank is None else list(range(WORLD_SIZE)) if rank == "all" else [rank]

    def plan(self) -> list[faults.Fault]:
        """The faults of which the first to occur counts: not every iteration has a snapshot to interrupt.

        A node is lost once a snapshot is protected: until then training waits in each iteration, from some before the
        fault on, and ``Watch`` ends the waits.
        """
        scene = self.scene
        if scene.rank is None:
            iterations = range(self.iteration - _EARLIER, self.iteration + _OCCASIONS)
            waits = ((at, self.marker.with_name(f"{self.marker.name}-wait{at}")) for at in iterations)
            # Not at the boundary: a rank that waits there has not voted yet.
            return [faults.Fault(0, at, "forward", marker, "wait", secs=2 * _STALL_SECS) for at, marker in waits]
        first = faults.Fault(scene.rank, self.iteration, scene.point, self.marker, "kill", scene.ordinal, scene.secs)
        later = self._occasions() if scene.point == "copy" else [self.iteration]
        return [faults.Fault(**{**vars(first), "iteration": iteration}) for iteration in later]

    def _occasions(self) -> range:
        return range(self.iteration, self.iteration + _OCCASIONS)

    def marks(self) -> list[dict[str, Any]]:
        """The facts of a fault that has struck: of each rank that killed itself, or of the lost node."""
        injected = self.plan()[:1]
        paths = [fault.marker_of(rank) for fault in injected for rank in self.ranks] or [self.marker]
        try:
            return [json.loads(path.read_text()) for path in paths]
        except (FileNotFoundError, json.JSONDecodeError):  # not there, or being written
            return []


@dataclass
class Run:
    """One training run: its folder, further arguments of its script, ftckpt's settings, and its faults.

    It continues with ``least_nodes`` if no more are left. ``digested``: it logs digests of all ranks up to this
    iteration, and of the restored state. ``lines``, ``events`` and ``secs`` are observed.
    """

    name: str
    folder: Path
    framework: Framework
    training: Sequence[str]
    ftckpt: Settings = field(default_factory=dict)
    strikes: Sequence[Strike] = ()
    least_nodes: int = len(NODES)
    digested: int | None = None
    lines: list[dict[str, Any]] = field(default_factory=list, init=False)
    events: list[dict[str, Any]] = field(default_factory=list, init=False)
    secs: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.log, self.final = self.folder / "log.jsonl", self.folder / "final"
        self.event_dir, self.digests = self.folder / "events", self.folder / "digests.jsonl"
        # Training waits there until restarts need no imports; a new launch, in the scene limit, imports anyway.
        gate = faults.Fault(0, 2, "forward", self.folder.resolve() / "gate", "wait", secs=2 * _STALL_SECS)
        self.gate = [gate] if any(strike.name != LIMIT for strike in self.strikes) else []

    @property
    def num_ranks_after(self) -> int:
        """The number of ranks after its faults."""
        return RANKS_PER_NODE if any(strike.name in RESHAPING for strike in self.strikes) else WORLD_SIZE

    def log_of(self, node: str) -> Path:
        return self.folder / f"{node}.log"

    def say(self, text: str) -> None:
        print(f"{self.name:9s}  {text}", flush=True)


def execute(run: Run, job: str) -> None:
    """Runs it to its end. Afterwards no process of the run and no shared memory of ``job`` is left in any case.

    Raises:
        RunError: an agent failed, a deadline passed, a fault did not strike, or something was left behind.
    """
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    plan = run.folder / "faults.json"
    plan.write_text(faults.dumps([*run.gate, *(fault for strike in run.strikes for fault in strike.plan())]))
    try:
        with Processes() as processes:
            start = _starter(run, processes, plan)
            for node in NODES:
                start(node)
            Watch(run, job, processes, start).until_end()
            if missed := [strike.name for strike in run.strikes if not strike.marks()]:
                raise RunError(f"{run.name}: no {', '.join(missed)}: faults that did not strike test nothing")
            if left := processes.left():
                raise RunError(f"{run.name}: processes {left} are left")
        if (ARENA / f"ftckpt-{job}").exists():
            raise RunError(f"{run.name}: {ARENA / f'ftckpt-{job}'} is left")
    finally:
        clean(job)


def clean(job: str) -> None:
    """Deletes the memory of a failed run. Threads of a killed process may hold its locks for a moment."""
    deadline = time.monotonic() + STOP_SECS
    while True:
        try:
            clean_job(ARENA, job)
            return
        except ArenaError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECS)


def agent_environment() -> dict[str, str]:
    """The environment of the agents of a run."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH", "PET_"))}
    env.setdefault("FTCKPT_DEVICE", "tests.standin:cpu")
    return {
        **env, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)
    }  # fmt: skip


def free_endpoint() -> str:
    """A free address of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _starter(run: Run, processes: Processes, plan: Path) -> Callable[[str], None]:
    """A function that starts the agent of a node; the first node hosts the rendezvous and is never lost."""
    env = {**agent_environment(), faults.PLAN_VAR: str(plan.resolve())}
    endpoint = free_endpoint()
    outputs = ["--log-file", str(run.log.resolve()), "--dump-final", str(run.final.resolve())]
    if run.digested is not None:
        outputs += ["--log-digest", str(run.digests.resolve()), "--digest-until", str(run.digested)]
    own = {"events": str(run.event_dir.resolve()), "metrics_port": "auto"}
    # The default may protect every 15 s: a demo would wait for it.
    settings = run.ftckpt and {**run.ftckpt, **own, "protect_interval": 1}
    script = run.framework.command(run.folder, [*run.training, *outputs], settings)

    def start(node: str) -> None:
        # A node that starts after all have ended is the only one.
        nodes = "1" if run.log_of(node).exists() else f"{run.least_nodes}:{len(NODES)}"
        command = [
            *(sys.executable, "-m", "ftckpt", "run"),
            *("--nnodes", nodes, "--nproc-per-node", str(RANKS_PER_NODE), "--local-addr", "127.0.0.1"),
            *("--rdzv-backend", "c10d", "--rdzv-id", "demo", "--rdzv-endpoint", endpoint),
            *("--rdzv-conf", f"{_RENDEZVOUS},is_host={int(node == NODES[0])}", "--max-restarts", "9"),
            *script,
        ]
        processes.start(node, command, env, run.log_of(node))

    return start


class Tail:
    """New complete lines of files that others append to."""

    def __init__(self) -> None:
        self._offsets: dict[Path, int] = {}

    def lines(self, path: Path) -> list[bytes]:
        offset = self._offsets.get(path, 0)
        if not path.exists() or path.stat().st_size == offset:
            return []
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]  # a killed writer may leave half a line
        self._offsets[path] = offset + len(complete)
        return complete.splitlines()


class Watch:
    """Follows a run's files and processes, prints and records what happens, and loses nodes."""

    def __init__(self, run: Run, job: str, processes: Processes, start: Callable[[str], None]) -> None:
        self._run, self._processes, self._start = run, processes, start
        self._job, self._node_dir = job, job_node_path(ARENA, job, LOST_NODE)
        self._tail = Tail()
        self._waiting = list(run.strikes)
        self._gate = list(run.gate)
        self._struck_at: float | None = None
        self._alive: set[int] = set()
        self._ended: set[int] = set()
        self._nodes: dict[int, str] = {}
        self._restored: dict[str, set[int]] = {}
        self._protected: int | None = None
        self._lose_at: float | None = None
        self._ask_at = 0.0

    def until_end(self) -> None:
        """Watches until all agents have succeeded. Raises RunError if one failed, or if there is no progress."""
        begin = moved = time.monotonic()
        while True:
            ended = all(agent.poll() is not None for agent in self._processes.agents)
            moved = time.monotonic() if self.look() else moved
            if any(agent.returncode for agent in self._processes.agents):
                raise RunError(f"{self._run.name}: ftckpt run failed\n{self._ends_of_logs()}")
            now = time.monotonic()
            if ended:
                self._run.secs = now - begin
                return
            if now - moved > _STALL_SECS:
                raise RunError(f"{self._run.name}: nothing moved for {_STALL_SECS:.0f} s\n{self._ends_of_logs()}")
            time.sleep(_POLL_SECS)

    def look(self) -> bool:
        """Reads what is new, and loses a node when its time has come; returns whether something was new."""
        new = False
        for strike in list(self._waiting):
            if marks := strike.marks():
                self._waiting.remove(strike)
                self._on_strike(strike, marks)
                new = True
        for line in self._appended(self._run.log):
            self._on_line(line)
            new = True
        for path in sorted(self._run.event_dir.glob("rank*.jsonl")):
            for event in self._appended(path):
                self._on_event(event)
                new = True
        for pid in [pid for pid in self._alive if not is_running(pid)]:
            self._alive.remove(pid)
            self._ended.add(pid)
        self._open_gate()
        self._take_nodes_when_due()
        self._end_waits()
        return new

    def _appended(self, path: Path) -> Iterator[dict[str, Any]]:
        for line in self._tail.lines(path):
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)

    def _on_strike(self, strike: Strike, marks: list[dict[str, Any]]) -> None:
        self._struck_at, iteration = time.time(), marks[0]["iteration"]
        self._run.say("KILLED: " + strike.scene.text.format(iteration))
        if "protected" in marks[0]:
            self._run.say(f"        the snapshot of iteration {marks[0]['protected']} is protected")

    def _on_line(self, line: dict[str, Any]) -> None:
        self._run.lines.append(line)
        if self._run.ftckpt or line["iteration"] % _REFERENCE_SPACING == 0:
            self._run.say(f"iteration {line['iteration']:3d}  loss {line['loss']:.4f}  {line['loss_hex']}")

    def _on_event(self, event: dict[str, Any]) -> None:
        self._run.events.append(event)
        self._alive |= {event["pid"]} - self._ended
        kind, rank = event["event"], event["rank"]
        if kind == "joined":
            self._nodes[rank] = event["node"]
            self._protected = self._lose_at = None  # of an attempt that has ended
        elif kind == "protected":
            self._protected = event["iteration"]
        elif kind == "rebuilt":
            self._run.say(f"REBUILT: {', '.join(event['shards'])} from {', '.join(event['sources'])}")
        elif kind == "loaded" and event["from"] and rank == 0:
            layouts = f"from {event['from']} to {event['to']}"
            self._run.say(f"RESHAPED: the snapshot of iteration {event['iteration']} {layouts}")
        elif kind == "restored" and self._struck_at is not None:
            ranks = self._restored.setdefault(event["lineage"], set())
            ranks.add(rank)
            if len(ranks) == self._run.num_ranks_after:
                secs = time.time() - self._struck_at
                snapshot = f"snapshot of iteration {event['iteration']} from {event['source']}"
                self._run.say(f"BACK: {snapshot}, {secs:.1f} s after the kill")

    def _open_gate(self) -> None:
        """Starts the standby once the others train, and lets them continue when all agents have preloaded modules."""
        if not self._gate or not self._gate[0].fired(0):
            return
        for standby in (strike.scene.replacement for strike in self._waiting):
            if standby and not self._run.log_of(standby).exists():
                self._start(standby)
        if all("modules are preloaded" in log.read_text() for log in self._run.folder.glob("node*.log")):
            self._gate.pop().go_on()

    def _take_nodes_when_due(self) -> None:
        """Loses nodes at a random instant inside the iteration, once a rank has reported a protected snapshot."""
        strike = next((strike for strike in self._waiting if strike.scene.rank is None), None)
        lines = self._run.lines
        if strike is None or self._protected is None or not lines or lines[-1]["iteration"] + 1 < strike.iteration:
            return
        now = time.monotonic()
        if self._lose_at is None:
            self._lose_at = now + random.uniform(0.1, 0.9) * lines[-1]["time"]
        if now < self._lose_at:
            return
        iteration = lines[-1]["iteration"] + 1
        for wait in strike.plan():  # no more of them
            wait.marker_of(0).touch()
            wait.go_on()
        if not strike.scene.node:
            self._end_all(strike, iteration)
            self._start(NODES[0])
            return
        self._lose_node(strike, iteration)

    def _end_waits(self) -> None:
        """Lets training continue while no SMP protects a snapshot: ranks learn of protection, and choose the next
        candidate, at step boundaries."""
        plans = (strike.plan() for strike in self._waiting if strike.scene.rank is None)
        waits = [wait for plan in plans for wait in plan if wait.fired(0) and not wait.over.exists()]
        now = time.monotonic()
        if waits and now < self._ask_at:
            return
        self._ask_at = now + _ASK_SECS
        if waits and not any(self._protects(node) for node in set(self._nodes.values())):
            for wait in waits:
                wait.go_on()

    def _protects(self, node: str) -> bool:
        """Whether the SMP of ``node`` works on a snapshot, or is too busy to answer."""
        client = SmpClient(job_node_path(ARENA, self._job, node), ARENA, self._job, node)
        try:
            return bool(client.status(_ANSWER_SECS)["tasks"]["encoding"])
        except FtckptError:
            return True

    def _lose_node(self, strike: Strike, iteration: int) -> None:
        shards = [path.name.rpartition(".")[0] for path in list_arenas(self._node_dir)]
        when = time.time()
        pids = self._processes.lose(LOST_NODE)
        shutil.rmtree(self._node_dir)
        ranks = sorted(rank for rank, node in self._nodes.items() if node == LOST_NODE)
        mark = {"time": when, "iteration": iteration, "protected": self._protected}
        strike.marker.write_text(json.dumps({**mark, "ranks": ranks, "pids": pids, "shards": shards}))

    def _end_all(self, strike: Strike, iteration: int) -> None:
        """As the batch scripts at the time limit: ends the ranks, flushes the newest snapshot, and empties memory."""
        when = time.time()
        self._processes.end(NODES)
        for words in (["save", self._job, "--timeout", "150"], ["clean", self._job]):
            command = [sys.executable, "-m", "ftckpt.cli.main", *words, "--arena", str(ARENA)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_STALL_SECS, check=False)
            if done.returncode:
                raise RunError(f"{self._run.name}: ftckpt {words[0]} failed: {done.stderr}")
            for line in done.stdout.splitlines() if words[0] == "save" else ():
                self._run.say(f"SAVED: {line}")
        if (ARENA / f"ftckpt-{self._job}").exists():
            raise RunError(f"{self._run.name}: memory is not empty")
        mark = {"time": when, "iteration": iteration, "protected": self._protected}
        strike.marker.write_text(json.dumps({**mark, "ranks": sorted(self._nodes)}))

    def _ends_of_logs(self) -> str:
        logs = sorted(self._run.folder.glob("node*.log"))
        return "\n".join(f"--- {log.stem}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


if __name__ == "__main__":
    script = importlib.import_module(f"launch.{sys.argv[1]}")
    faults.install(faults.plan_from_env(os.environ), int(os.environ["RANK"]))
    script.main(sys.argv[2:])
