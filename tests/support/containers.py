"""Ranks in pid namespaces of their own, as in a container beside that of the SMP."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ftckpt.memory.locks import holder_of
from tests.support.launching import ROOT
from tests.support.waiting import until

RANK = """
import sys, time
from pathlib import Path
from ftckpt.memory.locks import FileLock
from ftckpt.memory.heartbeat import Heartbeat
pulse = Heartbeat.open(Path(sys.argv[1]), 0, 5)
locks = [FileLock(Path(path), 0, "it", "") for path in sys.argv[2:]]
pulse.beat(7, "forward")
print("up", flush=True)
time.sleep(60)
"""
"""Rank 5, in the first place of a node, after iteration 7: the node's directory, and the locks that it holds."""


@contextmanager
def rank_elsewhere(node_dir: Path, *locks: Path) -> Iterator[subprocess.Popen[str]]:
    """Rank 5 in a pid namespace of its own, which holds these locks, until the end of the block."""
    spaces = ["unshare", "--pid", "--fork", "--kill-child"]
    if os.geteuid() or subprocess.run([*spaces, "true"], check=False).returncode:
        pytest.skip("a pid namespace of one's own needs root")
    command = [*spaces, sys.executable, "-c", RANK, str(node_dir), *map(str, locks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        try:
            yield process
        finally:
            process.kill()
            # Its child is ended by the kernel, a moment later.
            until(lambda: all(holder_of(lock) is None for lock in locks))
