"""The cost of connections between many ranks: open files of a process, and requests to the job's store."""

from __future__ import annotations

import io
import logging
import resource
from typing import Any

import pytest

from ftckpt import connections
from ftckpt.errors import LaunchError
from ftckpt.group import look_secs
from tests.support.errors import lacks
from tests.support.pool import run_ranks


def ask_for_room(rank: int, size: int, limits: tuple[int, int], least: int, wanted: int) -> list[Any]:
    said = io.StringIO()
    log = logging.getLogger("ftckpt")
    log.addHandler(logging.StreamHandler(said))
    log.setLevel(logging.INFO)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    refusal = ""
    try:
        connections.make_room(least, wanted)
    except LaunchError as error:
        refusal = str(error)
    return [refusal, resource.getrlimit(resource.RLIMIT_NOFILE), said.getvalue()]


def make_room(soft: int, hard: int, least: int, wanted: int) -> list[Any]:
    """The result of a process that raises its limits: its refusal, its limits then, and its messages."""
    result: list[Any] = run_ranks(ask_for_room, 1, (soft, hard), least, wanted, stand_in=False)[0].value
    return result


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="a low hard limit")
def test_the_soft_limit_is_raised_to_what_is_wanted_and_the_hard_one_gives_and_that_is_said() -> None:
    said = "ftckpt: open files of each rank: limit raised from"
    assert make_room(1024, 4096, 10, 500) == ["", (1024, 4096), ""]
    refusal, (raised, hard), told = make_room(1024, 4096, 10, 2000)
    assert not refusal and 2000 < raised < 2200 and hard == 4096
    assert told == f"{said} 1024 to {raised} (ulimit -n)\n"
    assert make_room(64, 128, 10, 2000) == ["", (128, 128), f"{said} 64 to 128 (ulimit -n)\n"]
    refusal, limits, told = make_room(64, 128, 2000, 2000)
    assert not lacks(refusal, "-n", "128") and limits == (64, 128) and not told


@pytest.mark.parametrize("size", [2, 200, 1000, 8000])
def test_a_store_is_asked_no_more_often_by_many_ranks_that_wait_than_by_a_few_hundred(size: int) -> None:
    first, longest = look_secs(size)
    assert size / first <= 400 and size / longest <= 20
    assert size > 200 or (first, longest) == (0.5, 10.0)
