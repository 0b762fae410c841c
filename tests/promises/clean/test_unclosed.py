"""A script that ends without ``close()``: one line names what stays in memory, and how to remove it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounting import in_memory

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).parents[3]
# Each script is a fork, which ends as an interpreter does: importing torch would take most of the time.
SCRIPTS = """
import gc, importlib, json, os, sys, threading, time
from pathlib import Path
import torch
import torch.distributed as dist
import ftckpt.torch, ftckpt.torch.geometry, ftckpt.torch.hooks, ftckpt.torch.state, torch._dynamo
from ftckpt.capture import copier
from ftckpt.config import Config
from ftckpt.frameworks import launcher
from ftckpt.session import reminders

def train(arena, last, end):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    config = Config(enabled=True, job="j", node="n", arena=arena, protect="none")
    checkpointer = ftckpt.torch.attach(model, optimizer, config=config)
    for iteration in range((checkpointer.restore() or 0) + 1, last + 1):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        checkpointer.step(iteration)
    exec(end)

def under_a_runner(arena, end):
    def main(argv):
        importlib.reload(reminders)  # a runner's script loads it, after the runner
        job = reminders.OpenJob(Config(job="j"))
        job.begin(Path(arena), 3)
        exec(end)
        return 0

    launcher.leave(main)

def run(action, cases):
    for name, arguments in cases.items():
        if not (child := os.fork()):
            os.dup2(os.open(f"{sys.argv[1]}/{name}", os.O_WRONLY | os.O_CREAT), 2)
            action(*arguments)
            sys.exit(0)
        with open(f"{sys.argv[1]}/{name}", "a") as out:
            out.write(f"\\nended: {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")

gc.freeze()  # each end would search for garbage what torch has imported
runners, scripts = json.loads(sys.argv[2])
run(under_a_runner, runners)
run(train, scripts)
"""
COPYING = """
begun = threading.Event()

def copy_for_long(*arguments, begun=begun):
    begun.set()
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        torch.ones(1).view(1)

copier.copy_chunk = copy_for_long
optimizer.step()
checkpointer.step(last + 1)
model(torch.ones(1, 4))
assert begun.wait(20)
time.sleep(0.05)  # in the middle of one
"""
FORGETTING = """
for _ in range(60):
    optimizer.step()
checkpointer.close()
assert not ftckpt.torch.attach(model, optimizer)
try:
    ftckpt.torch.attach(model, optimizer, None, config)
except ftckpt.errors.ConfigError as error:
    print(error, file=sys.stderr)
"""
RUNNERS = {"left": "pass", "status": "raise SystemExit(3)", "failed": "raise MemoryError", "closed": "job.close()"}
CASES = {
    "left": ("a", 3, ""),
    "left again": ("a", 1, ""),
    "closed": ("a", 3, "checkpointer.close()"),
    "failed": ("b", 3, "raise ValueError('loss is nan')"),
    "copying": ("c", 3, COPYING),
    "forgetting": ("d", 0, FORGETTING),
}
Ended = dict[str, tuple[int, list[str]]]


@pytest.fixture(scope="module")
def arena() -> Iterator[Path]:
    with in_memory() as root:
        yield root


@pytest.fixture(scope="module")
def ended(arena: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The exit status and the written lines, by case."""
    folder = tmp_path_factory.mktemp("ended")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH", "PET_", "FTCKPT"))}
    env = {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    for name in "abcd":
        (arena / name).mkdir()
    scripts = {name: (str(arena / where), *rest) for name, (where, *rest) in CASES.items()}
    runners = {f"runner {name}": (str(arena), end) for name, end in RUNNERS.items()}
    words = [sys.executable, "-c", SCRIPTS, str(folder), json.dumps([runners, scripts])]
    subprocess.run(words, env=env, capture_output=True, timeout=200, check=True)
    found: Ended = {}
    for name in (*CASES, *runners):
        *lines, last = (folder / name).read_text().splitlines()
        found[name] = int(last.removeprefix("ended: ")), lines
    return found


def about(ended: Ended, name: str, *words: str) -> tuple[int, list[str]]:
    status, lines = ended[name]
    return status, [line for line in lines if any(word in line for word in words)]


def test_what_nobody_closes_is_told_at_each_end(ended: Ended, arena: Path) -> None:
    status, (line,) = about(ended, "left", "close()")
    assert status == 0 and f"'ftckpt clean j --arena {arena / 'a'}'" in line and "after iteration 3:" in line
    status, (again,) = about(ended, "left again", "close()")
    assert status == 0 and "without a step" in again and "without a step" not in line
    assert about(ended, "closed", "close()") == (0, []) and not list((arena / "a").iterdir())
    assert about(ended, "failed", "close()") == (1, []), "after an error memory stays on purpose"


def test_a_script_that_ends_while_copies_are_under_way_ends_well(ended: Ended) -> None:
    assert ended["copying"][0] == 0


def test_what_a_script_forgets_is_told(ended: Ended) -> None:
    status, lines = about(ended, "forgetting", "step() was never called", "config=")
    assert status == 0 and len(lines) == 4, lines


def test_under_a_runner_it_is_the_same(ended: Ended) -> None:
    found = {name: bool(about(ended, f"runner {name}", "ended without close()")[1]) for name in RUNNERS}
    assert found == {name: name == "left" for name in RUNNERS}
