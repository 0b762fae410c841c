"""A Slurm cluster of two nodes on this machine, and a small job on it."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import pytest

from ftckpt.cli.main import main
from tests.support.processes import command_line, free_ports, mounts_of, running
from tests.support.repository import ROOT
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
        """The output of a client."""
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
        """The output of the job."""
        path = self.root / "out"
        return path.read_text() if path.exists() else ""

    def state(self, job: str) -> str:
        """The state of a job, empty when it has ended and is forgotten."""
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
        port = free_ports(1 + len(NODES))
        lines = [
            f"NodeName={node} NodeHostName={host} NodeAddr=127.0.0.1 Port={node_port} CPUs=64 RealMemory=2000 "
            "Gres=gpu:8 State=UNKNOWN\n" for node, node_port in zip(NODES, (port + 1, port + 2), strict=True)
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
        """The number of idle nodes."""
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


_MODEL = ["--layers", "2", "--hidden", "32", "--seq", "32", "--global-batch", "8", "--micro-batch", "2"]


class SlurmJob:
    """Two ranks on each of two nodes that train until they are stopped; storage gets the final flush alone."""

    NAME = "life"

    def __init__(
        self,
        lab: SlurmLab,
        script: str = "a100.sbatch",
        options: Sequence[str] = ("--time=30", "--requeue"),
        persists: bool = True,
    ) -> None:
        self.lab, self.log, self.stored = lab, lab.root / "log.jsonl", lab.root / "stored"
        self.stored.mkdir(exist_ok=True)
        env = {
            "FTCKPT_DEVICE": "tests.standin:cpu", "FTCKPT_PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
            "FTCKPT_RESTARTS": "3",
            "GLOO_SOCKET_IFNAME": "lo", "FTCKPT_SAVE_SECS": "30", "FTCKPT_WAIT_SECS": "10", "FTCKPT_PAUSE_SECS": "1",
        }  # fmt: skip
        storage = {"persist": str(self.stored), "persist-interval": "1000000"}
        ftckpt = {"layouts": "tp1pp1", "interval": "1", **(storage if persists else {})}
        flags = [word for name, value in ftckpt.items() for word in (f"--ftckpt-{name}", value)]
        training = ["launch/train_gpt.py", *_MODEL, "--iterations", "1000000", "--log-file", str(self.log)]
        training = [*training, "--ftckpt", *flags]
        command = [f"launch/{script}", "--nodes", "1:2", "--nproc", "2", "--job", self.NAME, *training]
        self.number = lab.submit(["--nodes=2", *options], command, ROOT, env)
        self._read = 0

    @property
    def iteration(self) -> int:
        """The last one that was trained."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return int(json.loads(lines[-1])["iteration"]) if lines else 0

    def memory(self, *nodes: str) -> list[Path]:
        """The job's memory on some nodes."""
        return [path for node in nodes for path in self.lab.memory(node).glob(f"ftckpt-{self.NAME}*")]

    def saved(self) -> int:
        """The iteration that a restart would take from storage, every byte read."""
        with redirect_stdout(StringIO()) as told:
            assert main(["verify", str(self.stored)]) == 0
        return int(told.getvalue().split()[-1])

    def smps(self) -> list[int]:
        """Processes of the SMPs."""
        return sorted(pid for node in NODES for pid in self.lab.pids(node, "-m ftckpt.smp"))

    def runs(self) -> float:
        """When it began to run, which it does soon: time since the epoch, in seconds."""
        until(lambda: self.lab.state(self.number) == "RUNNING", self.lab.logs)
        return time.time()

    def ends(self, within_secs: float) -> None:
        until(lambda: self.lab.state(self.number) not in ("RUNNING", "COMPLETING"), self.lab.logs, within_secs)

    def trains_beyond(self, iteration: int) -> None:
        until(lambda: self.iteration >= iteration, self.lab.logs, 120)

    def says(self, text: str) -> re.Match[str]:
        """Wait for output that matches ``text`` and comes after the last match."""
        found: re.Match[str] | None = None

        def look() -> bool:
            nonlocal found
            found = re.search(text, self.lab.out()[self._read :])
            return found is not None

        until(look, lambda: f"{text}{self.lab.logs()}", 120)
        assert found is not None
        self._read += found.end()
        return found
