"""Workers of Ray Train, one of which is killed twice: Ray restarts them, and the losses are an unbroken run's."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.event_logs import read_events
from tests.support.processes import Processes
from tests.support.trainers import DEADLINE_SECS, environment, install
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

RELEASES = (
    "ray==2.60.0", "protobuf==7.36.2", "msgpack==1.2.4", "pyarrow==26.0.1", "fsspec==2026.9.0", "pandas==3.1.1",
    "pytz==2026.6", "aiosignal==1.4.0", "frozenlist==1.8.0", "click==8.5.1",
)  # fmt: skip


def train_in_workers(folder: Path, arena: Path, kills: int) -> dict[str, Any]:
    """The results and the losses of both workers; worker 1 is killed so many times."""
    folder.mkdir()
    command = [
        sys.executable, "launch/train_ray.py", f"{folder}", "--ftckpt", f"--ftckpt-job={folder.name}",
        "--ftckpt-interval=1", f"--ftckpt-arena={arena}", f"--ftckpt-events={folder / 'events'}",
    ]  # fmt: skip
    env = {**environment(install("ray", RELEASES)), "RAY_USAGE_STATS_ENABLED": "0"}
    with Processes() as processes:
        processes.start("node", command, env, folder / "log")
        (driver,) = processes.agents
        killed: set[int] = set()
        for _ in range(kills):

            def snapshots() -> list[dict[str, Any]]:
                assert driver.poll() is None, (folder / "log").read_text()[-3000:]
                found = read_events(folder / "events", "snapshot", of="rank1")
                return [event for event in found if event["pid"] not in killed]

            until(lambda: len(snapshots()) > 6, "snapshots", DEADLINE_SECS)
            pid = snapshots()[-1]["pid"]
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        assert driver.wait(DEADLINE_SECS) == 0, (folder / "log").read_text()[-3000:]
    restored = [event["iteration"] for event in read_events(folder / "events", "restored", of="rank0")]
    assert len([iteration for iteration in restored if iteration]) == kills, restored
    lines = {rank: map(json.loads, (folder / f"losses{rank}.jsonl").read_text().splitlines()) for rank in (0, 1)}
    losses = {rank: {line["step"]: line["loss"] for line in of_rank} for rank, of_rank in lines.items()}
    return {"losses": losses, **{str(rank): (folder / f"result{rank}.json").read_text() for rank in (0, 1)}}


@pytest.mark.timeout(900)
def test_a_killed_training_is_the_unbroken_one(tmp_path: Path, arena_root: Path) -> None:
    whole = train_in_workers(tmp_path / "whole", arena_root, 0)
    killed = train_in_workers(tmp_path / "killed", arena_root, 2)
    assert len(whole["losses"][0]) == len(whole["losses"][1]) == 120
    assert killed == whole
