"""What an SMP takes of a node's memory goes back when it is done with it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from ftckpt.smp.footprint import anon_bytes, bound_process
bound_process(own_session=False)
before = anon_bytes()
for _ in range(3):
    large = b"x" * (8 << 20)
    del large
print(anon_bytes() - before)
"""


def test_large_blocks_go_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60.0)
    assert int(done.stdout) < 4 << 20
