"""A script that ends without ``close()``: one line says what stays in memory, and how to remove it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
import torch.distributed as dist
import ftckpt.torch
from ftckpt import Config

def main(last, end):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    config = Config(enabled=True, job="j", node="n", arena=sys.argv[1], protect="none")
    checkpointer = ftckpt.torch.attach(model, optimizer, config=config)
    for iteration in range((checkpointer.restore() or 0) + 1, last + 1):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        checkpointer.step(iteration)
    exec(end)

main(int(sys.argv[2]), sys.argv[3])  # what it has made is gone when the process ends
"""


def ended(arena: Path, last: int, end: str = "", about: str = "close()") -> tuple[int, list[str]]:
    """The exit status, and the lines ``about`` something."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH", "PET_", "FTCKPT"))}
    env = {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", SCRIPT, str(arena), str(last), end]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, [line for line in done.stderr.splitlines() if about in line]


def test_what_nobody_closes_is_told_at_each_end(arena_root: Path) -> None:
    status, (line,) = ended(arena_root, 3)
    assert status == 0 and f"'ftckpt clean j --arena {arena_root}'" in line and "after iteration 3:" in line
    status, (again,) = ended(arena_root, 1)
    assert status == 0 and "without a step" in again and "without a step" not in line
    assert ended(arena_root, 3, "checkpointer.close()") == (0, []) and not list(arena_root.iterdir())


def test_after_an_error_memory_stays_on_purpose(arena_root: Path) -> None:
    assert ended(arena_root, 3, "raise ValueError('loss is nan')") == (1, [])


COPYING = """
from ftckpt.capture import copier

def copy_for_long(*arguments):
    import time
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        torch.ones(1).view(1)

copier.copy_chunk = copy_for_long
optimizer.step()
checkpointer.step(last + 1)
"""


def test_a_script_that_ends_while_copies_are_under_way_ends_well(arena_root: Path) -> None:
    assert ended(arena_root, 3, COPYING)[0] == 0


FORGETTING = """
for _ in range(60):
    optimizer.step()
checkpointer.close()
assert ftckpt.torch.attach(model, optimizer) is None
try:
    ftckpt.torch.attach(model, optimizer, None, config)
except ftckpt.errors.ConfigError as error:
    print(error, file=sys.stderr)
"""


def test_what_a_script_forgets_is_told(arena_root: Path) -> None:
    status, lines = ended(arena_root, 0, FORGETTING, "ftckpt")
    told = [line for line in lines if "step() was never called" in line or "config=" in line]
    assert status == 0 and len(told) == 3, lines


UNDER_A_RUNNER = """
from pathlib import Path
from ftckpt.config import Config
from ftckpt.frameworks import launcher

def main(argv):
    from ftckpt.session.reminders import OpenJob

    job = OpenJob(Config(job="j"))
    job.begin(Path("/nowhere"), 3)
    {end}
    return 0

launcher.leave(main)
"""


@pytest.mark.parametrize(
    ("end", "tells"),
    [("pass", True), ("raise SystemExit(3)", False), ("raise MemoryError", False), ("job.close()", False)],
)
def test_under_a_runner_it_is_the_same(end: str, tells: bool, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", UNDER_A_RUNNER.format(end=end)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert ("ended without close()" in done.stderr) == tells, done.stderr
