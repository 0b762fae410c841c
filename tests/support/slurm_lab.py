"""A Slurm cluster of two nodes on this machine: real daemons of Debian's packages, under root.

Each node has mounts of its own: a /dev/shm that nobody else has, and names of both nodes in /etc/hosts. A node has
eight GPUs for which empty files stand, so that scripts which ask for them are scheduled. What a step has started ends
with it (``proctrack/cgroup``), as on most clusters.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.processes import command_line, mounts_of, running
from tests.support.s3_server import free_ports
from tests.support.waiting import until

NODES = ("node0", "node1")
GRACE_SECS = 60
"""From the notice to the end of a job in the partition ``lab``, where one in ``urgent`` takes its nodes."""
_DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare")
_CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first_job}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge.sock,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
ReturnToService=1
SlurmdParameters=config_overrides
SlurmdTimeout=5
MessageTimeout=5
KillWait=10
RequeueExit=75
AllowSpecResourcesUsage=YES
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=2 PreemptMode=OFF
"""


def may_run() -> str:
    """Why no cluster can run here; empty if one can."""
    missing = [name for name in _DAEMONS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
    if os.geteuid():
        return "a cluster of one's own needs root"
    return "" if Path("/sys/fs/cgroup/freezer").is_dir() else "no cgroup freezer of version 1"


class SlurmLab:
    """Use as a context; ``env`` is that of its clients."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ftckpt-test-slurm-"))
        self.env = {**os.environ, "SLURM_CONF": str(self.root / "slurm.conf")}
        self._daemons: dict[str, int] = {}
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmLab:
        if reason := may_run():
            pytest.skip(reason)
        try:
            self._configure()
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def call(self, *command: str, timeout_secs: float = 30.0) -> str:
        """What a client prints."""
        run = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout_secs, check=False)
        assert run.returncode == 0, f"{command}: {run.stderr}{self.logs()}"
        return run.stdout.strip()

    def submit(self, options: Sequence[str], command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> str:
        """The number of a job; its output goes to ``out`` in the lab's directory."""
        exports = ",".join(["ALL", *(f"{name}={value}" for name, value in env.items())])
        batch = ["sbatch", "--parsable", f"--output={self.root}/out", "--open-mode=append", f"--export={exports}"]
        words, own = [*batch, *options, *command], {**self.env, **env}
        run = subprocess.run(words, cwd=cwd, env=own, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    def out(self) -> str:
        """What the job has printed."""
        path = self.root / "out"
        return path.read_text() if path.exists() else ""

    def state(self, job: str) -> str:
        """Of a job, empty when it has ended and is forgotten."""
        jobs = dict(line.split() for line in self.call("squeue", "-h", "-o", "%i %T").splitlines())
        return jobs.get(job, "")

    def pids(self, node: str, words: str) -> list[int]:
        """Processes in the mounts of a node whose command line has ``words``."""
        mounts = mounts_of(self._daemons[node])
        return [pid for pid in running() if mounts_of(pid) == mounts and words in command_line(pid)]

    def memory(self, node: str) -> Path:
        """A node's /dev/shm, seen from here."""
        return Path(f"/proc/{self._daemons[node]}/root/dev/shm")

    def logs(self) -> str:
        """The ends of the logs of all daemons, and what the job has printed."""
        texts = [f"\n--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.root.glob("*.log"))]
        return "".join(texts) + f"\n--- out\n{self.out()[-6000:]}"

    def _configure(self) -> None:
        host = socket.gethostname().partition(".")[0]
        port, *node_ports = free_ports(1 + len(NODES))
        lines = [
            f"NodeName={node} NodeHostName={host} NodeAddr=127.0.0.1 Port={node_port} CPUs=64 RealMemory=2000 "
            "Gres=gpu:8 State=UNKNOWN\n" for node, node_port in zip(NODES, node_ports, strict=True)
        ]  # fmt: skip
        # Control groups are named by node and job: a cluster beside this one would end what is named the same.
        first_job = 1 + secrets.randbelow(1 << 25)
        conf = _CONF.format(host=host, port=port, first_job=first_job, root=self.root, grace=GRACE_SECS)
        head, partition, rest = conf.partition("PartitionName")
        (self.root / "slurm.conf").write_text(head + "".join(lines) + partition + rest)
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.root / "gres.conf").write_text(
            "".join(f"NodeName={node} Name=gpu File={self.root}/gpu[0-7]\n" for node in NODES)
        )
        for number in range(8):
            (self.root / f"gpu{number}").touch()
        (self.root / "hosts").write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 {' '.join(NODES)}\n")
        key = self.root / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.root / name).mkdir()

    def _start(self) -> None:
        files = {"socket": "munge.sock", "key-file": "munge.key", "log-file": "munged.log", "seed-file": "munge.seed",
                 "pid-file": "munged.pid"}  # fmt: skip
        places = [f"--{option}={self.root}/{name}" for option, name in files.items()]
        self._spawn("munged", ["munged", "--foreground", "--force", *places])
        until((self.root / "munge.sock").exists, "munged has no socket", 20)
        self._spawn("slurmctld", ["slurmctld", "-D"])
        for node in NODES:
            self.start_node(node)
        until(lambda: self.idle() == len(NODES), lambda: f"nodes are not idle{self.logs()}")

    def start_node(self, node: str) -> None:
        """A node joins, with empty memory."""
        mounts = [f"--bind {self.root}/hosts /etc/hosts", "-t tmpfs -o size=512m tmpfs /dev/shm"]
        script = [*(f"mount {one}" for one in ("--make-rprivate /", *mounts)), f"exec slurmd -D -N {node}"]
        self._spawn(node, ["unshare", "--mount", "sh", "-c", " && ".join(script)])

    def lose_node(self, node: str) -> None:
        """All processes of a node die at once, and its memory goes with them."""
        for pid in self.pids(node, ""):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # The controller would notice within ``SlurmdTimeout`` and some more seconds.
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def idle(self) -> int:
        """How many nodes are."""
        command = ["sinfo", "-h", "-N", "-p", "lab", "-t", "idle", "-o", "%N"]
        return len(subprocess.run(command, env=self.env, capture_output=True, check=False).stdout.split())

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        with (self.root / f"{name}.err").open("ab") as err:
            child = subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=err, stderr=err)
        self._daemons[name] = child.pid
        self._children.append(child)

    def _stop(self) -> None:
        if "slurmctld" in self._daemons:
            for words in (["--full", "--signal=KILL"], []):
                command = ["scancel", "-u", "root", *words]
                subprocess.run(command, env=self.env, capture_output=True, timeout=20, check=False)
            with suppress(AssertionError):
                until(lambda: not self.call("squeue", "-h"), "jobs do not end", 40)
        for child in reversed(self._children):
            child.send_signal(signal.SIGTERM)
        for child in reversed(self._children):
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(10)
        shutil.rmtree(self.root, ignore_errors=True)
