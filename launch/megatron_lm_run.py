"""One training run of check_megatron_lm.py: torchrun, Megatron-LM's pretrain_gpt.py, and a hand that kills it."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftckpt.arena.directory import list_arenas
from launch.demo_run import ARENA, ROOT, Processes
from launch.megatron_lm_scenes import COMMON, Kill, Scene

Lines = dict[str, set[str]]
"""What was logged, without times: by ``iteration 3/ 9`` or the like, every line there was about it."""

_POLL_SECS = 0.02
_LAUNCH_SECS = 300.0
_TIMES = re.compile(r"^\[[^]]*\] *| elapsed time per iteration[^|]*\|")
_ROW = re.compile(r"iteration .*lm loss|validation loss at iteration|number of skipped iterations")
_END = "on test set"
_LOADED = re.compile(r"successfully loaded checkpoint from .* at iteration (\d+)")


class CheckError(Exception):
    """A run ended otherwise than it should; the text says how."""


@dataclass
class Run:
    """One training run: its folder, and how often it was launched (restarts by its agent not counted)."""

    folder: Path
    scene: Scene
    flags: Sequence[str]
    launches: int = 0

    @property
    def events(self) -> Path:
        """ftckpt's event logs."""
        return self.folder / "events"

    @property
    def storage(self) -> Path:
        """Megatron's own checkpoints."""
        return self.folder / "storage"

    @property
    def tracker(self) -> Path:
        """Megatron's file that names its newest checkpoint."""
        return self.storage / "latest_checkpointed_iteration.txt"

    def logs(self, rank: int, stream: str) -> list[Path]:
        """A rank's logs, one for each of its lives, in order."""
        pattern = f"launch*/*/attempt_*/{rank}/{stream}.log"
        return sorted(self.folder.glob(pattern), key=lambda path: (path.parts[-5], path.parts[-3]))


def launch(run: Run, checkout: Path, processes: Processes, cache: Path, restarts: int) -> None:
    """Start torchrun with the run's flags."""
    logs = run.folder / f"launch{run.launches}"
    logs.mkdir(parents=True)
    run.launches += 1
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.scene.ranks),
        "--max-restarts", str(restarts), "--monitor-interval", "0.1", "--log-dir", str(logs), "--redirects", "3",
        "-m", "ftckpt.megatron", str(checkout / "pretrain_gpt.py"), *COMMON.split(), *run.scene.schedule.split(),
        *run.scene.flags.format(storage=run.storage).split(), "--data-cache-path", str(cache), *run.flags,
    ]  # fmt: skip
    env = {
        **os.environ, "FTCKPT_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{checkout}",
        # Megatron-LM asks make, and make asks python3-config, whether they fit; its checkout pins another Python.
        "PYENV_VERSION": platform.python_version(),
    }  # fmt: skip
    processes.start("node", command, env, logs / "agent.log")


def train(run: Run, checkout: Path, cache: Path, job: str = "") -> None:
    """Run to the end, through all kills of the scene if there is a job's name."""
    kills = run.scene.kills if job else ()
    with Processes() as processes:
        launch(run, checkout, processes, cache, len(kills))
        for number, kill in enumerate(kills, 1):
            _await(run, processes, kill)
            _kill(run, processes, kill)
            if kill.who == "job":
                _lose(job, kill.lose)
                launch(run, checkout, processes, cache, len(kills) - number)
        code = processes.agents[-1].wait(_LAUNCH_SECS)
    if code and not _only_fell_over_at_exit(run):
        raise CheckError(f"exit code {code}: {_reason(run)}")


def _only_fell_over_at_exit(run: Run) -> bool:
    """Megatron-LM ends without taking its groups down, and threads of gloo may abort an interpreter that exits."""
    agent = (run.folder / f"launch{run.launches - 1}" / "agent.log").read_text(errors="replace")
    ended = _END in run.logs(run.scene.ranks - 1, "stdout")[-1].read_text(errors="replace")
    return ended and "Signal 6 (SIGABRT)" in agent


def _await(run: Run, processes: Processes, kill: Kill) -> None:
    deadline = time.monotonic() + _LAUNCH_SECS
    while time.monotonic() < deadline:
        code = processes.agents[-1].poll()
        if code is not None:
            raise CheckError(f"ended with exit code {code} before it was to be killed: {_reason(run)}")
        if _reached(run, kill) >= kill.after:
            return
        time.sleep(_POLL_SECS)
    raise CheckError(f"no {kill.on} of iteration {kill.after} within {_LAUNCH_SECS:.0f} s: {_reason(run)}")


def _reached(run: Run, kill: Kill) -> int:
    """The newest iteration that this life of the job has a snapshot or storage a checkpoint of."""
    if kill.on == "checkpoint":
        return int(run.tracker.read_text() or -1) if run.tracker.is_file() else -1
    newest = -1
    for event in read_events(run, run.scene.ranks - 1):
        if event["event"] == "joined":
            newest = -1
        elif event["event"] == "snapshot":
            newest = event["iteration"]
    return newest


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
    ranks = range(run.scene.ranks) if kill.who == "all" else [run.scene.ranks - 1]
    for pid in [read_events(run, rank)[-1]["pid"] for rank in ranks]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _lose(job: str, what: str) -> None:
    arenas = [path for node in (ARENA / f"ftckpt-{job}").iterdir() if node.is_dir() for path in list_arenas(node)]
    for path in {"": [], "one": arenas[:1], "all": arenas}[what]:
        shutil.rmtree(path)


def _reason(run: Run) -> str:
    """The first error that a rank told."""
    for rank in range(run.scene.ranks):
        for path in reversed(run.logs(rank, "stderr")):
            found = re.findall(
                r"^(?:\[rank\d+\]: )?(\w+(?:Error|Exception|Interrupt)\b.*|ftckpt: .*)", path.read_text(), re.M
            )
            if found:
                return f"rank {rank}: {found[0]}"
    return "no rank told why"


def rows(run: Run) -> Lines:
    """All lines of all lives."""
    found: Lines = {}
    for path in run.logs(run.scene.ranks - 1, "stdout"):
        for line in path.read_text(errors="replace").splitlines():
            if _ROW.search(line):
                row = _TIMES.sub("", line.strip())
                found.setdefault(row.partition("|")[0].strip(), set()).add(row)
    if not found:
        raise CheckError("nothing was logged")
    return found


def restored(run: Run) -> list[str]:
    """Where each life but the first began, as ``memory 6`` or ``storage 3``."""
    found = []
    loaded = [_LOADED.findall(path.read_text(errors="replace")) for path in run.logs(0, "stdout")]
    begun = [event["iteration"] for event in read_events(run, 0) if event["event"] == "restored"]
    if len(begun) != len(loaded) or len(begun) < 2:
        raise CheckError(f"{len(loaded)} lives, of which {len(begun)} came to train: {_reason(run)}")
    for iteration, storage in list(zip(begun, loaded, strict=True))[1:]:
        found.append(f"memory {iteration}" if iteration is not None else f"storage {storage[-1] if storage else 0}")
    return found
