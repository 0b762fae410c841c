"""The example for plain torch under a real torchrun: a worker is killed, the job comes back to the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import run_ranks
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

ROOT = Path(__file__).parents[2]
ITERATIONS = 200
ARGUMENTS = ["--wrap", "fsdp2", "--layers", "1", "--hidden", "32", "--seq", "32", "--global-batch", "4"]
DEADLINE_SECS = 200.0


def undisturbed(rank: int, world_size: int) -> tuple[list[str], dict[str, str]]:
    """Losses and final hashes."""
    import train_plain

    job = train_plain.build(train_plain.parse_args([*ARGUMENTS, "--iterations", str(ITERATIONS)]))
    losses = [metrics["loss"].hex() for metrics in train_plain.train(job)]
    return losses, train_plain.final_hashes(job)


def worker(log: Path, local_rank: int) -> int | None:
    """The process that trains as ``local_rank`` and was given ``log``."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            mine = f"LOCAL_RANK={local_rank}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if mine and os.fsencode(log) in words:
                return int(entry.name)
    return None


@pytest.mark.slow
def test_a_killed_worker_comes_back_to_the_same_bits(tmp_path: Path, arena_root: Path) -> None:
    log, final = tmp_path / "log.jsonl", tmp_path / "final"
    ours = ["--ftckpt", "--ftckpt-job", "plain", "--ftckpt-arena", str(arena_root), "--ftckpt-node", "node"]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "2", "--monitor-interval", "0.1", str(ROOT / "launch" / "train_plain.py")),
        *(*ARGUMENTS, "--iterations", str(ITERATIONS), "--log-file", str(log), "--dump-final", str(final), *ours),
    ]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH", "PET_"))}
    environment = {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with (tmp_path / "agent.log").open("wb") as out:
        agent = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        until(lambda: agent.poll() is not None or len(rows(log)) >= 5, "five iterations", DEADLINE_SECS)
        victim = worker(log, 1)
        assert victim is not None, (tmp_path / "agent.log").read_text()[-3000:]
        os.kill(victim, signal.SIGKILL)
        until(lambda: agent.poll() is not None, "the end", DEADLINE_SECS)
    finally:
        for rank in range(2):
            if agent.poll() is None:
                agent.kill()
                agent.wait()
            left = worker(log, rank)
            if left is not None:
                os.kill(left, signal.SIGKILL)
    told = (tmp_path / "agent.log").read_text()
    assert agent.returncode == 0, told[-3000:]
    assert "from memory" in told
    found = rows(log)
    iterations = [row["iteration"] for row in found]
    back = [after for before, after in pairwise(iterations) if after != before + 1]
    assert len(back) <= 1 and all(after >= 3 for after in back), f"lost more than a snapshot: {iterations}"
    for rank, result in enumerate(run_ranks(undisturbed, 2, stand_in=False)):
        losses, hashes = result.value
        assert [row["loss_hex"] for row in found] == [losses[iteration - 1] for iteration in iterations]
        assert json.loads((final / f"rank{rank}.json").read_text()) == hashes
    assert iterations[-1] == ITERATIONS
    assert not list(arena_root.iterdir()), "an ended job left something behind"


def rows(log: Path) -> list[dict[str, Any]]:
    """Whole lines of the log."""
    return (
        [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if log.exists()
        else []
    )
