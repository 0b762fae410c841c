"""The owner of an exception, by its type and by the code that raised it, never by its text."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from ftckpt.errors import ConfigError, LaunchError
from ftckpt.frameworks.launcher import is_of_another_rank
from tests.support.pool import run_ranks


def caught(action: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        action()
    return caught.value


def upload() -> None:
    raise ConnectionError("upload of the model: Connection reset by peer")


def wrong_text() -> None:
    raise RuntimeError("[pair.cc:553] Connection closed by peer")


def wait_for_a_key() -> None:
    dist.HashStore().wait(["k"], timedelta(milliseconds=1))


def wrong_argument() -> None:
    """A statement of torch's own, in a module that communicates."""
    exec("raise RuntimeError('Broken pipe')", {"__name__": "torch.distributed.distributed_c10d"})


def launch(cause: Callable[[], None]) -> None:
    try:
        cause()
    except RuntimeError as error:
        raise LaunchError("Connection reset by peer") from error


@pytest.mark.parametrize("action", [upload, wrong_text, wrong_argument, lambda: launch(wrong_text)])
def test_a_script_s_own_failure_is_its_own_whatever_it_says(action: Callable[[], None]) -> None:
    assert not is_of_another_rank(caught(action))


@pytest.mark.parametrize("action", [wait_for_a_key, lambda: launch(wait_for_a_key)])
def test_errors_of_torch_distributed_are_of_another_rank(action: Callable[[], None]) -> None:
    assert is_of_another_rank(caught(action))
    assert not is_of_another_rank(ConfigError("Connection reset by peer"))


def lose(rank: int, world_size: int, kind: str) -> tuple[str, bool]:
    import torch

    from ftckpt.group import Group

    group = Group(20.0)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    actions: dict[str, Callable[[], object]] = {
        "barrier": dist.barrier,
        "object": lambda: dist.all_gather_object([None, None], 3),
        "model": lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)),
        "group": group.barrier,
    }
    try:
        actions[kind]()
    except RuntimeError as error:
        return type(error).__name__, is_of_another_rank(error)
    return "", False


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", ["barrier", "object", "model", "group"])
def test_a_rank_that_has_lost_another_says_nothing_of_itself(kind: str) -> None:
    first, _ = run_ranks(lose, 2, kind, expect_failures=True, stand_in=False)
    assert first.value == ("RuntimeError", True), first
