"""The tasks of one node's SMP with real arenas: checks, parity, packages, scrubbing."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Event

import pytest

from ftckpt.errors import SmpError
from ftckpt.events import EVENTS
from ftckpt.memory.arena import Arena
from ftckpt.memory.checks import CheckState
from ftckpt.memory.control_block import SlotState
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.package import Package, load, mirror_dir, package_path
from ftckpt.memory.parity_file import ParityFile, parity_path
from ftckpt.memory.record import HEADER_BYTES
from ftckpt.memory.slots import slot_name
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.modes import Modes
from ftckpt.smp import arenas as arenas_module
from ftckpt.smp import encode, task_queue
from ftckpt.smp.cpu_throttle import CoreShare
from tests.support.flips import flip_slot
from tests.support.smp_nodes import Node, Smp, check_parity, describe, parity_of
from tests.support.snapshots import LINEAGE, fill
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc
NODE = Modes(node=True)

Make = Callable[..., Smp]


@pytest.fixture
def node(arena_root: Path) -> Iterator[Node]:
    with closing(Node(arena_root, "n0", [0, 1, 2], 3)) as made:
        yield made


@pytest.fixture
def smp(node: Node) -> Iterator[Smp]:
    with closing(Smp(node)) as made:
        made.configure(describe(node, [node], NODE, {}))
        yield made


def iterations_of(smp: Smp, event: str) -> list[int]:
    return [fields["iteration"] for fields in smp.events.of(event)]


@pytest.mark.parametrize("hashed", [False, True])
def test_sealed_slots_are_checked(node: Node, smp: Smp, hashed: bool) -> None:
    node.snapshot(0, 7, hashed)
    smp.start()
    until(lambda: node.checked(7), "checked")
    for arena in node.arenas:
        check, hashes = arena.check(0), arena.hashes(0)
        assert check is not None and hashes is not None and arena.state(0) == SlotState.CHECKED
        assert hashes.tolist() == [arena.hash_chunk(0, chunk) for chunk in range(len(arena.image.chunks))]
        assert 0 <= check.gap_secs < 30 and not arena.verify(0) and not arena.unchecked(0)
    events = smp.events.of("checked")
    assert sorted(fields["shard"] for fields in events) == ["dp0", "dp1", "dp2"]
    sizes = {arena.manifest.shard: sum(span.nbytes for span in arena.image.chunks) for arena in node.arenas}
    assert {fields["shard"]: fields["bytes"] for fields in events} == sizes


def test_the_target_is_checked_first_then_the_newest(node: Node, smp: Smp) -> None:
    for slot, iteration in enumerate((1, 2, 3)):
        node.snapshot(slot, iteration)
    node.target(1)
    smp.start()
    until(lambda: all(node.checked(iteration) for iteration in (1, 2, 3)), "checked")
    assert iterations_of(smp, "checked") == [1, 1, 1, 3, 3, 3, 2, 2, 2]


@pytest.mark.parametrize("what", ["chunk 2", "objects", "header", "padding"])
@pytest.mark.parametrize("hashed", [False, True])
def test_what_is_not_as_the_trainer_left_it_is_never_checked(node: Node, smp: Smp, what: str, hashed: bool) -> None:
    node.snapshot(0, 7, hashed)
    image = node.arenas[1].image
    at = {
        "chunk 2": image.chunks[2].begin + 5,
        "objects": image.objects.begin,
        "header": 100,
        "padding": image.objects.end,
    }[what]
    flip_slot(node.arenas[1], 0, at)
    smp.start()
    until(lambda: len(node.states(7)) == (3 if what == "chunk 2" and not hashed else 2), "the others are checked")
    if what == "chunk 2" and not hashed:
        return  # nobody can know: the checksum is taken of what is there
    smp.settle()
    assert node.states(7) == [CheckState.CHECKED] * 2 and node.arenas[1].check(0) is None
    [corrupt] = smp.events.of("corrupt")
    assert corrupt["what"] == [what] and corrupt["iteration"] == 7


def test_a_slot_that_is_written_anew_while_it_is_hashed_is_not_checked(
    node: Node, smp: Smp, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, hash_chunk = node.arenas[0], Arena.hash_chunk
    node.snapshot(0, 7)

    def overwritten(mapped: Arena, slot: int, chunk: int) -> int:
        value = hash_chunk(mapped, slot, chunk)
        if mapped.path == arena.path and chunk == 1:
            arena.control.begin(0)
            with arena.slot(0) as view:
                view[arena.image.chunks[0].begin] ^= 1
        return value

    monkeypatch.setattr(Arena, "hash_chunk", overwritten)
    smp.start()
    until(lambda: node.states(7) == [CheckState.CHECKED] * 2, "the others are checked")
    smp.settle()
    assert arena.check(0) is None
    monkeypatch.undo()
    fill(arena, 0, 8)
    until(lambda: arena.state(0) == SlotState.CHECKED, "the new one is checked")
    assert not arena.verify(0)
    assert [e["iteration"] for e in smp.events.of("checked") if e["shard"] == "dp0"] == [8]


def test_a_target_is_encoded_as_packages_and_node_parity(node: Node, smp: Smp) -> None:
    smp.encode(0, 7)
    assert check_parity([node], NODE, 7) > 5
    assert node.packages(7) == ["dp0", "dp1", "dp2"]
    for arena in node.arenas:
        package = load(mirror_dir(node.dir) / f"{arena.manifest.shard}.{SnapshotId(LINEAGE, 7)}")
        assert package.manifest == arena.manifest and package.chunk_hashes.tolist() == arena.hashes(0).tolist()
        assert package.objects == bytes(arena.read_objects(0))
    [covered] = smp.events.of("covered")
    assert covered["iteration"] == 7 and covered["bytes"] == sum(a.image.file_bytes for a in node.arenas)
    assert covered["received_bytes"] == 0


def test_the_parity_of_the_protected_snapshot_is_never_overwritten(node: Node, smp: Smp) -> None:
    smp.start()
    for iteration in range(1, 6):
        smp.encode(iteration % 3, iteration)
        assert check_parity([node], NODE, iteration) > 5
        if iteration in (1, 4):
            node.protected(iteration)
        held = [n for n in (1, 4) if n <= iteration][-1]  # what the trainers call protected now
        assert check_parity([node], NODE, held) > 5
        assert node.packages(held) == ["dp0", "dp1", "dp2"]

    def kept() -> set[str]:
        return {path.name.rpartition(".")[2] for path in mirror_dir(node.dir).iterdir()}

    until(lambda: kept() <= {"4", "5"}, "old packages deleted")
    files = [path.name for path in node.arenas[0].path.glob("parity*")]
    assert sorted(files) == ["parity.node.0", "parity.node.1"]


def test_an_smp_that_starts_anew_uses_what_is_sealed(node: Node, smp: Smp) -> None:
    smp.encode(0, 7)
    smp.pause()
    smp.end()
    paths = [*node.dir.glob("*/parity*"), *mirror_dir(node.dir).iterdir()]
    before = {path: path.stat().st_mtime_ns for path in paths}
    again = Smp(node)
    again.configure(describe(node, [node], NODE, {}))
    again.start()
    again.settle()
    assert node.encoded(7) and {path: path.stat().st_mtime_ns for path in paths} == before
    assert again.events.of("checked") == []
    again.close()


def test_one_that_was_killed_half_way_does_only_the_rest(node: Node, smp: Smp) -> None:
    smp.encode(0, 7)
    smp.pause()
    smp.end()
    # As a kill leaves it: one file half written, one package missing, nothing claimed.
    with closing(ParityFile.open(parity_path(node.arenas[1].path, "node", 0), writable=True)) as file:
        file.begin(SnapshotId(LINEAGE, 7))
    next(mirror_dir(node.dir).glob("dp2.*")).unlink()
    kept = parity_path(node.arenas[0].path, "node", 0)
    before = kept.stat().st_mtime_ns
    again = Smp(node)
    again.configure(describe(node, [node], NODE, {}))
    assert node.states(7) == [CheckState.CHECKED] * 3, "ENCODED is revoked"
    again.start()
    until(lambda: node.encoded(7), "encoded again")
    assert check_parity([node], NODE, 7) > 5 and node.packages(7) == ["dp0", "dp1", "dp2"]
    assert kept.stat().st_mtime_ns == before and len(again.events.of("covered")) == 1
    again.close()


def test_other_groups_revoke_what_is_encoded(arena_root: Path, node: Node, smp: Smp) -> None:
    smp.encode(0, 7)
    smp.pause()
    with closing(Node(arena_root, "n0", [3], 4)) as more:
        fill(more.arenas[0], 0, 7)
        node.arenas.append(more.arenas.pop())
        node.arenas[-1].control.mark_target(SnapshotId(LINEAGE, 7))
        node.protected(7)
        smp.configure(describe(node, [node], NODE, {}))
        assert not any(state == CheckState.ENCODED for state in node.states(7))
        smp.start()
        until(lambda: node.encoded(7), "encoded")
        assert check_parity([node], NODE, 7) > 5


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few pieces, the last one shorter, and a few steps for each stripe."""
    monkeypatch.setattr(encode, "PIECE_BYTES", 12_288)
    monkeypatch.setattr(encode, "STEP_BYTES", 100_000)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(("chunk", "at"), [(1, 0), (1, 12_288), (4, -1)])
def test_a_chunk_that_went_bad_after_its_check_makes_no_parity(node: Node, smp: Smp, chunk: int, at: int) -> None:
    smp.start()
    for slot, iteration in enumerate((5, 6)):
        smp.encode(slot, iteration)
        node.protected(iteration)
    node.snapshot(2, 7)
    until(lambda: node.checked(7), "checked")
    span = node.arenas[2].image.chunks[chunk]
    flip_slot(node.arenas[2], 2, (span.begin if at >= 0 else span.end) + at)
    node.target(7)
    until(lambda: smp.tasks.cannot or node.encoded(7), "cannot")
    [event] = smp.events.of("not_covered")
    assert f"chunk {chunk}" in event["reason"] and smp.tasks.status()["state"] == "cannot"
    assert node.states(7) == [CheckState.CHECKED] * 3
    for path in node.dir.glob("*/parity*"):
        with closing(ParityFile.open(path)) as file:
            # What was not finished claims nothing, neither of 7 nor of what was in the file before.
            assert file.snapshot() is None or all(map(file.verify, range(file.num_blocks)))
    assert check_parity([node], NODE, 6) > 5
    smp.encode(0, 8)
    assert smp.tasks.cannot is None and smp.tasks.status()["state"] == "working"
    assert check_parity([node], NODE, 8) > 5


@pytest.mark.usefixtures("pieces")
def test_a_chunk_that_goes_bad_while_it_is_read_makes_no_parity(
    node: Node, smp: Smp, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.snapshot(0, 7)
    until(lambda: not smp.tasks.step(time.monotonic() + 0.1) and node.checked(7), "checked")
    steps = []

    def charge(nbytes: int) -> None:
        steps.append(nbytes)
        if len(steps) == len(node.arenas) + 2:  # behind the packages: the second step of the first stripe
            flip_slot(node.arenas[2], 0, node.arenas[2].image.chunks[0].end - 1)

    monkeypatch.setattr(smp.tasks.service.pace.read, "charge", charge)
    node.target(7)
    until(lambda: not smp.tasks.step(time.monotonic() + 0.1) and (smp.tasks.cannot or node.encoded(7)), "cannot")
    assert f"{node.arenas[2].path.name}: chunk 0" in smp.events.of("not_covered")[0]["reason"]
    with closing(ParityFile.open(parity_path(node.arenas[0].path, "node", 0))) as file:
        assert file.snapshot() is None


def test_a_target_that_fails_its_check_is_given_up_at_once(node: Node, smp: Smp) -> None:
    node.snapshot(0, 7, hashed=True)
    flip_slot(node.arenas[0], 0, node.arenas[0].image.chunks[0].begin)
    node.target(7)
    smp.start()
    until(lambda: smp.tasks.cannot == SnapshotId(LINEAGE, 7), "cannot", secs=5)
    assert [event["iteration"] for event in smp.events.of("not_covered")] == [7]
    node.snapshot(1, 8, hashed=True)
    node.target(8)
    until(lambda: node.encoded(8), "encoded")


@pytest.mark.parametrize("how", ["configured anew", "configured alike", "another file"])
def test_a_bad_slot_that_was_put_right_is_checked(node: Node, smp: Smp, how: str) -> None:
    """Repairs like a restart: in place, so that the record stays unchanged."""
    node.snapshot(0, 7, hashed=True)
    node.target(7)
    arena = node.arenas[0]
    flip_slot(arena, 0, arena.image.chunks[0].begin)
    smp.start()
    until(lambda: smp.tasks.cannot == SnapshotId(LINEAGE, 7), "cannot", secs=5)
    smp.pause()
    flip_slot(arena, 0, arena.image.chunks[0].begin)
    if how == "another file":
        path = arena.path / slot_name(0)
        shutil.copy(path, path.with_name(".copy"))
        path.with_name(".copy").rename(path)
    else:
        smp.configure(describe(node, [node], NODE, {}, smp_rate="1GB/s" if how == "configured anew" else "0"))
    smp.start()
    until(lambda: node.encoded(7), "encoded")
    assert smp.tasks.cannot is None


def test_an_error_that_nobody_thought_of_gives_the_target_up(
    node: Node, smp: Smp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object) -> bytes:
        raise MemoryError("no room for it")

    monkeypatch.setattr("ftckpt.memory.package.pack", fail)
    node.snapshot(0, 7)
    node.target(7)
    smp.start()
    until(lambda: smp.tasks.cannot == SnapshotId(LINEAGE, 7), "cannot")
    assert "MemoryError: no room" in smp.events.of("not_covered")[0]["reason"]
    monkeypatch.undo()
    smp.encode(1, 8)


def test_a_torn_package_is_not_taken_for_one(node: Node, smp: Smp) -> None:
    smp.encode(0, 7)
    smp.pause()
    path = next(mirror_dir(node.dir).glob("dp1.*"))
    path.write_bytes(path.read_bytes()[:-1])
    smp.configure(describe(node, [node], NODE, {}, smp_rate="1GB/s"))
    assert node.states(7) == [CheckState.CHECKED] * 3, "ENCODED is revoked"
    smp.start()
    until(lambda: node.encoded(7), "encoded again")
    assert node.packages(7) == ["dp0", "dp1", "dp2"]


def test_configure_reads_no_package_and_nothing_counts_before_they_are_read(
    node: Node, smp: Smp, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (7, 8):
        smp.encode(iteration - 7, iteration)
        node.protected(iteration)
    smp.pause()
    read: list[str] = []
    may_go_on = Event()

    def slow(path: Path) -> Package:
        read.append(path.name)
        assert may_go_on.wait(60)
        return load(path)

    monkeypatch.setattr("ftckpt.memory.package.load", slow)
    smp.configure(describe(node, [node], NODE, {}, smp_rate="1GB/s"))
    assert read == [] and node.states(8) == [CheckState.CHECKED] * 3
    smp.start()
    until(lambda: read, "read as a task")
    assert node.states(8) == [CheckState.CHECKED] * 3
    node.snapshot(2, 9)
    until(lambda: node.checked(9), "other tasks go on meanwhile")
    may_go_on.set()
    until(lambda: node.encoded(8), "encoded again")
    assert smp.events.of("not_covered") == []


def kept_iterations(node: Node) -> set[int]:
    """Iterations with packages."""
    return {int(path.name.rpartition(".")[2]) for path in mirror_dir(node.dir).iterdir()}


def test_packages_of_targets_that_are_given_up_do_not_add_up(node: Node, smp: Smp) -> None:
    smp.start()
    for iteration in range(1, 9):
        node.snapshot(iteration % 3, iteration)
        until(lambda: node.checked(iteration), "checked")  # noqa: B023
        if iteration != 3:  # only 3 is ever encoded
            flip_slot(node.arenas[2], iteration % 3, node.arenas[2].image.chunks[1].begin)
        node.target(iteration)
        given_up = SnapshotId(LINEAGE, iteration)
        done = (lambda: node.encoded(3)) if iteration == 3 else (lambda: smp.tasks.cannot == given_up)  # noqa: B023
        until(done, "encoded, or given up")
        assert len(kept_iterations(node)) <= 2
    assert 8 in kept_iterations(node)


def test_packages_go_when_the_next_target_is_encoded_and_not_before(
    node: Node, smp: Smp, monkeypatch: pytest.MonkeyPatch
) -> None:
    smp.encode(0, 1)
    node.protected(1)
    begun, seen = ParityFile.begin, []

    def begin(file: ParityFile, snapshot: SnapshotId) -> None:
        seen.append((snapshot.iteration, kept_iterations(node)))
        begun(file, snapshot)

    monkeypatch.setattr(ParityFile, "begin", begin)
    for iteration in (2, 3):
        node.snapshot(iteration % 3, iteration)
        node.protected(iteration)  # as if it were, after a restart, when nothing of it is made yet
        node.target(iteration)
        until(lambda: node.encoded(iteration), "encoded")  # noqa: B023
        until(lambda: kept_iterations(node) == {iteration}, "what was before goes")  # noqa: B023
    assert {iteration for iteration, _ in seen} == {2, 3}
    assert all(kept == {iteration - 1, iteration} for iteration, kept in seen)


def test_packages_of_another_layout_stay_until_a_snapshot_in_this_one_is_protected(node: Node, smp: Smp) -> None:
    """Another node may not have encoded the target yet; they would be needed for its reconstruction."""
    for iteration in (2, 3, 4):  # the newest was not protected any more
        old = package_path(node.dir, "tp1-dp0", SnapshotId(b"o" * 16, iteration))
        old.parent.mkdir(exist_ok=True)
        old.write_bytes(b"a package")
    smp.start()
    for iteration, kept in ((5, {3, 4, 5}), (6, {5, 6})):
        smp.encode(iteration % 3, iteration)
        until(lambda: kept_iterations(node) == kept, "what can go has gone")  # noqa: B023
        smp.settle()
        assert kept_iterations(node) == kept
        node.protected(iteration)


@pytest.mark.parametrize("delay_secs", [0.0, 0.01, 0.03, 0.06, 0.1])
def test_a_job_that_ends_makes_no_noise(
    node: Node, smp: Smp, delay_secs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers remove their arenas before they end the SMP, whatever it does at that time."""
    monkeypatch.setattr(arenas_module, "_OPEN_AGAIN_SECS", 0.1)
    smp.configure(describe(node, [node], NODE, {}, scrub_secs=0.01))
    node.snapshot(0, 7)
    node.target(7)
    smp.start()
    time.sleep(delay_secs)  # an instant of its work
    for arena in node.arenas:
        arena.remove()
        time.sleep(delay_secs / 10)  # a trainer that is later than the others
    until(lambda: len(smp.tasks.arenas.gone) == 3, "seen")
    enough = smp.looks + 15
    until(lambda: smp.looks >= enough, "it has tried to open them again")
    assert len(smp.tasks.arenas.gone) == 3
    assert [name for name, _ in smp.events.all if EVENTS[name].loud] == []


def test_a_slot_that_gets_memory_later_is_checked(arena_root: Path) -> None:
    with closing(Node(arena_root, "n1", [0], 1)) as node, closing(Smp(node)) as smp:
        smp.configure(describe(node, [node], NODE, {}))
        smp.start()
        node.arenas[0].free(2)
        smp.settle(15)
        node.arenas[0].allocate(2)
        fill(node.arenas[0], 2, 9)
        until(lambda: node.checked(9), "checked")


def test_an_arena_that_is_made_anew_is_opened_again(arena_root: Path, node: Node, smp: Smp) -> None:
    node.snapshot(0, 7)
    smp.start()
    until(lambda: node.checked(7), "checked")
    old = node.arenas.pop(0)
    old.remove()
    with closing(Node(arena_root, "n0", [0], 3)) as again:
        node.arenas.insert(0, again.arenas.pop())
        smp.encode(1, 8)
        assert check_parity([node], NODE, 8) > 5


def test_work_goes_on_however_long_ranks_copy(node: Node, smp: Smp) -> None:
    rank = Heartbeat.open(node.dir, 0)
    node.snapshot(0, 7)
    node.target(7)
    smp.start()

    def encoded() -> bool:
        rank.tell_copying(True)
        return node.encoded(7)

    until(encoded, "encoded", secs=30)


def test_the_limit_of_reads_is_kept(node: Node, smp: Smp) -> None:
    smp.configure(describe(node, [node], NODE, {}, smp_rate="1MB/s"))
    node.snapshot(0, 7)
    begun = time.monotonic()
    smp.start()
    until(lambda: node.checked(7), "checked")
    nbytes = sum(span.nbytes for arena in node.arenas for span in arena.image.chunks)
    assert time.monotonic() - begun > 0.9 * (nbytes - 65536) / 1e6


def test_a_share_of_the_cores_that_is_used_up_shows(node: Node, smp: Smp) -> None:
    """One so small that the first piece of work uses it up for a minute; ranks see that in the pulse."""
    smp.configure(describe(node, [node], NODE, {}, protect_interval="auto", smp_cores=1e-6))
    ranks = Heartbeat.open(node.dir, 0)
    assert not ranks.smp_rests()
    smp.encode(0, 7)
    smp.settle()
    assert ranks.smp_rests(), "the next target is to wait"
    status = smp.tasks.status()
    assert 0 < status["rest_secs"] <= 60 and 0 <= status["idle_cores"] <= 1


def test_nothing_is_checked_that_nobody_needs(node: Node, smp: Smp) -> None:
    smp.tasks.trains = True
    smp.encode(0, 7)
    node.snapshot(1, 8)
    smp.settle()
    assert node.checked(7) and node.states(8) == [], "ranks that train overwrite it"
    # One rank has sealed the next when all are killed; other nodes may have, too, or may not have come to 8.
    fill(node.arenas[0], 2, 9)
    for arena in node.arenas:
        arena.control.mark_whole(SnapshotId(LINEAGE, 8))
    fill(node.arenas[1], 2, 6)
    smp.tasks.trains = False
    until(lambda: node.checked(8) and node.states(9) == [CheckState.CHECKED], "what a restart may take")
    smp.settle()
    assert node.states(6) == [], "what no restart takes"


def test_checksums_are_computed_on_several_threads(node: Node, smp: Smp, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    hash_chunk = Arena.hash_chunk

    def noted(arena: Arena, slot: int, chunk: int) -> int:
        seen.add(threading.get_ident())
        time.sleep(0.01)
        return hash_chunk(arena, slot, chunk)

    monkeypatch.setattr(task_queue, "_THREAD_BYTES", 1)
    monkeypatch.setattr(CoreShare, "threads", lambda share, most: most)
    monkeypatch.setattr(Arena, "hash_chunk", noted)
    node.snapshot(0, 7)
    smp.start()
    until(lambda: node.checked(7), "checked")
    assert len(seen) >= 4
    monkeypatch.undo()
    for arena in node.arenas:
        hashes = arena.hashes(0)
        assert hashes is not None and hashes.tolist() == [*map(partial(arena.hash_chunk, 0), range(len(hashes)))]


def test_a_description_that_lacks_something_is_refused(smp: Smp) -> None:
    with pytest.raises(SmpError, match="places"):
        smp.configure({"node": "n0"})
    with pytest.raises(SmpError, match="parity group"):
        smp.configure({"node": "n0", "places": {}, "groups": [{"name": "x"}]})


def test_an_arena_that_is_not_there_is_told_once(node: Node, smp: Smp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas_module, "_OPEN_AGAIN_SECS", 0.1)
    description = describe(node, [node], NODE, {})
    description["places"]["9"] = {"shard": "dp9", "arena": "dp9.00000000", "pid": 1}
    smp.configure(description)
    node.snapshot(0, 7)
    node.target(7)
    smp.start()
    until(lambda: node.checked(7), "the others are checked")
    smp.settle(15)
    assert len(smp.events.of("smp_error")) == 1 and not node.encoded(7)


class TestScrub:
    @pytest.fixture
    def encoded(self, node: Node, smp: Smp) -> Smp:
        """Iteration 7 is encoded, and from now on scrubbed all the time."""
        smp.encode(0, 7)
        smp.pause()
        smp.configure(describe(node, [node], NODE, {}, scrub_secs=0.3))
        until(lambda: not smp.tasks.step(time.monotonic() + 0.05) and node.encoded(7), "encoded again, no scrub runs")
        return smp

    @pytest.mark.parametrize("target", [7, -1])
    def test_bad_chunks_are_told_once_and_refuse_a_target(self, node: Node, encoded: Smp, target: int) -> None:
        """The trainer may take the slot over at any moment: whoever writes into it then spoils another snapshot."""
        arena, last = node.arenas[1], len(node.arenas[1].image.chunks) - 1
        for chunk in (0, 3, last):
            flip_slot(arena, 0, arena.image.chunks[chunk].begin + 9)
        before, covered = bytes(arena.slot(0)), len(encoded.events.of("covered"))
        node.protected(7)
        node.target(target)
        encoded.start()
        until(lambda: len(encoded.events.of("scrubbed")) >= 3, "scrubbed")
        assert bytes(arena.slot(0)) == before
        assert arena.verify(0).names == [f"chunk {chunk}" for chunk in (0, 3, last)]
        [corrupt] = encoded.events.of("corrupt")
        assert corrupt["what"] == [f"chunk {chunk}" for chunk in (0, 3, last)]
        until(lambda: encoded.tasks.cannot == (SnapshotId(LINEAGE, 7) if target == 7 else None), "given up")
        assert node.encoded(7) is (target == -1)
        assert len(encoded.events.of("covered")) == covered, "it is not claimed again in between"

    @pytest.mark.parametrize("target", [7, -1])
    def test_bad_parity_of_a_target_is_computed_again(self, node: Node, encoded: Smp, target: int) -> None:
        with closing(parity_of(node.arenas[0].path, "node", 7)) as file:
            path, blocks = file.path, file.num_blocks
        node.protected(7)
        node.target(target)
        covered = len(encoded.events.of("covered"))
        with closing(ParityFile.open(path, writable=True)) as file:
            for block in range(blocks):
                file.block(block)[3] ^= 1
        encoded.start()
        until(lambda: len(encoded.events.of("scrubbed")) >= 3, "scrubbed")
        assert len(encoded.events.of("corrupt")) == blocks
        if target == 7:
            until(lambda: len(encoded.events.of("covered")) == covered + 1, "encoded again")
            assert check_parity([node], NODE, 7) > 5 and node.encoded(7)
        else:
            assert path.exists(), "its other blocks are still of use"

    @pytest.mark.parametrize(("damage", "at"), [("header", 20), ("record", HEADER_BYTES + 10), ("file", None)])
    def test_parity_that_nobody_could_read_is_written_anew(
        self, node: Node, encoded: Smp, damage: str, at: int | None
    ) -> None:
        node.protected(7)
        with closing(parity_of(node.arenas[0].path, "node", 7)) as file:
            path = file.path
        if at is None:
            path.unlink()
        else:
            with path.open("r+b") as raw:
                raw.seek(at)
                raw.write(b"\xa5")
        covered = len(encoded.events.of("covered"))
        encoded.start()
        until(lambda: len(encoded.events.of("covered")) == covered + 1, "encoded again")
        assert check_parity([node], NODE, 7) > 5 and node.encoded(7)
        assert [event["what"] for event in encoded.events.of("corrupt")] == ([] if at is None else [[damage]])
        assert [event["reason"] for event in encoded.events.of("not_covered")] == [
            "a package or a parity file is gone"
        ]

    def test_a_bad_package_of_a_target_is_packed_again(self, node: Node, encoded: Smp) -> None:
        path = next(mirror_dir(node.dir).glob("dp1.*"))
        data = bytearray(path.read_bytes())
        data[200] ^= 1
        path.write_bytes(data)
        encoded.start()
        until(lambda: encoded.events.of("corrupt"), "noticed")
        until(lambda: node.packages(7) == ["dp0", "dp1", "dp2"] and node.encoded(7), "packed again")
