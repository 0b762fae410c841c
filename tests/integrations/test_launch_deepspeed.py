"""DeepSpeed's own launcher in the loop of launch/deepspeed.sh: ranks die, and no process may be left."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.launching import Launched, deepspeed_config
from tests.support.processes import command_line, free_ports, running
from tests.support.repository import ROOT
from tests.support.waiting import until

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.faults,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]

SCRIPT = str(ROOT / "launch" / "deepspeed.sh")


@pytest.fixture
def launched(tmp_path: Path, arena_root: Path) -> Iterator[Launched]:
    config = deepspeed_config(tmp_path)
    training = [str(ROOT / "launch" / "train_deepspeed.py"), "--deepspeed_config", str(config), "--pp", "2"]
    job = Launched(tmp_path, arena_root, [*training, "--layers", "2", "--hidden", "32", "--seq", "32"])
    job.env |= {"DS_ACCELERATOR": "cpu", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    yield job
    job.stop()


def processes_of(group: int) -> dict[int, str]:
    """Process ids and command lines below a script: it has a session of its own."""
    found = {}
    for pid in running():
        with suppress(OSError):
            if os.getsid(pid) == group:
                found[pid] = command_line(pid)
    return found


def helper_of(script: int) -> int | None:
    """The process of the launcher that has the ranks as its children."""
    return next((pid for pid, line in processes_of(script).items() if "deepspeed.launcher.launch" in line), None)


@pytest.mark.slow
@pytest.mark.timeout(600)  # up to three starts, each with imports of DeepSpeed in four processes
@pytest.mark.parametrize("rank_too", [True, False])
def test_the_script_starts_it_again(launched: Launched, rank_too: bool) -> None:
    job = f"test-{uuid.uuid4().hex[:8]}"
    options = ["--job", job, "--nproc", "2", "--port", str(free_ports(5)), "--restarts", "4"]
    launched.start(["bash", SCRIPT, *options, *launched.training])
    if rank_too:
        launched.kill_rank(1)
        launched.wait_for("a restart", launched.restored)
    else:
        launched.wait_for("three snapshots", lambda: launched.events(1, "snapshot")[2:])
    helper = helper_of(launched.scripts[0].pid)
    assert helper is not None
    os.kill(helper, signal.SIGKILL)  # and the launcher that started it ends with 0
    launched.finish()
    assert "the launcher has left its processes behind" in launched.output(10**6)
    launched.check_went_on(restarts=1 + rank_too)
    assert {event["job"] for rank in range(2) for event in launched.events(rank, "joined")} == {job}


@pytest.mark.slow
def test_told_to_stop_it_leaves_no_process_behind(launched: Launched) -> None:
    options = ["--job", "a", "--nproc", "2", "--port", str(free_ports(1))]
    launched.start(
        ["bash", SCRIPT, *options, "--runner", "none", str(ROOT / "launch" / "train_deepspeed.py"), "--help"]
    )
    launched.finish()  # the launcher is warm, and hands the script's arguments on
    assert "JSON file" in launched.output()
    sleeper = launched.here / "sleeper.py"
    sleeper.write_text("import pathlib, sys, time\npathlib.Path(sys.argv[0] + '.started').touch()\ntime.sleep(300)\n")
    launched.start(["bash", SCRIPT, *options, "--runner", "none", str(sleeper)])
    launched.scripts.pop(0)
    launched.wait_for("ranks", lambda: Path(f"{sleeper}.started").exists())
    script = launched.scripts[0]
    script.send_signal(signal.SIGTERM)
    assert script.wait(90) == 143
    until(lambda: not processes_of(script.pid), "no process is left", secs=30)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_told_to_stop_it_saves_and_the_next_start_goes_on_from_there(
    launched: Launched, arena_root: Path, tmp_path: Path
) -> None:
    (storage := tmp_path / "storage").mkdir()
    job = f"test-{uuid.uuid4().hex[:8]}"
    options = ["--job", job, "--nproc", "2", "--port", str(free_ports(2)), *launched.training]
    command = ["bash", SCRIPT, *options, "--ftckpt-persist", str(storage)]
    saved = launched.stop_and_save(launched.start(command), storage)
    launched.kill()  # the SMP
    shutil.rmtree(arena_root / f"ftckpt-{job}")
    launched.start(command)
    launched.finish()
    launched.check_went_on()
    (restored,) = [event for event in launched.events(0, "restored") if event["iteration"]]
    assert (restored["iteration"], restored["source"]) == (saved, "storage")
