"""One training run of a probe: a launcher, a program's pretrain_gpt.py, and a hand that kills it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftckpt.memory.directory import list_arenas
from tests.probe.lines import Lines
from tests.probe.program import Program, in_front
from tests.probe.scenes import Kill, Scene
from tests.support.processes import ARENA, Processes, RunError

LAUNCHERS = {"torchrun": ("torch.distributed.run",), "ftckpt": ("ftckpt", "run")}
"""Modules with their words. ``ftckpt run`` is killed once the next workers import nothing."""
_POLL_SECS = 0.02
_LAUNCH_SECS = 300.0
_LAYOUT = re.compile(
    r"data-parallel[- ]size: (\d+),.*tensor-model-parallel size: (\d+), pipeline-model-parallel size: (\d+)"
)
_LOADED = re.compile(r"successfully loaded checkpoint from .* at iteration (\d+)")


@dataclass
class Run:
    """One training run: its folder, and the number of ranks of each launch (not of each restart by its agent)."""

    folder: Path
    program: Program
    scene: Scene
    flags: Sequence[str]
    launcher: str = "torchrun"
    launches: list[int] = field(default_factory=list)

    @property
    def agent_log(self) -> Path:
        """The launcher's log of the latest launch."""
        return self.folder / f"launch{len(self.launches) - 1}" / "agent.log"

    @property
    def last(self) -> int:
        """The last rank of the latest launch."""
        return self.launches[-1] - 1

    @property
    def events(self) -> Path:
        """ftckpt's event logs."""
        return self.folder / "events"

    @property
    def storage(self) -> Path:
        """The program's own checkpoints."""
        return self.folder / "storage"

    @property
    def tracker(self) -> Path:
        """Megatron's file that names its newest checkpoint: the last that is written of one."""
        return self.storage / "latest_checkpointed_iteration.txt"

    def logs(self, rank: int, stream: str) -> list[Path]:
        """A rank's logs, one for each of its lives, in order; -1 is whichever is the last rank."""
        paths = []
        for number, ranks in enumerate(self.launches):
            pattern = f"launch{number}/*/attempt_*/{ranks - 1 if rank < 0 else rank}/{stream}.log"
            paths += sorted(self.folder.glob(pattern), key=lambda path: path.parts[-3])
        return paths


def launch(run: Run, checkout: Path, processes: Processes, cache: Path, restarts: int) -> None:
    """Start the launcher with the run's flags, on the ranks that ``run.launches`` has last."""
    logs = run.agent_log.parent
    logs.mkdir(parents=True)
    program, scene = run.program, run.scene
    command = [
        sys.executable, "-m", *LAUNCHERS[run.launcher], "--standalone", "--nproc-per-node", str(run.launches[-1]),
        "--max-restarts", str(restarts), "--monitor-interval", "0.1", "--log-dir", str(logs), "--redirects=3", "-m",
        # As a module under ftckpt run: the stand-in is in this checkout's folder of tests, and not in that one's.
        *(("pretrain_gpt",) if run.launcher == "ftckpt" else (program.runner, f"{checkout}/pretrain_gpt.py")),
        *program.common.split(), *scene.schedule.split(),
        *scene.flags.format(storage=run.storage).split(), *program.data(cache),
        *program.switched_on(run.folder, scene, run.flags),
    ]  # fmt: skip
    env = {
        **os.environ, "FTCKPT_DEVICE": "tests.standin:cpu", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONWARNINGS": "ignore", "LOCAL_SIZE": str(run.launches[-1]),
        **in_front(checkout, program.path), **program.env,
    }  # fmt: skip
    processes.start("node", command, env, run.agent_log)


def train(run: Run, checkout: Path, cache: Path, job: str = "") -> None:
    """Run to the end, through all kills of the scene if there is a job's name."""
    kills = run.scene.kills if job else ()
    run.launches.append(run.scene.ranks)
    killed_at = 0.0
    with Processes() as processes:
        launch(run, checkout, processes, cache, len(kills))
        for number, kill in enumerate(kills, 1):
            _await(run, processes, kill, killed_at)
            _kill(run, processes, kill)
            killed_at = time.time()
            if kill.who == "job":
                _lose(job, kill.lose)
                if not kill.again:
                    return
                run.launches.append(kill.ranks or run.scene.ranks)
                launch(run, checkout, processes, cache, len(kills) - number)
        code = processes.agents[-1].wait(_LAUNCH_SECS)
    if "workers are started as new processes" in run.agent_log.read_text():
        raise RunError(f"{run.agent_log}: a restart was not forked")
    if code and not _only_fell_over_at_exit(run):
        raise RunError(f"exit code {code}: {_reason(run)}")


def _only_fell_over_at_exit(run: Run) -> bool:
    """A program may end without taking its groups down, and threads of gloo may abort an interpreter that exits."""
    agent = run.agent_log.read_text(errors="replace")
    ended = run.program.end in run.logs(-1, "stdout")[-1].read_text(errors="replace")
    return ended and "Signal 6 (SIGABRT)" in agent


def _await(run: Run, processes: Processes, kill: Kill, killed_at: float) -> None:
    deadline = time.monotonic() + _LAUNCH_SECS
    while time.monotonic() < deadline:
        code = processes.agents[-1].poll()
        if code is not None:
            raise RunError(f"ended with exit code {code} before it was to be killed: {_reason(run)}")
        is_ready = run.launcher == "torchrun" or "modules are preloaded" in run.agent_log.read_text()
        if is_ready and _reached(run, kill, killed_at) >= kill.after:
            return
        time.sleep(_POLL_SECS)
    raise RunError(f"no {kill.on} of iteration {kill.after} within {_LAUNCH_SECS:.0f} s: {_reason(run)}")


def _reached(run: Run, kill: Kill, killed_at: float) -> int:
    """The newest iteration that the job has a snapshot of since it was killed, or storage a checkpoint of."""
    if kill.on == "checkpoint":
        return int(run.tracker.read_text() or -1) if run.tracker.is_file() else -1
    events = read_events(run, run.last)
    snapshots = [event for event in events if event["event"] == "snapshot" and event["time"] > killed_at]
    return snapshots[-1]["iteration"] if snapshots else -1


def read_events(run: Run, rank: int) -> list[dict[str, Any]]:
    """A rank's events so far."""
    path = run.events / f"rank{rank}.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _kill(run: Run, processes: Processes, kill: Kill) -> None:
    if kill.who == "job":
        processes.stop()
        return
    ranks = range(run.launches[-1]) if kill.who == "all" else [run.last]
    for pid in [read_events(run, rank)[-1]["pid"] for rank in ranks]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _lose(job: str, what: str) -> None:
    if what == "all":
        shutil.rmtree(ARENA / f"ftckpt-{job}")
        return
    arenas = [path for node in (ARENA / f"ftckpt-{job}").iterdir() if node.is_dir() for path in list_arenas(node)]
    for path in arenas[: {"": 0, "one": 1, "two": 2}[what]]:
        shutil.rmtree(path)


def _reason(run: Run) -> str:
    """The first error that a rank reported."""
    for rank in range(max(run.launches)):
        for path in reversed(run.logs(rank, "stderr")):
            found = re.findall(
                r"^(?:\[rank\d+\]: )?([\w.]+(?:Error|Exception|Interrupt)\b.*|ftckpt: .*)", path.read_text(), re.M
            )
            if found:
                return f"rank {rank}: {found[0]}"
    return "no rank told why"


def rows(run: Run) -> Lines:
    """All lines of all lives."""
    found: Lines = {}
    for path in run.logs(-1, "stdout"):
        for line in path.read_text(errors="replace").splitlines():
            if run.program.row.search(line):
                row = run.program.times.sub("", line.strip())
                found.setdefault(row.partition("|")[0].strip(), set()).add(row)
    if not found:
        raise RunError("nothing was logged")
    return found


def loaded(run: Run) -> list[list[int]]:
    """For each life the iterations of checkpoints that the program loaded."""
    logs = [path.read_text(errors="replace") for path in run.logs(0, "stdout")]
    return [[int(iteration) for iteration in _LOADED.findall(log)] for log in logs]


def layouts(run: Run) -> list[str]:
    """The layout of each attempt, as the program logs it, such as ``tp2pp1dp1``."""
    logs = [path.read_text(errors="replace") for path in run.logs(0, "stdout")]
    return ["".join("tp{1}pp{2}dp{0}".format(*sizes) for sizes in _LAYOUT.findall(log)[:1]) for log in logs]


def restored(run: Run) -> list[str]:
    """The start of each attempt but the first, and its layout where it is another: ``memory 6``, or ``storage 3``, or
    ``node_parity 5`` where shards were rebuilt."""
    found = []
    storage, trained = loaded(run), layouts(run)
    begun = [event for event in read_events(run, 0) if event["event"] == "restored"]
    if len(begun) != len(storage) or len(begun) < 2:
        raise RunError(f"{len(storage)} lives, of which {len(begun)} came to train: {_reason(run)}")
    for number, event in enumerate(begun[1:], 1):
        iteration = event["iteration"]
        where = (
            f"storage {max(storage[number], default=0)}" if iteration is None else f"{event['source']} {iteration}"
        )
        found.append(where + (f" in {trained[number]}" if trained[number] != trained[number - 1] else ""))
    return found
