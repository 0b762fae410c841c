"""Stand-ins for what launch scripts call."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT

STANDIN = r"""#!{python} -SE
import json, os, pathlib, signal, subprocess, sys, time
here, name, argv = pathlib.Path({here!r}), os.path.basename(sys.argv[0]), sys.argv[1:]

def record():
    line = {{"name": name, "argv": argv, "env": dict(os.environ), "cores": sorted(os.sched_getaffinity(0))}}
    line["env"]["ENDED"] = str((here / "ended").exists())
    with open(here / "calls.jsonl", "ab", buffering=0) as out:
        out.write(json.dumps(line).encode() + b"\n")

def next_code():
    left = json.loads((here / "codes.json").read_text())
    (here / "codes.json").write_text(json.dumps(left[1:]))
    return left[0] if left else 0

def say_verdict(argv):
    if "ended" in argv and "--forget" not in argv and (here / "verdict").exists():
        print((here / "verdict").read_text())

def srun():
    options = dict(word[2:].partition("=")[::2] for word in argv if word.startswith("--"))
    command = argv[next(i for i, word in enumerate(argv) if not word.startswith("--")):]
    nodes = options["nodelist"].split(",")
    if "overlap" in options:
        say_verdict(argv)
        parent, end = os.getppid(), time.monotonic() + 60
        while any(word.endswith("/smp_step.sh") for word in argv) and not (here / "preempted").exists():
            if os.getppid() != parent or time.monotonic() > end:
                break  # it ends with the job
            time.sleep(0.02)
        dead = json.loads((here / "dead.json").read_text())
        return int(nodes[0] in dead)
    if not (here / "run").exists():
        code = next_code()
        if code == "hang":
            time.sleep(60)  # until it is killed
        if str(code).startswith("smps:"):  # it takes longer than to start so many SMPs
            calls, end = here / "calls.jsonl", time.monotonic() + 30
            while calls.read_text().count("/smp_step.sh") < int(code[5:]) and time.monotonic() < end:
                time.sleep(0.02)
            return 0
        if str(code).startswith("dead:"):
            (here / "dead.json").write_text(json.dumps(code[5:].split(",")))
            return 1
        return code
    per_node, tasks = int(options["ntasks-per-node"]), []
    for task in range(int(options["ntasks"])):
        node, local = divmod(task, per_node)
        slurm = {{"SLURM_PROCID": task, "SLURM_NTASKS": options["ntasks"], "SLURM_LOCALID": local,
                 "SLURM_NODEID": node, "SLURMD_NODENAME": nodes[node]}}
        tasks.append(subprocess.Popen(command, env={{**os.environ, **{{k: str(v) for k, v in slurm.items()}}}}))
    def stop(*_):
        for task in tasks:
            task.kill()
        sys.exit(1)
    signal.signal(signal.SIGTERM, stop)
    while any(task.poll() is None for task in tasks):
        if any(task.poll() for task in tasks):
            stop()  # --kill-on-bad-exit
        time.sleep(0.02)
    return max(map(abs, (task.returncode for task in tasks)))

record()
if name == "scontrol" and argv[:2] == ["show", "job"]:
    print("   PreemptTime=" + ("2026-11-25T21:18:35" if (here / "preempted").exists() else "None"))
elif name == "scontrol":
    print(argv[-1].replace(",", "\n"))
elif name == "srun":
    sys.exit(srun())
elif name == "python3" and "--nnodes" not in argv:
    say_verdict(argv)
elif "save" not in argv:
    code = next_code()
    if code == "hang":
        time.sleep(60)  # until it is killed
    if code == "slow":
        def end(*_):
            time.sleep(2)
            (here / "ended").touch()
            sys.exit(1)
        signal.signal(signal.SIGTERM, end)
        (here / "ready").touch()
        time.sleep(60)
    sys.exit(code)
"""


@dataclass(frozen=True)
class Call:
    """One call of a stand-in."""

    name: str
    argv: list[str]
    env: dict[str, str]
    cores: list[int]

    def after(self, word: str) -> str:
        """The argument that follows ``word``."""
        return self.argv[self.argv.index(word) + 1]

    @property
    def options(self) -> dict[str, str]:
        """Options given as ``--name=value`` before the first other word."""
        words = itertools.takewhile(lambda word: word.startswith("--"), self.argv)
        return dict(word.partition("=")[::2] for word in words)


class Standins:
    """A directory of stand-ins, to be put first on PATH."""

    def __init__(self, here: Path, names: Sequence[str]) -> None:
        self.here = here
        self.bin = here / "bin"
        self.bin.mkdir(parents=True)
        for name in names:
            path = self.bin / name
            path.write_text(STANDIN.format(python=sys.executable, here=str(here)))
            path.chmod(0o755)
        self.script = here / "train.py"
        self.script.write_text("print('never run')\n")
        self.codes()
        self.dead()

    def codes(self, *codes: int | str) -> None:
        """Exit codes of the next steps, then 0. ``hang`` sleeps; ``slow`` ends long after SIGTERM; ``dead:n1,n2``
        fails and leaves these nodes dead; ``smps:2`` ends well once two SMPs were started."""
        (self.here / "codes.json").write_text(json.dumps(codes))

    def verdict(self, code: int, reason: str) -> None:
        """Set the final verdict with which a rank has ended the run."""
        (self.here / "verdict").write_text(f"{code} {reason}")

    def preempted(self) -> None:
        """Another job takes the nodes, and SMPs have been asked to end."""
        (self.here / "preempted").touch()

    def dead(self, *nodes: str) -> None:
        """Nodes that do not answer."""
        (self.here / "dead.json").write_text(json.dumps(nodes))

    def run_tasks(self) -> None:
        """From now on srun starts the tasks of a step, all on this machine."""
        (self.here / "run").touch()

    def environment(self, **env: str) -> dict[str, str]:
        keep = {key: os.environ[key] for key in ("HOME", "LANG") if key in os.environ}
        return {**keep, "PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin", **env}

    def slurm(self, *nodes: str, **env: str) -> dict[str, str]:
        """The environment of a batch script that was submitted from the repository."""
        slurm = {
            "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": ",".join(nodes), "SLURM_SUBMIT_DIR": str(ROOT),
            "FTCKPT_PAUSE_SECS": "0", "FTCKPT_WAIT_SECS": "10",
        }  # fmt: skip
        return self.environment(**{**slurm, **env})

    def command(self, script: str, *arguments: str) -> list[str]:
        """Batch scripts run as a copy in a directory of Slurm's."""
        path = ROOT / "launch" / script
        if path.suffix == ".sbatch":
            spool = self.here / "spool"
            spool.mkdir(exist_ok=True)
            path = Path(shutil.copy(path, spool / "slurm_script"))
        return ["bash", str(path), *arguments]

    def launch(self, script: str, *arguments: str, env: dict[str, str] | None = None) -> Any:
        """Run a script of ``launch/`` to its end, from an empty directory."""
        (self.here / "cwd").mkdir(exist_ok=True)
        return subprocess.run(
            self.command(script, *arguments), cwd=self.here / "cwd", env=env or self.environment(),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def calls(self, name: str) -> list[Call]:
        path = self.here / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [call for call in (Call(**json.loads(line)) for line in lines) if call.name == name]

    def steps(self) -> list[Call]:
        """The calls of srun that start the job."""
        return [call for call in self.calls("srun") if "--overlap" not in call.argv]

    def cleaned(self) -> set[str]:
        """Nodes on which arenas were deleted."""
        return {c.options["--nodelist"] for c in self.calls("srun") if "clean" in c.argv and "--overlap" in c.argv}
