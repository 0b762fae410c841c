"""Ranks that wait for each other: deadlines, late ranks, lagging answers, and errors that reach all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ftckpt import connections, errors
from ftckpt.errors import LaunchError, PeerAuthError
from ftckpt.group import Group, together
from ftckpt.session.vote import Agreement, Vote
from tests.support.errors import raises
from tests.support.pool import run_ranks
from tests.support.processes import is_running
from tests.support.waiting import meet, until

pytestmark = pytest.mark.multiproc

LATE_SECS = 1.5


def alone(rank: int, world_size: int, folder: str) -> None:
    """Rank 1 trains without ftckpt."""
    if rank == 0:
        with raises(LaunchError, "rank(s) 1 did not start ftckpt within 1 s", "--ftckpt-start-timeout-secs"):
            Group(1.0)
    meet(Path(folder) / "over", world_size)


def test_who_does_not_come_at_all_is_named(tmp_path: Path) -> None:
    run_ranks(alone, 2, str(tmp_path))


def gather_all(rank: int, size: int) -> list[Any]:
    group = Group(30.0)
    assert (group.rank, group.size) == (rank, size)
    mine = bytes([rank]) * (rank * 20_000)
    return [
        [len(part) for part in group.gather(mine)],
        group.gather(memoryview(bytearray([rank, 255]))),
        group.gather(b""),
        group.gather(b"only" if rank == 1 else b""),
        group.broadcast(bytes([rank, rank + 7]), source=2),
        group.broadcast(b""),
        group.barrier(),
        least_of(group, [rank, 9 - rank]),
    ]


def least_of(group: Any, values: Sequence[int]) -> list[int]:
    work, minimum = group.start_minimum(values)
    assert group.finish(work, 30.0)
    return [int(value) for value in minimum.values]


def test_all_ranks_see_the_same_bytes_in_the_order_of_ranks() -> None:
    expected = [
        [0, 20_000, 40_000],
        [b"\0\xff", b"\1\xff", b"\2\xff"],
        [b""] * 3,
        [b"", b"only", b""],
        b"\2\x09",
        b"",
        None,
        [0, 7],
    ]
    assert [result.value for result in run_ranks(gather_all, 3)] == [expected] * 3


def read(agreement: Any, timeout_secs: float) -> Any:
    """For each vote result the committed snapshot and the readiness of all for the next."""
    verdicts = agreement.read(timeout_secs)
    return None if verdicts is None else [(verdict.newest, int(verdict.will)) for verdict in verdicts]


def lag(rank: int, size: int) -> tuple[list[Any], float]:
    agreement = Agreement(Group(30.0))
    if rank == 1:
        time.sleep(LATE_SECS)
    agreement.post(Vote(4, 4))
    verdicts: list[Any] = []
    begin = time.monotonic()
    if rank == 0:
        verdicts.append(read(agreement, 0.1))
        verdicts.append(read(agreement, 0.0))
        agreement.post(Vote(5, 5))
        verdicts.append(read(agreement, 0.1))
    waited = time.monotonic() - begin
    if rank == 1:
        agreement.post(Vote(5, 6))
    verdicts.append(read(agreement, 30.0))
    return verdicts, waited


def test_a_read_that_timed_out_gives_nothing_and_the_next_one_all() -> None:
    late, punctual = (result.value for result in run_ranks(lag, 2))
    both = [(4, 1), (-1, 1)]
    assert late[0] == [None, None, None, both], "all had 4, and whoever knew that has kept it"
    assert late[1] < LATE_SECS, "a read waits no longer than it was told"
    assert punctual[0] == [both]


MANY = 100
"""Rounds that a rank posts before another one posts any."""


def post_many(rank: int, size: int) -> list[Any]:
    group, other = Group(60.0), Group(60.0)
    if rank == 1:
        other.barrier()
    posted = [group.start_minimum([number + rank]) for number in range(MANY)]
    num_unread = sum(not work.is_completed() for work, _ in posted)
    if rank == 0:
        other.barrier()
    assert all(group.finish(work, 30.0) for work, _ in posted)
    minima = [int(minimum.tensor) for _, minimum in posted]
    alive = [weakref.ref(minimum.tensor) for _, minimum in posted]
    posted.clear()
    kept = sum(one() is not None for one in alive)
    for _ in range(3):
        group.barrier()
    return [num_unread, minima, kept, sum(one() is not None for one in alive)]


def test_what_is_posted_stays_until_a_later_collective_is_complete() -> None:
    """A thread of torch that releases a tensor as the last one needs the interpreter: a process that ends aborts."""
    first, second = (result.value for result in run_ranks(post_many, 2))
    assert first[0] == MANY
    assert first[1] == second[1] == list(range(MANY))
    assert first[2] == MANY and first[3] == second[3] == 0, "kept at first, and gone after the next collectives"


def share_errors(rank: int, size: int) -> list[str]:
    group = Group(30.0)
    found = [str(together(group, lambda: rank * 10))]

    def fail(*ranks: int) -> None:
        if rank in ranks:
            raise errors.LostError(f"shard of {rank} is gone: 100 % \u2192 0")

    def fail_by(error: Exception) -> None:
        if rank == 1:
            raise error

    own, foreign = PeerAuthError("x"), KeyError("a bug")
    for action in (lambda: fail(1), lambda: fail(2, 1), lambda: fail_by(own), lambda: fail_by(foreign), lambda: None):
        try:
            together(group, action)
            found.append("good")
        except errors.FtckptError as error:
            found.append(f"{type(error).__name__} {error}")
    return found


def test_an_error_of_one_rank_is_raised_on_all_with_its_class_and_rank() -> None:
    lost = "LostError rank 1: shard of 1 is gone: 100 % \u2192 0"
    bug = "FtckptError rank 1: KeyError: 'a bug'"
    for rank, result in enumerate(run_ranks(share_errors, 3)):
        assert result.value == [str(rank * 10), lost, lost, "PeerAuthError rank 1: x", bug, "good"]


def outlive_a_stall(rank: int, size: int, number: int, is_recent: bool) -> list[str]:
    """One rank stands still for longer than the group's deadline, while another posts on."""
    connections._IS_RECENT = is_recent
    agreement = Agreement(Group(LATE_SECS / 3))
    found: list[str] = []
    for iteration in range(number):
        if (rank, iteration) == (1, 0):
            time.sleep(LATE_SECS)
        agreement.post(Vote(iteration, iteration))
        if rank == 0:
            found.append(str(read(agreement, 0.1)))
    return [*found, str(read(agreement, 30.0))]


@pytest.mark.parametrize("is_recent", [pytest.param(True, id="torch"), pytest.param(False, id="older torch")])
def test_rounds_outlive_a_rank_that_stands_still_for_longer_than_the_deadline_of_the_group(is_recent: bool) -> None:
    """It is alive: what others have posted completes when it comes, and what nobody waited for is no error."""
    punctual, late = (result.value for result in run_ranks(outlive_a_stall, 2, 4, is_recent))
    every = str([(iteration, 1) for iteration in range(4)])
    assert punctual == ["None"] * 4 + [every] and late == [every]


GROUP_SECS = 60.0
FEW_SECS = 12.0


def outlive(rank: int, size: int, lost: int, what: str, here: str) -> tuple[str, float]:
    """The error of a rank, and its delay, when another is lost before a collective."""
    group = Group(GROUP_SECS)
    agreement = Agreement(group)
    pids = [int(pid) for pid in group.gather(str(os.getpid()).encode())]
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: not is_running(pids[lost]), "one is lost")
    begin = time.monotonic()
    try:
        if what == "gather":
            group.gather(b"x")
        else:
            agreement.post(Vote(1, 1))
            agreement.read(GROUP_SECS)
    except RuntimeError as error:
        told, waited = str(error), time.monotonic() - begin
        with pytest.raises(RuntimeError):
            group.gather(b"y")
        return told, waited
    finally:
        meet(Path(here, "told"), size - 1)  # not by its end does a rank tell the others
    return "", time.monotonic() - begin


@pytest.mark.faults
@pytest.mark.parametrize("what", ["gather", "agree"])
def test_no_rank_waits_for_others_that_failed_where_a_rank_is_lost(what: str, tmp_path: Path) -> None:
    """Not all had a connection to the lost one, and those that had continue training."""
    results = run_ranks(outlive, 6, 3, what, str(tmp_path), expect_failures=True, grace_secs=4 * FEW_SECS)
    told = [result.value for rank, result in enumerate(results) if rank != 3]
    assert all(text and waited < FEW_SECS for text, waited in told), told
    if what == "gather":
        assert sum("gave up" in text for text, _ in told) == 3, "the neighbours of the lost one know by themselves"


def outlive_store(rank: int, size: int, here: str) -> float:
    """How long a rank waits for its neighbours, who never come, when the store is lost."""
    port = Path(here, "port")
    if rank == 3:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        Path(here, "new").write_text(str(store.port))
        Path(here, "new").rename(port)
    else:
        until(port.exists, "the store's port")
        store = dist.TCPStore("127.0.0.1", int(port.read_text()))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group = Group(GROUP_SECS)
    group.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    if rank == 1:
        with pytest.raises(RuntimeError, match="store"):
            group.gather(b"x")
    waited = time.monotonic() - begin
    meet(Path(here, "told"), size - 1)
    return waited


@pytest.mark.faults
def test_no_rank_waits_on_when_the_store_is_lost(tmp_path: Path) -> None:
    results = run_ranks(
        outlive_store, 4, str(tmp_path), expect_failures=True, grace_secs=3 * FEW_SECS, init_process_group=False
    )
    assert results[1].ok and results[1].value < FEW_SECS, results[1]


STORE = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)  # until it is killed
"""


def give_up_and_start_anew(rank: int, size: int) -> list[bytes]:
    first = Group(GROUP_SECS)
    first.give_up("for a test")
    second = Group(GROUP_SECS)
    time.sleep(LATE_SECS * rank)  # late, so that rank 0 looks
    return second.gather(bytes([rank]))


def test_a_group_that_was_given_up_does_not_spoil_the_next_one() -> None:
    """Restarted ranks may have the store of those before them."""
    assert [result.value for result in run_ranks(give_up_and_start_anew, 2)] == [[b"\0", b"\1"]] * 2


FAIL_WITH_A_POST = """
import sys, time
import torch.distributed as dist
from ftckpt.group import Group
from ftckpt.session.vote import Agreement, Vote
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
agreement = Agreement(Group(float(sys.argv[3])))
if rank == 0:
    agreement.post(Vote(1, 1))
    print("fails", flush=True)
    raise SystemError("training fails")
time.sleep(float(sys.argv[3]))  # it never posts
"""


@pytest.mark.faults
def test_a_rank_that_fails_ends_at_once_whatever_it_has_posted(tmp_path: Path) -> None:
    """Otherwise its launcher would detect it minutes later."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FAIL_WITH_A_POST, str(rank), str(tmp_path / "store"), str(GROUP_SECS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].stdout is not None and ranks[0].stdout.readline() == b"fails\n"
        begin = time.monotonic()
        assert ranks[0].wait(GROUP_SECS) == 1
        assert time.monotonic() - begin < FEW_SECS
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
