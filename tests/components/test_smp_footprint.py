"""An SMP returns a node's memory when it has finished with it."""

from __future__ import annotations

import os
from pathlib import Path

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
    """A successor removes the half-made files of a killed SMP, not those of ranks."""
    smp, rank = tmp_path / ".smp.json.00c0ffee.new", tmp_path / ".run.00c0ffee.new"
    for path in (smp, rank):
        path.write_text("{")
    store_description(tmp_path, {"address": "here"})
    assert rank.exists() and not smp.exists()
    assert load_description(tmp_path) == {"address": "here"}
