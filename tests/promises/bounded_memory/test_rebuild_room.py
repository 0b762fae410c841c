"""A node is so full that lost shards can be reconstructed only in place of snapshots that no restart needs."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import list_arenas
from ftckpt.memory.image import SlotImage
from ftckpt.memory.parity_file import ParityFile, list_parity
from ftckpt.parity.modes import Modes
from tests.promises.bit_exact.test_rebuild_layout import chosen, started
from tests.support import protected
from tests.support.event_logs import read_events
from tests.support.killing import die_at
from tests.support.mounting import leave_free, tmpfs
from tests.support.pool import RankFailure, run_ranks
from tests.support.protected import Job, build, contents, flip_chunk
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

NODES = ("n0", "n0", "n1", "n1", "n2", "n2")
LEFT = ("n0", "n2", "n2")
"""The nodes of the remaining ranks; each reconstructs one of the two shards of n1."""


@dataclass
class Lost:
    """A job whose node n1 is lost, with its directory set aside, and n0 on a tmpfs of its own."""

    job: Job
    aside: Path

    def come_back(self) -> None:
        shutil.copytree(self.aside, self.job.node_dir("n1"), dirs_exist_ok=True)

    @property
    def slot_bytes(self) -> int:
        return max(SlotImage.of(self.job.manifest(rank)).file_bytes for rank in range(6))

    def held(self, node: str) -> list[list[int]]:
        """The iterations in each arena of a node."""
        found = []
        for path in list_arenas(self.job.node_dir(node)):
            with closing(Arena.open(path)) as arena:
                records = [arena.control.record(slot) for slot in range(arena.control.slots)]
                found.append(sorted(record.snapshot.iteration for record in records if record.snapshot is not None))
        return found

    def parity(self, node: str) -> list[int]:
        found = []
        for name in list_parity(self.job.node_dir(node)):
            with closing(ParityFile.open(name.path)) as file:
                snapshot = file.snapshot()
                assert snapshot is not None
                found.append(snapshot.iteration)
        return sorted(found)

    def files(self) -> set[tuple[str, int]]:
        root = self.job.node_dir("n0")
        return {(str(path.relative_to(root)), path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def node(arena_root: Path) -> Iterator[Path]:
    """The directory of n0."""
    with tmpfs(arena_root / "ftckpt-job" / "n0") as path:
        yield path


def lose(root: Path, aside: Path, monkeypatch: pytest.MonkeyPatch, iterations: tuple[int, ...]) -> tuple[Lost, Any]:
    """``iterations`` are in all slots, 4 and 5 of them protected; what 4, 5 and the newest are, by rank."""
    monkeypatch.setattr(protected, "SLOTS", len(iterations))
    job = Job(root, NODES, Modes(peer=True))
    build(job, iterations, (4, 5))
    wanted = {i: [contents(job, rank, i) for rank in range(6)] for i in (4, 5, max(iterations))}
    shutil.move(job.node_dir("n1"), aside)
    return Lost(job, aside), wanted


def restored(lost: Lost, tmp_path: Path, wanted: Any, iteration: int = 5, nodes: tuple[str, ...] = LEFT) -> str:
    found, source, now = started(lost.job, nodes, tmp_path)
    assert found == iteration
    assert [contents(now, rank, iteration) for rank in range(6)] == wanted[iteration]
    return source


def test_what_was_passed_by_is_given_up_for_a_rebuild(
    arena_root: Path, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots that are neither complete nor protected; the one that would replace the newest stays."""
    lost, wanted = lose(arena_root, tmp_path / "n1", monkeypatch, (2, 3, 4, 5))
    leave_free(node, 8192)
    assert restored(lost, tmp_path, wanted) == "peer_parity"
    (event,) = read_events(tmp_path / "events", "spare_given_up")
    assert event["rank"] == 0 and not event["newer"] and event["bytes"] >= lost.slot_bytes
    assert sorted(lost.held("n0")) == [[4, 5], [4, 5], [5]]
    assert sorted(lost.held("n2")) == [[2, 3, 4, 5], [2, 3, 4, 5], [5]], "a node with room gives nothing up"
    assert lost.parity("n0") == [4, 4, 5, 5]
    flip_chunk(lost.job, 0, 5, 1)
    for name in list_parity(lost.job.node_dir("n2")):
        name.path.unlink() if name.path.name.endswith("1") else None
    assert restored(lost, tmp_path, wanted, 4) == "peer_parity"


def test_what_does_not_suffice_is_not_given_up(
    arena_root: Path, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the sum that is needed and what there is; every byte stays."""
    lost, wanted = lose(arena_root, tmp_path / "n1", monkeypatch, (4, 5))
    leave_free(node, 8192)
    before = lost.files()
    with pytest.raises(RankFailure) as failure:
        started(lost.job, LEFT, tmp_path)
    numbers = re.search(
        r"need [0-9.]+ KiB \((\d+) bytes\) but only 8\.0 KiB are free in file system", str(failure.value)
    )
    assert numbers is not None and "MemoryBudgetError: rank 0: no room to reconstruct" in str(failure.value)
    slot_bytes = min(SlotImage.of(lost.job.manifest(rank)).file_bytes for rank in (2, 3))
    assert 0 < int(numbers[1]) - slot_bytes <= 3 * 4096, "a slot and a control block of one of the two lost shards"
    assert lost.files() == before
    leave_free(node, lost.slot_bytes + 65536)
    restored(lost, tmp_path, wanted)


# --- kills ---


def choose_and_die(rank: int, world_size: int, job: Job, where: str, nth: int) -> Any:
    """A start on what is left; rank 0 dies before the ``nth`` call of ``where``."""
    if rank == 0:
        die_at(where, nth)
    return chosen(rank, job, LEFT, None)


def broken(job: Job, where: str, nth: int) -> None:
    ended = run_ranks(choose_and_die, 3, job, where, nth, expect_failures=True, grace_secs=1.0)
    assert ended[0].exitcode == -signal.SIGKILL, ended[0].error


POINTS = {
    "before anything is freed": ("ftckpt.restore.room:give_up", 1),
    "a slot is void but not freed": ("ftckpt.memory.arena:Arena._delete", 1),
    "half of an arena": ("ftckpt.memory.arena:Arena.free", 2),
    "one arena of two": ("ftckpt.memory.ledger:_free", 2),
    "all is freed": ("ftckpt.restore.shard_reconstruction:ShardReconstruction.open", 1),
    "an arena without a snapshot": ("ftckpt.memory.control_block:ControlBlock.begin", 1),
    "half rebuilt": ("ftckpt.restore.shard_reconstruction:ShardReconstruction.put", 3),
    "all but the seal": ("ftckpt.memory.control_block:ControlBlock.seal", 1),
    "before newer ones are void": ("ftckpt.restore.restart:Restart.invalidate_newer", 1),
}


@pytest.mark.faults
@pytest.mark.parametrize(
    "point",
    by_default(
        POINTS, ["a slot is void but not freed", "half of an arena", "half rebuilt", "before newer ones are void"]
    ),
)
def test_killed_after_snapshots_were_given_up(
    point: str, arena_root: Path, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start rebuilds the same one, on a node as full as before; or an older one, should that be bad."""
    lost, wanted = lose(arena_root, tmp_path / "n1", monkeypatch, (2, 3, 4, 5))
    leave_free(node, 8192)
    broken(lost.job, *POINTS[point])
    assert all({4, 5} <= set(held) for held in lost.held("n0")[:2]), "what is needed is there"
    kept = tmp_path / "kept"
    shutil.copytree(lost.job.node_dir("n0"), kept)
    restored(lost, tmp_path, wanted)
    assert not list(node.glob(".dp*")), "what was left half made is there still"
    for entry in node.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.copytree(kept, node, dirs_exist_ok=True)
    for path in lost.job.node_dir("n2").glob("dp*"):
        if path.name[:3] in ("dp2", "dp3"):
            shutil.rmtree(path)
        else:
            (path / "parity.peer.1").unlink()
    restored(lost, tmp_path, wanted, 4)


@pytest.mark.faults
def test_killed_and_the_node_comes_back_with_a_newer_one(
    arena_root: Path, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If evicting older ones suffices, newer ones stay until this restart has its snapshot."""
    lost, wanted = lose(arena_root, tmp_path / "n1", monkeypatch, (3, 4, 5, 6))
    leave_free(node, 8192)
    broken(lost.job, *POINTS["half rebuilt"])
    lost.come_back()
    assert restored(lost, tmp_path, wanted, 6, NODES) == "memory"
