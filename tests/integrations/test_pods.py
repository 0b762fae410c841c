"""Jobs of two pods by the manifests: containers and pods die or are deleted; the job restarts."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ftckpt.cli.main import main
from ftckpt.memory.directory import SMP_LOCK_NAME
from tests.integrations.pod_lab import Cluster, Pod, Provided, python_image
from tests.support.processes import command_line, running
from tests.support.repository import ROOT
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults, pytest.mark.slow]

MODEL = [
    "--layers",
    "2",
    "--hidden",
    "32",
    "--seq",
    "32",
    "--global-batch",
    "8",
    "--log-file",
    "/checkpoints/log.jsonl",
]
FLAGS = ["--ftckpt-interval", "1", "--ftckpt-persist-interval", "1000000"]
"""Only the end of a pod flushes anything."""
LAG = 10
"""Iterations without a snapshot: on a busy machine some are skipped while the SMPs protect an earlier one."""
SETTLED = 100
"""Iterations, of some hundredths of a second, after a restart, by which the SMPs of all nodes know of it."""


class Job:
    """The job of a manifest, with a model that trains on two cores."""

    def __init__(self, cluster: Cluster, kind: str, *, shares_pids: bool = True, iterations: int = 1_000_000) -> None:
        self.cluster, self.kind, self.stored = cluster, kind, cluster.provided.claims["checkpoints"] / "run1"
        manifest = yaml.safe_load((ROOT / "launch" / "k8s" / f"{kind}.yaml").read_text())
        if kind == "jobset":
            pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        else:
            pod = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
        self.spec = copy.deepcopy(pod["spec"])
        self.spec["shareProcessNamespace"] &= shares_pids
        (self.trainers,) = self.spec["containers"]
        words = self.trainers["args"]
        words[words.index("--nproc") + 1], words[words.index("--iterations") + 1] = "2", str(iterations)
        words += [*MODEL, *FLAGS]
        self.pods = [self.start(number) for number in range(2)]
        self._read: dict[Path, int] = {}

    def start(self, number: int) -> Pod:
        """The pod of a node, as its controller makes it: its host name, who finds it by which names, its number."""
        if self.kind == "jobset":
            host, env = f"run1-node-0-{number}", {"JOB_COMPLETION_INDEX": str(number)}
            return self.cluster.start(self.spec, host, [f"{host}.run1"], env)
        host = f"run1-{'worker-0' if number else 'master-0'}"
        env = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "run1-master-0", "MASTER_PORT": "23456"}
        return self.cluster.start(self.spec, host, [], {**env, "PYTHONUNBUFFERED": "0", "PET_NODE_RANK": str(number)})

    @property
    def iteration(self) -> int:
        """The last one that was trained."""
        lines = self._lines()
        return int(json.loads(lines[-1])["iteration"]) if lines else 0

    def trains_on(self, iterations: int) -> int:
        """Until so many more are trained; returns the last one."""
        wanted = len(self._lines()) + iterations
        until(lambda: len(self._lines()) >= wanted, self.told, 120)
        return self.iteration

    def _lines(self) -> list[str]:
        """One of each iteration, and another one where it was trained again."""
        log = self.stored / "log.jsonl"
        return log.read_text().splitlines() if log.exists() else []

    def told(self) -> str:
        return f"{[pod.problem for pod in self.pods]}{self.cluster.logs()}"

    def says(self, text: str) -> re.Match[str]:
        """Waits for a match in the new output of the trainers' containers since the last call."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            for log in self.cluster.root.glob(f"pod*/{self.trainers['name']}.log"):
                match = re.compile(text).search(log.read_text(), self._read.get(log, 0))
                if match:
                    self._read[log] = match.end()
                    found.append(match)
            return bool(found)

        until(look, lambda: f"{text}{self.told()}", 150)
        return found[0]

    def smp(self, number: int) -> int:
        """The process that serves as the SMP of a node, as this test's namespace has it."""
        mounts = {
            *self.pods[number].container("smp").pids(),
            *self.pods[number].container(self.trainers["name"]).pids(),
        }
        serving = [pid for pid in mounts if pid in _lock_holders(self.pods[number])]
        return serving[0] if serving else 0

    def delete(self) -> list[str]:
        """All pods at once: containers that had to be killed."""
        killed: list[str] = []
        threads = [threading.Thread(target=lambda pod=pod: killed.extend(pod.delete())) for pod in self.pods]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return killed


def _lock_holders(pod: Pod) -> set[int]:
    """Processes that have the lock of the pod's SMP, by the kernel's table."""
    lock = pod.inside("memory") / "ftckpt-run1" / pod.hostname / SMP_LOCK_NAME
    try:
        inode = lock.stat()
    except OSError:
        return set()
    name = f"{os.major(inode.st_dev):02x}:{os.minor(inode.st_dev):02x}:{inode.st_ino}"
    rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return {int(row[4]) for row in rows if row[5] == name}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    env = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    secret = {"run1-ftckpt": {"secret": os.urandom(32)}}
    with Cluster(Provided(python_image(), env, {"checkpoints": tmp_path}, secret)) as one:
        yield one
    assert not [pid for pid in running() if str(one.root) in command_line(pid)]


def iteration_at(job: Job, capsys: pytest.CaptureFixture[str]) -> int:
    """That a restart would take from storage, every byte read."""
    capsys.readouterr()
    assert main(["verify", str(job.stored)]) == 0, job.told()
    return int(capsys.readouterr().out.split("_")[-1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shares_pids", [True, False], ids=["pids of the pod", "pids of each container"])
def test_a_whole_life(cluster: Cluster, shares_pids: bool, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(cluster, "jobset", shares_pids=shares_pids)
    job.says(r"4 ranks: nothing to restore")
    job.trains_on(10)
    sidecar, trainers = (job.pods[1].container(name) for name in ("smp", "train"))
    assert job.smp(1) in sidecar.pids(), "the SMP does not run in its sidecar"

    # A container of trainers is killed: the memory stays with the pod, and the SMP in its sidecar.
    smp, before = job.smp(1), job.iteration
    trainers.kill()
    assert int(job.says(r"4 ranks: iteration (\d+) from memory")[1]) >= before - LAG
    assert job.smp(1) == smp and sidecar.starts == 1 and trainers.starts == 2
    job.trains_on(20)

    # The SMP is killed: trainers start another one. The sidecar stands by until that ends with their container.
    before = job.iteration
    sidecar.kill()
    until(lambda: job.smp(1) not in (0, smp), job.told)
    until(lambda: sidecar.starts == 2 and sidecar.pid != 0, job.told)
    until(lambda: "standing by" in cluster.logs(), job.told)
    assert sidecar.probe("livenessProbe"), "a sidecar that stands by would be killed"
    job.trains_on(20)
    before = job.iteration
    trainers.kill()
    assert int(job.says(r"4 ranks: iteration (\d+) from memory")[1]) >= before - LAG
    until(lambda: job.smp(1) in sidecar.pids(), job.told)
    job.trains_on(20)

    # A pod is lost with its memory, and another one comes at another address.
    before = job.iteration
    job.pods[1].kill()
    job.pods[1] = job.start(1)
    rebuilt = job.says(r"4 ranks: iteration (\d+) from (.*)")
    assert 0 < int(rebuilt[1]) <= before + 1 and "parity" in rebuilt[2] and "storage" not in rebuilt[2], rebuilt[0]
    job.trains_on(SETTLED)
    assert not list(job.stored.glob("iter_*"))

    # The job is deleted: what memory has is on storage before the grace ends.
    assert job.delete() == []
    trained = job.iteration
    saved = iteration_at(job, capsys)
    assert trained - LAG <= saved <= trained + 1

    # It comes again, and goes on from there.
    job.pods = [job.start(number) for number in range(2)]
    assert int(job.says(r"4 ranks: iteration (\d+) from [^\n]*storage")[1]) == saved
    job.trains_on(5)


@pytest.mark.timeout(400)
def test_the_pod_where_ranks_meet_is_lost(cluster: Cluster) -> None:
    job = Job(cluster, "pytorchjob")
    job.says(r"4 ranks: nothing to restore")
    before = job.trains_on(20)
    job.pods[0].kill()
    job.pods[0] = job.start(0)
    rebuilt = job.says(r"4 ranks: iteration (\d+) from (.*)")
    assert 0 < int(rebuilt[1]) <= before + 1 and "parity" in rebuilt[2], rebuilt[0]
    job.trains_on(SETTLED)
    assert job.delete() == [] and len(list(job.stored.glob("iter_*"))) == 1


def test_a_job_that_ends_leaves_nothing_and_its_pods_succeed(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(cluster, "jobset", iterations=40)
    until(lambda: all(pod.has_succeeded for pod in job.pods), job.told, 150)
    assert job.iteration == iteration_at(job, capsys) == 40
    for pod in job.pods:
        assert not list(pod.inside("memory").iterdir()), cluster.logs()
    assert job.delete() == []
