"""A script that ends without ``close()``: one line says what stays in memory, and how to remove it."""

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

ROOT = Path(__file__).parents[2]
# Each script is a fork, which ends as an interpreter does: importing torch would take most of the time.
SCRIPTS = """
import json, os, sys, time
import torch
import torch.distributed as dist
import ftckpt.torch
from ftckpt import Config
from ftckpt.capture import copier
from ftckpt.frameworks import launcher
from ftckpt.session.missing_close import OpenJob
import ftckpt.torch.geometry, ftckpt.torch.hooks, ftckpt.torch.state, torch._dynamo

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

def under_a_runner(arena, last, end):
    def main(argv):
        job = OpenJob(Config(job="j"))
        job.begin(arena, 3)
        exec(end)
        return 0

    launcher.leave(main)

folder = sys.argv[1]
for name, (kind, *arguments) in json.loads(sys.argv[2]).items():
    if not (child := os.fork()):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), 2)
        {"script": train, "runner": under_a_runner}[kind](*arguments)
        sys.exit(0)
    with open(f"{folder}/{name}", "a") as out:
        out.write(f"\\nended: {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
"""
COPYING = """
def copy_for_long(*arguments):
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        torch.ones(1).view(1)

copier.copy_chunk = copy_for_long
optimizer.step()
checkpointer.step(last + 1)
"""
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
CASES = {
    "left": ("script", "a", 3, ""),
    "left again": ("script", "a", 1, ""),
    "closed": ("script", "a", 3, "checkpointer.close()"),
    "failed": ("script", "b", 3, "raise ValueError('loss is nan')"),
    "copying": ("script", "c", 3, COPYING),
    "forgetting": ("script", "d", 0, FORGETTING),
    "runner, left": ("runner", "e", 3, "pass"),
    "runner, status": ("runner", "e", 3, "raise SystemExit(3)"),
    "runner, failed": ("runner", "e", 3, "raise MemoryError"),
    "runner, closed": ("runner", "e", 3, "job.close()"),
}
Ended = dict[str, tuple[int, list[str]]]


@pytest.fixture(scope="module")
def arena() -> Iterator[Path]:
    with in_memory() as root:
        yield root


@pytest.fixture(scope="module")
def ended(arena: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """By case the exit status and the lines that were written."""
    folder = tmp_path_factory.mktemp("ended")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH", "PET_", "FTCKPT"))}
    env = {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    for name in "abcde":
        (arena / name).mkdir()
    cases = {name: (kind, str(arena / where), *rest) for name, (kind, where, *rest) in CASES.items()}
    words = [sys.executable, "-c", SCRIPTS, str(folder), json.dumps(cases)]
    subprocess.run(words, env=env, capture_output=True, timeout=200, check=True)
    found: Ended = {}
    for name in CASES:
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
    assert status == 0 and len(lines) == 3, lines


def test_under_a_runner_it_is_the_same(ended: Ended) -> None:
    found = {name: bool(about(ended, name, "ended without close()")[1]) for name in CASES if "runner" in name}
    assert found == {name: name == "runner, left" for name in found}
