"""Mounts of tests go with them, and those of killed runs with the next one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.mounting import remove_leftovers, tmpfs, unmount_below

MOUNT = """
import sys, time
from pathlib import Path
from tests.support.mounting import tmpfs
with tmpfs(Path(sys.argv[1])) as path:
    (path / "file").write_text("x")
    print("mounted", flush=True)
    time.sleep(100)
"""


def test_what_a_killed_run_has_left_mounted_goes_and_what_a_live_one_has_stays(arena_root: Path) -> None:
    killed_root = arena_root.with_name(f"{arena_root.name}-killed")
    with tmpfs(arena_root / "job" / "n0") as mine:
        killed = subprocess.Popen(
            [sys.executable, "-c", MOUNT, str(killed_root / "job" / "n0")], stdout=subprocess.PIPE, text=True
        )
        try:
            assert killed.stdout is not None and killed.stdout.readline() == "mounted\n"
            remove_leftovers()
            assert os.path.ismount(killed_root / "job" / "n0"), "its owner lives"
            killed.send_signal(signal.SIGKILL)
            killed.communicate(timeout=30)
            assert os.path.ismount(killed_root / "job" / "n0")
            remove_leftovers()
            assert not killed_root.exists()
            assert os.path.ismount(mine)
        finally:
            killed.kill()
            unmount_below(killed_root)
            shutil.rmtree(killed_root, ignore_errors=True)
    assert not os.path.ismount(mine) and mine.exists()


def test_what_lies_below_is_unmounted_before_it_is_deleted(arena_root: Path) -> None:
    with tmpfs(arena_root / "a") as outer, tmpfs(arena_root / "a" / "b") as inner:
        unmount_below(arena_root)
        assert not os.path.ismount(inner) and not os.path.ismount(outer)
        shutil.rmtree(arena_root)
        arena_root.mkdir()
