"""Nodes that are left without trainers rebuild what a lost one held: real processes, which meet through storage."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from ftckpt.errors import StorageError
from ftckpt.parity.modes import Modes
from ftckpt.persist.files import FileStorage
from ftckpt.persist.meeting import MeetingPlace, RescueReport, RescueRequest, Survivor, meet
from ftckpt.store.parity_file import list_parity
from tests.support.errors import raises
from tests.support.protected import Job, build, contents

pytestmark = pytest.mark.multiproc

PEER = Modes(peer=True)


@pytest.fixture
def job(arena_root: Path) -> Job:
    """Three nodes of two ranks; the snapshot of iteration 5 is protected, that of iteration 6 is not."""
    made = Job(arena_root, ("a", "a", "b", "b", "c", "c"), PEER)
    build(made, (4, 5, 6), (4, 5))
    return made


def rescued(job: Job, where: Path, nodes: Sequence[str], secs: float = 60.0) -> list[RescueReport | str]:
    """What the process of each node says: what it has, or why it cannot."""
    running = []
    for node in nodes:
        request = RescueRequest(
            str(job.node_dir(node)), node, ("a", "b"), str(where), "here", "127.0.0.1", "lo", secs
        )  # fmt: skip
        words = [sys.executable, "-m", "ftckpt.restore.rescue", json.dumps(asdict(request))]
        running.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said: list[RescueReport | str] = []
    for process in running:
        output, errors = process.communicate(timeout=120)
        if process.returncode == 0:
            said.append(RescueReport.from_json(json.loads(output.splitlines()[-1])))
        else:
            said.append(errors.strip().splitlines()[-1])
    return said


def test_two_nodes_rebuild_what_the_third_held(job: Job, tmp_path: Path) -> None:
    wanted = {job.shard(rank): contents(job, rank, 5) for rank in range(6)}
    shutil.rmtree(job.node_dir("c"))
    found = rescued(job, tmp_path, ("a", "b"))
    assert all(isinstance(one, RescueReport) for one in found), found
    shards = {}
    for node, one in zip(("a", "b"), found, strict=True):
        assert isinstance(one, RescueReport)
        assert (one.iteration, one.nodes, one.rebuilt) == (5, ("a", "b"), ("peer_parity",))
        shards |= {name.rpartition(".")[0]: job.node_dir(node) / name for name in one.arenas}
    assert shards.keys() == wanted.keys()
    for rank in range(6):
        home = shards[job.shard(rank)].parent
        there = Job(job.root, tuple(home.name if r == rank else n for r, n in enumerate(job.nodes)), job.modes)
        assert contents(there, rank, 5) == wanted[job.shard(rank)]
    assert not list((tmp_path / "meeting").glob("*")), "the meeting is over"


def test_what_no_parity_gives_back_is_named(job: Job, tmp_path: Path) -> None:
    shutil.rmtree(job.node_dir("c"))
    for node in ("a", "b"):
        for parity in list_parity(job.node_dir(node)):
            parity.path.unlink()
    for said in rescued(job, tmp_path, ("a", "b")):
        assert isinstance(said, str) and "cannot be restored" in said and "dp4" in said


def test_a_node_that_does_not_come_is_named(job: Job, tmp_path: Path) -> None:
    (said,) = rescued(job, tmp_path, ("a",), secs=2.0)
    assert said == "the nodes that are left do not meet: b did not come"


def test_an_earlier_meeting_is_not_this_one(tmp_path: Path) -> None:
    """What was killed in the middle of one leaves files."""
    storage, late = FileStorage(str(tmp_path)), Survivor.new("b", "here", "127.0.0.1")
    earlier = {"tokens": {"a": "1", "b": "2"}, "address": "127.0.0.1", "port": 9}
    storage.put("meeting/place", json.dumps(earlier).encode())
    storage.put("meeting/call", b"1")
    begun = time.monotonic()
    with raises(StorageError, "the first of the nodes did not call"):
        meet(storage, late, ("a", "b"), lambda address: 1, 1.0)
    assert time.monotonic() - begun < 10
    # Both come now, and find what is left of the others.
    with ThreadPoolExecutor(2) as threads:
        early = threads.submit(
            meet, storage, Survivor.new("a", "here", "1.2.3.4"), ("a", "b"), lambda address: 7, 20.0
        )
        time.sleep(0.5)
        late = Survivor.new("b", "there", "1.2.3.5")
        place = threads.submit(meet, storage, late, ("a", "b"), lambda address: 1, 20.0).result()
        assert place == early.result() == MeetingPlace(("a", "b"), "1.2.3.4", 7)
