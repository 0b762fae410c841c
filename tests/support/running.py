"""Jobs of ``ftckpt run`` and of torchrun, whose agents are forked from the pool: none of them imports torch first."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.pool import RankGroup, spawn_ranks
from tests.support.processes import started_with
from tests.support.waiting import until

_OWNER_VAR = "FTCKPT_TEST_OWNER"
READY = "modules are preloaded"
SECS = 60.0

REPORT = """
import json, os, pathlib, random, signal, sys
is_forked: bool = "wave" in sys.modules
import wave, csv  # the last one is not noted before another one is sought
here = pathlib.Path(os.environ["FTCKPT_TEST_OWNER"])
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]

def report():
    facts = {
        "env": dict(os.environ), "argv": sys.argv, "path": sys.path, "name": __name__, "cwd": os.getcwd(),
        "main": sys.modules["__main__"].__dict__ is globals(), "modules": sorted(sys.modules), "file": __file__,
        "fds": sorted(os.readlink(fd) for n in range(3, 64) if os.path.exists(fd := f"/proc/self/fd/{n}")),
        "session": os.getsid(0) == os.getpid(), "random": random.random(), "pid": os.getpid(), "is_forked": is_forked,
        "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "unbuffered": sys.stdout.write_through, "flags": str(sys.flags),
        "annotations": str(__annotations__), "doc": __doc__, "globals": sorted(globals()),
    }
    (here / "reports").mkdir(exist_ok=True)
    fresh = here / f"{attempt}-{rank}"
    fresh.write_text(json.dumps(facts))
    fresh.rename(here / "reports" / f"{attempt}-{rank}.json")

def wait_for(name):
    import time
    while not (here / name).exists():
        time.sleep(0.01)
"""
"""The beginning of each script of a test."""


def _run(_rank: int, _size: int, here: Path, words: Sequence[str], launcher: str, quiet_secs: float) -> None:
    import torch.distributed.run as torchrun

    from ftckpt.runner import agent, preload

    os.chdir(here)
    with open(here / "out", "ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    preload._QUIET_SECS = quiet_secs
    try:
        if launcher == "torchrun":
            torchrun.main(list(words))
        else:
            agent.launch(words)
    except Exception as error:  # noqa: BLE001 - as the interpreter ends then
        print(f"ended by {type(error).__name__}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


class Running:
    """One job, in a directory of its own; leaving it kills what is left of it."""

    def __init__(self, here: Path, script: str, *words: str, launcher: str = "ftckpt", **env: str) -> None:
        here.mkdir(exist_ok=True)
        self.here = here
        self.reports = here / "reports"
        (here / "train.py").write_text(REPORT + script)
        env = {_OWNER_VAR: str(here), "TMPDIR": str(here), "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}", **env}
        env["PYTHONPATH"] = os.pathsep.join([str(here / "site-packages"), *sys.path[:2], env["PYTHONPATH"]])
        self.group: RankGroup = spawn_ranks(
            _run, 1, here, words, launcher, 0.2, env=env, init_process_group=False, stand_in=False
        )

    @property
    def agent(self) -> int:
        return self.group.pids[0]

    def output(self) -> str:
        return (self.here / "out").read_text() if (self.here / "out").exists() else ""

    def end(self) -> int:
        """The exit code."""
        assert self.group.wait(SECS) is not None, self.output()
        code = self.group.results()[0].exitcode
        assert code is not None
        return code

    def until(self, text: str, times: int = 1) -> None:
        """Until the job has written ``text`` so often."""
        until(lambda: self.output().count(text) >= times or not self.group.alive(), self.output, SECS)
        assert self.output().count(text) >= times, self.output()

    def touch(self, name: str) -> None:
        """Release scripts that wait for this file."""
        (self.here / name).touch()

    def report(self, attempt: int, rank: int) -> dict[str, Any]:
        """Facts that the script of a worker has reported of itself."""
        path = self.reports / f"{attempt}-{rank}.json"
        until(path.exists, self.output, SECS)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def attempts(self) -> int:
        return 1 + max(int(re.match(r"\d+", path.name)[0]) for path in self.reports.iterdir())  # type: ignore[index]

    def pids(self) -> list[int]:
        """All processes of the job but its agent."""
        return [pid for pid in started_with(f"{_OWNER_VAR}={self.here}") if pid != self.agent]

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.group.close()
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
