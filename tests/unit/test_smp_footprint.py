"""What an SMP takes of a node's memory goes back when it is done with it."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock, patch

from ftckpt.memory.directory import SMP_LOCK_NAME, node_directory
from ftckpt.memory.locks import FileLock
from ftckpt.smp.daemon import Daemon
from ftckpt.smp.footprint import load_description, store_description
from tests.support.processes import run_python

SCRIPT = """
from ftckpt.smp.footprint import anon_bytes, bound_process
bound_process()
before = anon_bytes()
for _ in range(3):
    large = b"x" * (8 << 20)
    del large
print(anon_bytes() - before)
"""


def test_large_blocks_go_back_to_the_system() -> None:
    assert int(run_python(SCRIPT).stdout) < 4 << 20


PRIORITY = """
import os
from pathlib import Path
from ftckpt.smp.footprint import bound_process
os.setsid()
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
bound_process()
autogroup = Path("/proc/self/autogroup")
group = autogroup.read_text().split()[-1] if autogroup.exists() else "0"
print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0) == os.SCHED_BATCH, group)
"""


def test_without_privileges_it_starts_no_nicer_than_who_starts_it() -> None:
    assert run_python(PRIORITY).stdout.split() == [str(os.nice(0)), "True", "0"]


def test_a_file_that_another_process_writes_at_the_moment_stays(tmp_path: Path) -> None:
    """What a killed one has left half-made goes, by who makes such files."""
    smp, rank = tmp_path / ".smp.json.00c0ffee.new", tmp_path / ".run.00c0ffee.new"
    for path in (smp, rank):
        path.write_text("{")
    store_description(tmp_path, {"address": "here"})
    assert rank.exists() and not smp.exists()
    assert load_description(tmp_path) == {"address": "here"}


def test_trainers_are_told_of_an_end_before_the_log_is_kept_elsewhere(tmp_path: Path) -> None:
    """A home directory may be on storage that hangs."""
    node_dir = node_directory(tmp_path, "job", "n0")
    daemon = Mock(job="job", node="n0", node_dir=node_dir, _root=tmp_path, _answer=None)
    daemon._ending, daemon._lock = "the job is over", FileLock(node_dir / SMP_LOCK_NAME, 0, "it", "end it")
    with patch("ftckpt.smp.daemon.keep_logs", daemon.keep_logs):
        Daemon._close(daemon)
    called = [name for name, _, _ in daemon.mock_calls]
    assert called[0] == "_pulse.leave_smp" and called[-3:] == ["log.text", "keep_logs", "log.close"]
    assert {"_server.close", "_duties.close", "_deaths.close", "events.close"} < set(called)
    assert not list(tmp_path.iterdir()), "nor does the lock keep others from a start"
