"""Batons of torch's extension builder: those of the dead go, all others stay, and no start waits for ever unseen."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from ftckpt.job import compile_locks
from ftckpt.job.compile_locks import release_orphans

HOLD = """
import os, sys, time
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
assert baton.try_acquire()
if sys.argv[2] == "ninja":  # the owner has gone, what it has started compiles on
    os.close(baton.fd)
    os.chdir(os.path.dirname(sys.argv[1]))
print("up", flush=True)
time.sleep(100)  # until it is killed
"""
RACE = """
import sys
from ftckpt.job.compile_locks import release_orphans
release_orphans({"TORCH_EXTENSIONS_DIR": sys.argv[1]}, settle_secs=0.3)
"""


@pytest.fixture
def baton(tmp_path: Path) -> Path:
    """Where the baton of one operator lies."""
    (tmp_path / "fused_adam").mkdir()
    return tmp_path / "fused_adam" / "lock"


@contextmanager
def compiling(baton: Path, how: str = "baton") -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(baton), how], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        yield child
    finally:
        child.kill()
        child.communicate(timeout=30)


def release(baton: Path, **env: str) -> None:
    release_orphans({"TORCH_EXTENSIONS_DIR": str(baton.parents[1]), **env}, settle_secs=0.0)


def test_a_baton_of_a_killed_process_goes_and_who_waits_for_it_goes_on(
    baton: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with compiling(baton) as owner:
        owner.kill()
        # Not waited for: a launcher may leave the dead rank a zombie, which has nothing open.
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        waiting = threading.Thread(target=FileBaton(str(baton)).wait, daemon=True)
        waiting.start()
        release(baton)
        assert not baton.exists()
        waiting.join(30)
        assert not waiting.is_alive()
    assert "fused_adam" in caplog.text and "deleted" in caplog.text
    release(baton)  # of none


@pytest.mark.parametrize("how", ["baton", "ninja"])
def test_a_baton_of_a_live_process_stays(baton: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    with compiling(baton, how) as owner:
        release(baton)
        assert baton.exists() and not caplog.text, "somebody compiles: nothing to tell"
        os.utime(baton, (0, 0))
        release(baton, LOCAL_RANK="1")
        assert not caplog.text
        release(baton, LOCAL_RANK="0")
        assert baton.exists()
        assert f"process {owner.pid} compiles" in caplog.text and str(baton) in caplog.text


@pytest.mark.parametrize("where", ["nfs4", "container", "user"])
def test_where_the_owner_cannot_be_seen_the_baton_stays_and_that_is_said(
    baton: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    baton.touch()
    os.utime(baton, (0, 0))
    if where == "nfs4":
        monkeypatch.setattr(compile_locks, "_LOCAL", frozenset())
    elif where == "container":
        monkeypatch.setattr(compile_locks, "_FIRST_PID_NAMESPACE", "pid:[1]")
    else:
        monkeypatch.setattr(os, "geteuid", lambda: baton.stat().st_uid + 1)
    with caplog.at_level(logging.WARNING):
        release(baton)
    assert baton.exists()
    assert f"rm {baton}" in caplog.text and "has been there for" in caplog.text


def test_a_process_that_cannot_be_looked_at_may_hold_it(
    baton: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that may not be traced, whose files not even root sees."""
    readlink = os.readlink
    with compiling(baton) as owner:

        def hidden(path: Path) -> str:
            if f"/{owner.pid}/fd/" in str(path):
                raise PermissionError(13, "Permission denied")
            return readlink(path)

        monkeypatch.setattr(os, "readlink", hidden)
        release(baton)
        assert baton.exists()
        assert f"process {owner.pid}, which cannot be looked at, may hold it" in caplog.text


def test_of_many_ranks_one_deletes_it(baton: Path) -> None:
    """A second one must not take away the baton of whoever compiles since."""
    baton.touch()
    root = str(baton.parents[1])
    racers = [subprocess.Popen([sys.executable, "-c", RACE, root], stderr=subprocess.PIPE, text=True) for _ in "1234"]
    told = [racer.communicate(timeout=60)[1] for racer in racers]
    assert "".join(told).count("deleted") == 1 and not baton.exists()
    assert [racer.returncode for racer in racers] == [0] * 4


@pytest.mark.parametrize("configured", [False, True])
def test_batons_are_looked_for_where_torch_builds(
    tmp_path: Path, configured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR" if configured else "HOME", str(tmp_path))
    lock = Path(cpp_extension._get_build_directory("cpu_adam", False)) / "lock"
    assert lock.is_relative_to(tmp_path)
    lock.touch()
    release_orphans(os.environ, settle_secs=0.0)
    assert not lock.exists()
