"""Trainings with trainers of other packages, whose rank 1 is killed while ``ftckpt run`` restarts them.

``install`` puts releases beside this environment's packages; ``FTCKPT_RELEASES`` names a folder that keeps them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.event_logs import read_events
from tests.support.processes import Processes
from tests.support.repository import ROOT
from tests.support.waiting import until

DEADLINE_SECS = 150.0


def install(name: str, releases: Sequence[str], lacks_more: bool = False) -> Path:
    """The folder with these ``releases``, which are all that this environment lacks, unless it ``lacks_more``. Skips
    the test if pip fails."""
    folder = Path(os.environ.get("FTCKPT_RELEASES", tempfile.gettempdir() + "/ftckpt-releases")).resolve() / name
    if not folder.exists():
        partial = folder.with_name(f".{name}")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            *(() if lacks_more else ("--no-deps",)),
            "--target",
            str(partial),
            *releases,
        ]
        run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        if run.returncode:
            pytest.skip(f"{name} cannot be installed here: {run.stderr[-300:]}")
        partial.rename(folder)
    return folder


def environment(packages: Path) -> dict[str, str]:
    """Finds ``packages`` after this environment's, which are the ones to test with."""
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if "site-packages" in path), str(packages)])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def train(packages: Path, folder: Path, arena: Path, kills: int, *script: str) -> tuple[dict[str, Any], str]:
    """What a script wrote to ``result.json`` in ``folder``, and what it printed; rank 1 is killed ``kills`` times."""
    folder.mkdir()
    command = [
        sys.executable, "-m", "ftckpt", "run", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0", f"--rdzv-id={folder.name}", *script, "--ftckpt", f"--ftckpt-job={folder.name}",
        "--ftckpt-interval=1", f"--ftckpt-arena={arena}", f"--ftckpt-events={folder / 'events'}",
    ]  # fmt: skip
    with Processes() as processes:
        processes.start("node", command, environment(packages), folder / "log")
        (agent,) = processes.agents
        killed: set[int] = set()
        for _ in range(kills):

            def snapshots() -> list[dict[str, Any]]:
                assert agent.poll() is None, (folder / "log").read_text()[-3000:]
                found = read_events(folder / "events", "snapshot", of="rank1")
                return [event for event in found if event["pid"] not in killed]

            until(lambda: len(snapshots()) > 6, "snapshots", DEADLINE_SECS)
            pid = snapshots()[-1]["pid"]
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        assert agent.wait(DEADLINE_SECS) == 0, (folder / "log").read_text()[-3000:]
    restored = [event["iteration"] for event in read_events(folder / "events", "restored", of="rank0")]
    assert len([iteration for iteration in restored if iteration]) == kills, restored
    return json.loads((folder / "result.json").read_text()), (folder / "log").read_text()
