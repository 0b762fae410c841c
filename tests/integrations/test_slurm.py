"""The batch scripts on real Slurm daemons: two nodes with memories of their own. A job's life, and its ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.integrations.slurm_lab import GRACE_SECS, NODES, SlurmJob, SlurmLab
from tests.support.repository import ROOT
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults, pytest.mark.slow]

BATCH = ["a100.sbatch", "frontier.sbatch"]


@pytest.fixture
def lab() -> Iterator[SlurmLab]:
    with SlurmLab() as cluster:
        yield cluster


@pytest.mark.timeout(400)
def test_a_whole_life(lab: SlurmLab) -> None:
    job = SlurmJob(lab)
    job.says(r"4 ranks: nothing to restore")
    job.trains_beyond(10)

    # A rank is killed: its agent starts all again, from memory.
    before = job.iteration
    os.kill(lab.pids("node1", "-m ftckpt.runner.worker")[-1], signal.SIGKILL)
    assert int(job.says(r"4 ranks: iteration (\d+) from memory")[1]) >= before - 2
    job.trains_beyond(before + 100)

    # A node is lost with its memory, and no spare is there: the next step goes on with the other one, from parity.
    before = job.iteration
    smps = lab.pids("node0", "-m ftckpt.smp")
    lab.lose_node("node1")
    job.says(r"do not answer: node1")
    rebuilt = int(job.says(r"2 ranks: iteration (\d+) from \S*parity")[1])
    assert 0 < rebuilt <= before + 1
    job.trains_beyond(before + 30)
    assert set(smps) & set(lab.pids("node0", "-m ftckpt.smp")), "the SMP did not outlive the step"

    # Time is up: what memory has goes to storage before the memory is emptied. Requeued, the job goes on from there.
    lab.call("scontrol", "requeue", job.number)
    job.says(r"told to stop")
    until(lambda: lab.state(job.number) == "PENDING", lab.logs)
    assert not job.memory("node0")
    saved = job.saved()
    assert saved >= before + 28
    lab.start_node("node1")
    lab.call("scontrol", "update", "nodename=node1", "state=resume")
    from_storage = int(job.says(r"ranks: iteration (\d+) from [^\n]*storage")[1])
    assert from_storage == saved
    job.trains_beyond(saved + 10)
    lab.call("scancel", job.number)
    until(lambda: not lab.state(job.number), lab.logs, 90)
    left = job.memory(*NODES)
    assert not left, f"{left}{lab.out()[-3000:]}"


def test_frontier(lab: SlurmLab) -> None:
    """A rank is killed, the job is requeued, and ends on request."""
    job = SlurmJob(lab, "frontier.sbatch")
    job.says(r"4 ranks: nothing to restore")
    job.trains_beyond(10)

    # The step ends with a rank, and the SMP is not in it.
    before, smps = job.iteration, job.smps()
    os.kill(lab.pids("node1", "-u -m ftckpt.megatron")[-1], signal.SIGKILL)
    job.says(r"step 2 of at most")
    assert int(job.says(r"4 ranks: iteration (\d+) from memory")[1]) >= before - 2
    assert job.smps() == smps, "an SMP did not outlive the step"
    job.trains_beyond(before + 30)

    lab.call("scontrol", "requeue", job.number)
    until(lambda: lab.state(job.number) == "PENDING", lab.logs)
    left = job.memory(*NODES)  # before it begins again
    saved = job.saved()
    assert saved >= before + 28 and not left, f"{left}{lab.out()[-3000:]}"
    assert int(job.says(r"4 ranks: iteration (\d+) from [^\n]*storage")[1]) == saved
    job.trains_beyond(saved + 10)

    # The notice, to the script alone: SMPs that go on must not keep the allocation until the limit.
    lab.call("scancel", "--batch", "--signal=TERM", job.number)
    job.ends(within_secs=60)
    assert job.saved() >= saved + 8 and not job.memory(*NODES)


def test_a_requeued_job_without_storage(lab: SlurmLab) -> None:
    """It resumes from the memory of the nodes to which it returns."""
    job = SlurmJob(lab, persists=False)
    job.trains_beyond(10)
    lab.call("scontrol", "requeue", job.number)
    until(lambda: lab.state(job.number) == "PENDING", lab.logs)
    before = job.iteration
    assert len(job.memory(*NODES)) == len(NODES), lab.logs()
    assert int(job.says(r"4 ranks: iteration (\d+) from memory")[1]) >= before - 2
    job.trains_beyond(before + 10)


def test_the_notice_of_the_time_limit(lab: SlurmLab) -> None:
    """The script's own --signal: storage has the snapshot before the limit, and the next job resumes."""
    job = SlurmJob(lab, options=["--time=3"])
    after = SlurmJob(lab, options=[f"--dependency=afternotok:{job.number}", "--time=30"])
    limit = job.runs() + 180
    job.trains_beyond(10)
    job.says("told to stop")
    before = job.iteration
    job.ends(within_secs=60)
    assert time.time() < limit and "DUE TO TIME LIMIT" not in lab.out()
    saved = job.saved()
    assert saved >= before - 1
    assert int(after.says(r"4 ranks: iteration (\d+) from [^\n]*storage")[1]) == saved
    after.trains_beyond(saved + 10)


def test_a_time_limit_without_notice(lab: SlurmLab) -> None:
    """Slurm ends all steps at once: the SMPs save within KillWait."""
    job = SlurmJob(lab, options=["--time=1", "--signal=B:CONT@1"])
    after = SlurmJob(lab, options=[f"--dependency=afternotok:{job.number}", "--time=30"])
    job.trains_beyond(10)
    job.says("DUE TO TIME LIMIT")
    before = job.iteration
    job.ends(within_secs=60)
    saved = job.saved()
    assert saved >= before - 1
    assert int(after.says(r"4 ranks: iteration (\d+) from [^\n]*storage")[1]) == saved
    after.trains_beyond(saved + 10)


@pytest.mark.parametrize("script", BATCH)
def test_another_job_takes_the_nodes(lab: SlurmLab, script: str) -> None:
    """The steps get the notice GraceTime before the end: all is saved before half of it is over."""
    job = SlurmJob(lab, script)
    job.trains_beyond(10)
    done = lab.root / "done"
    wait = f"until [ -e {done} ]; do sleep 0.2; done"
    begun = time.monotonic()
    urgent = lab.submit(["--partition=urgent", "--nodes=2", "--exclusive", "--time=5"], ["--wrap", wait], ROOT, {})
    job.says("another job takes the nodes")
    before = job.iteration
    until(lambda: lab.state(urgent) == "RUNNING", lab.logs)
    assert time.monotonic() - begun < GRACE_SECS, "the job kept its nodes until the grace was over"
    assert lab.state(job.number) == "PENDING" and "step 2 of" not in lab.out(), lab.logs()
    saved = job.saved()
    assert saved >= before - 1 and not job.memory(*NODES)
    done.touch()
    assert int(job.says(r"4 ranks: iteration (\d+) from [^\n]*storage")[1]) == saved
    job.trains_beyond(saved + 10)
