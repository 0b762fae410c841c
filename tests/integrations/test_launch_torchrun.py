"""The launch scripts with real ranks: a rank dies, and the job resumes from memory to the same losses."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftckpt.persist.backend import open_storage
from tests.components.launch_standins import Standins
from tests.support.launching import ITERATIONS, Launched
from tests.support.processes import free_ports
from tests.support.repository import ROOT
from tests.support.storages import committed

pytestmark = [pytest.mark.multiproc, pytest.mark.faults, pytest.mark.timeout(600)]

TRAINING = [
    *(str(ROOT / "launch" / "train_gpt.py"), "--pp", "2", "--layers", "2", "--hidden", "32", "--seq", "32"),
    *("--global-batch", "8", "--micro-batch", "2"),
]


@pytest.fixture
def launched(tmp_path: Path, arena_root: Path) -> Iterator[Launched]:
    job = Launched(tmp_path, arena_root, TRAINING)
    del job.env["FTCKPT_LAUNCHER"]
    yield job
    job.stop()


@pytest.mark.slow
def test_torchrun_on_two_nodes(launched: Launched) -> None:
    cores = sorted(os.sched_getaffinity(0))
    lists = f"{cores[0]} {cores[-1]}"
    endpoint, job = f"127.0.0.1:{free_ports(1)}", f"test-{uuid.uuid4().hex[:8]}"
    for rank, node in enumerate(("a", "b")):
        options = ["--job", job, "--nodes", "2", "--endpoint", endpoint, "--node-rank", str(rank), "--nproc", "2"]
        options += ["--rdzv-conf", "last_call_timeout=1", "--cores", lists, "--restarts", "2"]
        script = str(ROOT / "launch" / "torchrun.sh")
        launched.start(["bash", script, *options, *launched.training], FTCKPT_NODE=node)
    launched.wait_for("snapshots", lambda: launched.events(2, "snapshot"))
    for rank in range(4):
        (pid,) = {event["pid"] for event in launched.events(rank, "joined")}
        assert os.sched_getaffinity(pid) == {cores[-1] if rank % 2 else cores[0]}
    launched.kill_rank(3)
    launched.finish()
    launched.check_went_on()
    joined = [event for rank in range(4) for event in launched.events(rank, "joined")]
    assert {event["job"] for event in joined} == {job} and {event["node"] for event in joined} == {"a", "b"}


@pytest.mark.slow
def test_a_pod_that_is_deleted_goes_on_from_storage_in_another_place(
    launched: Launched, arena_root: Path, tmp_path: Path
) -> None:
    """The first process of the pod gets SIGTERM, no other, and its memory goes with it."""
    (storage := tmp_path / "storage").mkdir()
    job = f"test-{uuid.uuid4().hex[:8]}"
    options = ["--job", job, "--nproc", "2", *launched.training, "--ftckpt-persist", str(storage)]
    command = ["bash", str(ROOT / "launch" / "torchrun.sh"), *options]
    pod = launched.start(command, FTCKPT_NODE="pod")
    saved = launched.stop_and_save(pod, storage)
    launched.kill()  # the SMP is the last process of the pod
    shutil.rmtree(arena_root / f"ftckpt-{job}")
    launched.start(command, FTCKPT_NODE="another")
    launched.finish()
    launched.check_went_on()
    (restored,) = [event for event in launched.events(0, "restored") if event["iteration"]]
    assert (restored["iteration"], restored["source"]) == (saved, "storage")
    assert committed(open_storage(str(storage)))[0] == ITERATIONS, "the end of the job is there, too"


@pytest.mark.slow
def test_a_frontier_step_that_failed(launched: Launched, tmp_path: Path) -> None:
    """Slurm's steps, with all tasks on this machine: a second step of the same allocation resumes."""
    standins = Standins(tmp_path / "slurm", ("srun", "scontrol"))
    standins.run_tasks()
    allocation, user = f"{uuid.uuid4().int % 10**9}", f"test-{os.getpid()}"
    env = standins.slurm("localhost", "127.0.0.1", SLURM_JOB_ID=allocation, USER=user)
    env["PATH"] = f"{standins.bin}:{os.environ['PATH']}"
    options = ["--nproc", "2", "--steps", "4", "--port", str(free_ports(4))]
    try:
        launched.start([*standins.command("frontier.sbatch"), *options, *launched.training], **env)
        launched.kill_rank(1)
        launched.finish()
    finally:
        for folder in Path("/tmp").glob(f"miopen-{user}-{allocation}-*"):
            folder.rmdir()
    assert len(standins.steps()) >= 2  # more where another process took a port
    launched.check_went_on()
    joined = [event for rank in range(4) for event in launched.events(rank, "joined")]
    assert {event["job"] for event in joined} == {f"slurm-{allocation}"}
    assert {event["node"] for event in joined} == {"localhost", "127.0.0.1"}
