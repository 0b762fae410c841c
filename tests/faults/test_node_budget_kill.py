"""Real processes divide a node's copy budget; those that stop, freeze or die give their part back at once."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ftckpt.windows.node_budget import _UNTIL_NS, NodeBudget
from tests.support.waiting import until

pytestmark = pytest.mark.faults

REPOSITORY = Path(__file__).parents[2]
MIB = 1 << 20
LIMIT = 150e6
RANKS = 3
PROGRESS = "progress"
TRIES = 8

RANK = f"""
import mmap, sys, threading, time
from pathlib import Path
from ftckpt.windows.node_budget import NodeBudget
directory, place, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
budget = NodeBudget.open(directory, place, {RANKS}, {LIMIT})
with open(directory / "{PROGRESS}", "r+b") as file:
    page = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
source, target, never = bytes({MIB}), bytearray({MIB}), threading.Event()
print(budget.problem, flush=True)
if mode == "hold":  # one long copy: no sign of life after its start
    budget.start()
    page[place] += 1
    time.sleep(100)  # until it is killed
while True:
    if page[{RANKS} + place]:  # asked to stop
        time.sleep(0.005)  # it must not take the core from those that copy
        continue
    budget.start()
    begin = time.perf_counter()
    target[:] = source
    budget.pace({MIB}, begin, never)
    budget.stop()
    page[place] += {MIB}
"""


class Node:
    """Ranks as processes, and how much each has copied."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / PROGRESS).write_bytes(bytes(8 * 2 * RANKS))
        self.page = np.memmap(directory / PROGRESS, np.uint64, "r+", shape=(2 * RANKS,))
        self.observer = NodeBudget.open(directory, None, RANKS, 0)
        self.ranks: list[subprocess.Popen[str]] = []

    @contextmanager
    def rank(self, mode: str = "copy") -> Iterator[subprocess.Popen[str]]:
        """One more rank, until the end of the block."""
        command = [sys.executable, "-c", RANK, str(self.directory), str(len(self.ranks)), mode]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        self.ranks.append(process)
        try:
            assert process.stdout is not None and process.stdout.readline() == "None\n"
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.communicate(timeout=10)

    def stop(self, place: int) -> None:
        """Ask a rank to stop after its chunk."""
        self.page[RANKS + place] = 1

    def rates(self, secs: float = 0.2) -> npt.NDArray[np.float64]:
        """Bytes/s of each rank over ``secs``."""
        before, begin = self.page[:RANKS].astype(np.float64), time.monotonic()
        time.sleep(secs)  # a rate is bytes over time
        after, end = self.page[:RANKS].astype(np.float64), time.monotonic()
        return (after - before) / (end - begin)

    def median_rates(self, times: int = 4) -> list[float]:
        """Of each rank: noise of the machine hits some spans, not most."""
        return [statistics.median(column) for column in np.transpose([self.rates() for _ in range(times)])]


@pytest.fixture
def node(arena_root: Path) -> Node:
    return Node(arena_root)


@contextmanager
def copying_ranks(node: Node) -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        yield [stack.enter_context(node.rank()) for _ in range(RANKS)]


def about(part: float) -> tuple[float, float]:
    """What is accepted as ``part`` of the limit: it must exclude the part of one rank more or less."""
    return 0.75 * part * LIMIT, 1.2 * part * LIMIT


def assert_parts(node: Node, *parts: float) -> None:
    """Each rank gets its part of the limit; where the machine is busy with other things it is measured again."""
    wrong: list[str] = []
    for _ in range(TRIES):
        rates = node.median_rates()[: len(parts)]
        bounds = [about(part) for part in parts]
        if all(low <= rate <= high for rate, (low, high) in zip(rates, bounds, strict=True)):
            return
        wrong.append(", ".join(f"{rate / LIMIT:.2f}" for rate in rates))
    raise AssertionError(f"parts of the limit {wrong}, expected about {parts}")


def test_ranks_share_the_limit_and_take_over_what_others_leave(node: Node) -> None:
    with copying_ranks(node) as ranks:
        until(node.page[:RANKS].all, "all copy")
        total = node.rates(1.0).sum()
        assert total <= 1.1 * LIMIT, f"{total / LIMIT:.2f} of the limit"
        assert_parts(node, 1 / 3, 1 / 3, 1 / 3)
        node.stop(2)
        assert_parts(node, 1 / 2, 1 / 2, 0)
        os.kill(ranks[1].pid, signal.SIGKILL)  # not waited for: it is a zombie, as under a launcher
        assert_parts(node, 1, 0, 0)
        assert Path(f"/proc/{ranks[1].pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        node.stop(0)
        settled(node, 0)


def settled(node: Node, copying: int) -> None:
    """Once an observer sees so many ranks copy."""
    until(lambda: node.observer.copying() == copying, f"{copying} ranks copy", secs=30)


def test_a_rank_killed_in_its_copy_holds_its_part_no_longer(node: Node) -> None:
    early = []
    for _ in range(TRIES):
        node.ranks.clear()
        before = int(node.page[0])
        with node.rank("hold") as rank:
            until(lambda: int(node.page[0]) != before, "it copies")  # noqa: B023
            copied = node.observer.copying() == 1  # not where this process came to look too late
            until_ns = node.observer._load(_UNTIL_NS, 0)
            os.kill(rank.pid, signal.SIGKILL)
            settled(node, 0)
            early += [(until_ns - time.monotonic_ns()) / 1e9] if copied else []
    assert max(early, default=0.0) > 0.1, f"only when its lease ended: {early} s before that"


def test_a_frozen_rank_holds_its_part_for_a_lease_and_comes_back(node: Node) -> None:
    with node.rank() as first, node.rank() as second:
        settled(node, 2)
        first.send_signal(signal.SIGSTOP)
        assert_parts(node, 0, 1)
        first.send_signal(signal.SIGCONT)
        assert_parts(node, 1 / 2, 1 / 2)
        assert second.poll() is None
