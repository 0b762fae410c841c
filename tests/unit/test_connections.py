"""What connections between many ranks may cost: open files of a process, and questions to the job's store."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from ftckpt.group import look_secs

MAKE_ROOM = """
import logging, resource, sys
from ftckpt.connections import make_room
from ftckpt.errors import LaunchError
logging.basicConfig(level=logging.INFO, format="%(message)s")
soft, hard, least, wanted = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    make_room(least, wanted)
except LaunchError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def make_room(*numbers: int) -> tuple[str, str]:
    """What a process says, and its limits then."""
    command = [sys.executable, "-c", MAKE_ROOM, *map(str, numbers)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    return run.stdout, run.stderr


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="a low hard limit")
def test_the_soft_limit_is_raised_to_what_is_wanted_and_the_hard_one_gives_and_that_is_said() -> None:
    said = "ftckpt: open files of each rank: limit raised from"
    assert make_room(1024, 4096, 10, 500) == ("(1024, 4096)\n", "")
    limits, told = make_room(1024, 4096, 10, 2000)
    raised = int(limits[1:].split(",")[0])
    assert 2000 < raised < 2200 and told == f"{said} 1024 to {raised} (ulimit -n)\n"
    assert make_room(64, 128, 10, 2000) == ("(128, 128)\n", f"{said} 64 to 128 (ulimit -n)\n")
    refusal, told = make_room(64, 128, 2000, 2000)
    assert refusal.startswith("ulimit -n: this process needs 20") and refusal.endswith("(64, 128)\n") and not told


@pytest.mark.parametrize("size", [2, 200, 1000, 8000])
def test_a_store_is_asked_no_more_often_by_many_ranks_that_wait_than_by_a_few_hundred(size: int) -> None:
    first, longest = look_secs(size)
    assert size / first <= 400 and size / longest <= 20
    assert size > 200 or (first, longest) == (0.5, 10.0)
