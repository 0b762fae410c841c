"""A job under other load: two busy loops on each core that its ranks and SMPs may use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.campaign_job import Plan, train
from ftckpt.memory.directory import clean_job, node_directory
from ftckpt.memory.heartbeat import Heartbeat
from tests.support.event_logs import read_events
from tests.support.pool import spawn_ranks
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

MAX_AGE_SECS = 30.0
MAX_SILENT_SECS = 5.0
PER_CORE = 2
PROTECTED = 3
ENDLESS = 100_000
NODES = ("n0", "n0", "n1", "n1")


@pytest.fixture
def busy() -> Iterator[None]:
    """Loops that end with this process."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"
    with ExitStack() as loops:
        for _ in range(PER_CORE * len(os.sched_getaffinity(0))):
            loop = loops.enter_context(subprocess.Popen([sys.executable, "-c", code]))
            loops.callback(loop.kill)
        yield


def test_a_protected_snapshot_is_never_older_than_promised(
    settings: dict[str, Any], arena_root: Path, tmp_path: Path, busy: None
) -> None:
    """Counted from the moment when it was taken to the moment when the next one is protected. Any state uses up
    so small a share: what is left is the guaranteed minimum."""
    small = {"protect": "node,peer", "chunk_size": "128KiB", "objects_size": "1MiB", "schedule": "thread"}
    small |= {"protect_interval": "auto", "smp_cores": 0.001}
    (tmp_path / "progress").mkdir()
    plan = Plan(settings | small, NODES, ENDLESS, tmp_path / "progress")
    pulse, silent_secs = Heartbeat.open(node_directory(arena_root, plan.settings["job"], NODES[0]), None), [0.0]

    def seen(kind: str) -> dict[int, float]:
        told = read_events(Path(plan.settings["events"]), of="rank0")
        return {event["iteration"]: event["time"] for event in told if event["event"] == kind}

    def enough() -> bool:
        silent_secs.append(pulse.smp_age_secs() if pulse.smp_beat()[0] else 0.0)
        return len(seen("protected")) >= PROTECTED

    try:
        with spawn_ranks(train, len(NODES), plan):
            until(enough, lambda: f"protected: {seen('protected')}", secs=MAX_AGE_SECS * PROTECTED)
        taken, protected = seen("snapshot"), seen("protected")
        ages = [protected[newer] - taken[older] for older, newer in pairwise([min(taken), *sorted(protected)])]
        assert max(ages) <= MAX_AGE_SECS, ages
        assert max(silent_secs) <= MAX_SILENT_SECS, "signs of life wait for no pause"
    finally:
        clean_job(arena_root, plan.settings["job"])
