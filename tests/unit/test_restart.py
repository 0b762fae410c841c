"""A whole restart of ranks that are threads: verified, rebuilt, void, loaded, in the same layout and in another."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import xxhash
from test_load import run_ranks

from ftckpt.errors import ConfigError, LostError, MismatchError, StorageError
from ftckpt.group import Group
from ftckpt.model import objects
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.loaded import NOTHING, Checkpoint
from ftckpt.model.manifest import Manifest
from ftckpt.model.replicas import private_key
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece
from ftckpt.parity.modes import Modes
from ftckpt.persist.files import FileStorage
from ftckpt.restore import shelf
from ftckpt.restore.build import Build
from ftckpt.restore.choice import Decision
from ftckpt.restore.load import Traffic
from ftckpt.restore.restart import Restart
from ftckpt.restore.straight import StraightFetch
from ftckpt.store.arena import Arena
from ftckpt.store.directory import list_arenas, node_directory
from ftckpt.store.package import list_packages
from ftckpt.store.parity_file import list_parity, parity_path
from tests.support.arenas import Recorded
from tests.support.errors import raises
from tests.support.protected import LINEAGE, Job, build, contents, flip, flip_chunk, slot_of

pytestmark = pytest.mark.usefixtures("as_flags")

NODE, PEER = Modes(node=True), Modes(peer=True)


@dataclass
class Start:
    """What one rank saw of a restart."""

    decision: Decision | None
    source: str
    events: Recorded
    lineage: bytes = b""
    origin: Checkpoint = NOTHING
    why: str = ""


def restart(
    topology: Topology,
    node_dir: Callable[[str], Path],
    then: Callable[[Restart, Decision, int], None] = lambda found, decision, rank: None,
    reshapes: bool = False,
    *,
    loaded: Checkpoint = NOTHING,
    on_lost: str = "storage",
    before: int = 0,
    unproven: bool = False,
    storage: str = "",
) -> list[Start]:
    """All ranks choose, void what is newer, and do ``then``; ``loaded`` from storage."""

    def run(group: Any) -> Start:
        mine, events = replace(topology, rank=group.rank), Recorded()
        one = Restart(cast(Group, group), mine, node_dir(mine.me.node), events, storage=storage)
        try:
            decision = one.choose(on_lost, loaded, reshapes, before, unproven)
            start = Start(decision, one.source, events, one.void_newer(decision), one.origin, one.why)
            if decision is not None:
                then(one, decision, group.rank)
            return start
        finally:
            one.close()

    return run_ranks(len(topology.members), run)


def iterations(job: Job) -> list[list[int]]:
    found = []
    for node in sorted(set(job.nodes)):
        for path in list_arenas(job.node_dir(node)):
            with closing(Arena.open(path)) as arena:
                found.append(sorted(snapshot.iteration for snapshot in arena.snapshots()))
    return found


def events_of(starts: Sequence[Start], name: str) -> list[dict[str, Any]]:
    return [fields for start in starts for event, fields in start.events.seen if event == name]


# --- chosen, verified, rebuilt ---


def test_all_ranks_take_the_newest_and_agree_on_a_new_lineage(arena_root: Path) -> None:
    job = Job(arena_root, ("a", "a", "b"), PEER)
    build(job, (3, 4, 5), (5,))
    starts = restart(job.topology, job.node_dir)
    assert {(s.decision and s.decision.snapshot, s.source) for s in starts} == {(SnapshotId(LINEAGE, 5), "memory")}
    assert len({start.lineage for start in starts}) == 1 and starts[0].lineage != LINEAGE
    assert len(events_of(starts, "verified")) == 3 and not events_of(starts, "fallback")


@pytest.mark.parametrize("modes", [NODE, PEER], ids=["node", "peer"])
@pytest.mark.parametrize("harm", ["arena", "chunk", "objects"])
def test_what_is_lost_is_rebuilt_byte_for_byte(arena_root: Path, harm: str, modes: Modes) -> None:
    job = Job(arena_root, ("a", "a", "a") if modes.node else ("a", "b", "c"), modes)
    build(job, (4, 5), (4, 5))
    wanted = [contents(job, rank, 5) for rank in range(3)]
    if harm == "arena":
        shutil.rmtree(job.path(1))
    elif harm == "chunk":
        flip_chunk(job, 1, 5, 2)
    else:
        with closing(Arena.open(job.path(1))) as arena:
            flip(job.path(1) / f"slot{slot_of(arena, 5)}.safetensors", arena.image.objects.begin + 5)
    starts = restart(job.topology, job.node_dir)
    assert all(start.decision is not None and start.decision.snapshot.iteration == 5 for start in starts)
    assert [contents(job, rank, 5) for rank in range(3)] == wanted
    expected = "memory" if harm == "objects" else f"{'node' if modes.node else 'peer'}_parity"
    assert starts[0].source == expected
    assert [event["shards"] for event in events_of(starts, "rebuilt")] == [["dp1"]]


def test_a_block_that_is_bad_is_not_used_and_the_snapshot_before_is_taken(arena_root: Path) -> None:
    job = Job(arena_root, ("a", "a", "a"), NODE)
    build(job, (4, 5), (4, 5))
    flip_chunk(job, 1, 5, 2)
    for rank in (0, 2):
        path = parity_path(job.path(rank), "node", 1)
        path.write_bytes(path.read_bytes()[:4096] + bytes(path.stat().st_size - 4096))
    damaged = (job.path(1) / "slot1.safetensors").read_bytes()
    starts = restart(job.topology, job.node_dir)
    assert all(start.decision is not None and start.decision.snapshot.iteration == 4 for start in starts)
    assert events_of(starts, "arena_problem") and events_of(starts, "fallback")
    assert (job.path(1) / "slot1.safetensors").read_bytes() == damaged, (
        "nothing was written that is known to be wrong"
    )
    assert iterations(job) == [[4]] * 3, "what could not be taken is void"


def test_a_rebuild_that_fails_has_not_taken_what_comes_in_its_place(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4 a shard is lost, which no parity covers: its slots are of no use, and are taken before the older 3."""
    job = Job(arena_root, ("a", "a", "a"), NODE)
    build(job, (3, 4, 5), (5,))
    wanted = [contents(job, rank, 3) for rank in range(3)]
    with closing(Arena.open(job.path(0), writable=True)) as arena:
        arena.control.void(slot_of(arena, 4))
    with closing(Arena.open(job.path(1), writable=True)) as arena:
        slot = slot_of(arena, 5)
        arena.control.begin(slot)
        arena.control.seal(slot, SnapshotId(bytes(16), 4))
    monkeypatch.setattr(Build, "check", lambda self, chunk: False)
    starts = restart(job.topology, job.node_dir)
    assert all(start.decision is not None and start.decision.snapshot.iteration == 3 for start in starts)
    assert [contents(job, rank, 3) for rank in range(3)] == wanted


def test_a_wrong_checksum_of_a_package_does_not_pass(arena_root: Path) -> None:
    """Of an unprotected snapshot whose chunk was changed after its checksum was taken nothing is restored."""
    job = Job(arena_root, ("a", "b"), Modes())
    build(job, (5,), ())
    flip_chunk(job, 1, 5, 0)
    with raises(LostError, "iteration 5", "dp1"):
        restart(job.topology, job.node_dir)


def test_newer_snapshots_are_void_on_all_nodes_with_all_that_could_bring_them_back(arena_root: Path) -> None:
    job = Job(arena_root, ("a", "b", "c"), PEER)
    build(job, (3, 4, 5), (4, 5))
    for rank in (1, 2):
        flip_chunk(job, rank, 5, 0)
    starts = restart(job.topology, job.node_dir)
    assert all(start.decision is not None and start.decision.snapshot.iteration == 4 for start in starts)
    assert iterations(job) == [[3, 4]] * 3
    for node in "abc":
        assert {name.snapshot.iteration for name in list_packages(job.node_dir(node))} == {4}
        assert [name.index for name in list_parity(job.node_dir(node))] == [0]


# --- beside storage ---


def trained(job: Job, origin: Checkpoint, *iterations: int) -> None:
    """Snapshots that go on from ``origin``, all of them whole."""
    build(job, iterations, ())
    for rank in range(len(job.nodes)):
        with closing(Arena.open(job.path(rank), writable=True)) as arena:
            arena.control.mark_origin(origin)
            arena.control.mark_whole(SnapshotId(LINEAGE, max(iterations)))


@pytest.mark.parametrize(
    ("origin", "loaded", "taken", "then"),
    [
        pytest.param(NOTHING, Checkpoint(0), 250, NOTHING, id="nothing on storage"),
        pytest.param(Checkpoint(200), Checkpoint(0), 250, Checkpoint(200), id="storage is not mounted"),
        pytest.param(NOTHING, Checkpoint(200), 250, Checkpoint(200), id="saved on the way"),
        pytest.param(Checkpoint(200), Checkpoint(200), 250, Checkpoint(200), id="a usual restart"),
        pytest.param(NOTHING, Checkpoint(300), None, Checkpoint(300), id="storage is newer"),
        pytest.param(Checkpoint(200), Checkpoint(100), None, Checkpoint(100), id="storage went back"),
        pytest.param(Checkpoint(100), Checkpoint(100), 250, Checkpoint(100), id="a restart after that"),
        pytest.param(NOTHING, Checkpoint(100, True), None, Checkpoint(100, True), id="named"),
        pytest.param(
            Checkpoint(100),
            Checkpoint(100, True),
            None,
            Checkpoint(100, True),
            id="named, and once newest",
        ),
        pytest.param(
            Checkpoint(200, True),
            Checkpoint(100, True),
            None,
            Checkpoint(100, True),
            id="another one named",
        ),
        pytest.param(
            Checkpoint(100, True),
            Checkpoint(100, True),
            250,
            Checkpoint(100, True),
            id="a restart with the same name",
        ),
        pytest.param(Checkpoint(100, True), Checkpoint(200), 250, Checkpoint(200), id="no name any more"),
        pytest.param(
            Checkpoint(100), Checkpoint(200, lasting=False), 250, Checkpoint(100), id="one that may go with a node"
        ),
        pytest.param(Checkpoint(200), Checkpoint(100, lasting=False), 250, Checkpoint(200), id="gone with a node"),
        pytest.param(NOTHING, Checkpoint(250, True), None, Checkpoint(250, True), id="named, as new as memory"),
    ],
)
def test_the_newer_of_storage_and_memory_counts_unless_the_operator_went_back(
    arena_root: Path, origin: Checkpoint, loaded: Checkpoint, taken: int | None, then: Checkpoint
) -> None:
    job = Job(arena_root, ("a", "b"), Modes())
    trained(job, origin, 249, 250)
    starts = restart(job.topology, job.node_dir, loaded=loaded)
    assert {start.decision and start.decision.snapshot.iteration for start in starts} == {taken}
    assert {start.origin for start in starts} == {then}
    told = events_of(starts, "rolled_back") + events_of(starts, "older_than_storage")
    assert [event["loaded"] for event in told] == ([] if taken else [loaded.iteration] * 2)
    assert all("memory (250)" in start.why for start in starts) == (taken is None)
    assert iterations(job) == [[249, 250] if taken else []] * 2, "what is given up can never be taken again"


def test_a_node_that_was_away_while_the_operator_went_back_repeats_nothing(arena_root: Path) -> None:
    """Its arena says that the newest on storage was 200, and has a snapshot of the history that was undone."""
    job = Job(arena_root, ("a", "b"), Modes())
    trained(job, Checkpoint(200, generation=3), 150)
    with closing(Arena.open(job.path(0), writable=True)) as arena:
        arena.control.mark_origin(Checkpoint(100, named=True, generation=4))
    starts = restart(job.topology, job.node_dir, loaded=Checkpoint(100, named=True))
    assert all(start.decision is not None and start.decision.snapshot.iteration == 150 for start in starts)
    assert {start.origin.generation for start in starts} == {4}


def test_what_was_undone_while_a_node_was_away_does_not_come_back_with_it(arena_root: Path) -> None:
    """Its parity and packages could bring back the others' part of it, too."""
    job = Job(arena_root, ("a", "b"), Modes())
    trained(job, Checkpoint(200, generation=3), 250)
    with closing(Arena.open(job.path(0), writable=True)) as arena:
        for slot in range(arena.control.slots):
            arena.control.void(slot)
        arena.control.mark_whole(None)
        arena.control.mark_origin(Checkpoint(100, named=True, generation=4, undone=4))
    starts = restart(job.topology, job.node_dir, loaded=Checkpoint(100, named=True), on_lost="fail")
    assert {start.decision for start in starts} == {None} and iterations(job) == [[], []]
    assert [event["loaded"] for event in events_of(starts, "undone")] == [100]


@pytest.mark.parametrize("damage", ["bytes", "layout"])
@pytest.mark.parametrize("storage", [249, 251])
def test_newer_storage_counts_beside_memory_that_cannot_be_taken(arena_root: Path, damage: str, storage: int) -> None:
    """What is older than that is given up, and nothing is asked of it; older storage brings back no layout."""
    job = Job(arena_root, ("a", "b"), Modes())
    trained(job, NOTHING, 249, 250)
    topology = job.topology
    if damage == "bytes":
        for iteration in (249, 250):
            flip_chunk(job, 1, iteration, 0)
    else:
        topology = replace(topology, members=topology.members[:1], layout={"dp": 1})
    if storage < 250:
        with raises(LostError if damage == "bytes" else MismatchError):
            restart(topology, job.node_dir, loaded=Checkpoint(storage), on_lost="fail")
        return
    (first, *_) = restart(topology, job.node_dir, loaded=Checkpoint(storage), on_lost="fail")
    assert first.decision is None and first.why == "memory (250) is older and given up"
    assert first.origin == Checkpoint(storage)


@pytest.mark.parametrize("iteration", [0, 100, 250, 260])
@pytest.mark.parametrize("before", [0, 251])
def test_what_was_loaded_in_training_counts_whatever_memory_has(
    arena_root: Path, iteration: int, before: int
) -> None:
    """Of an iteration that was named at the start too, and where the job has gone back before another one then."""
    job = Job(arena_root, ("a", "b"), Modes())
    trained(job, Checkpoint(100, generation=3), 249, 250)
    starts = restart(job.topology, job.node_dir, loaded=Checkpoint(iteration, generation=5), before=before)
    assert {start.decision for start in starts} == {None} and iterations(job) == [[]] * 2
    assert {(start.origin.generation, start.origin.undone, start.origin.before) for start in starts} == {
        (6, 6, before)
    }, "what is on its way to storage may be of generation 5"


def test_an_origin_that_changes_is_of_the_next_generation(arena_root: Path) -> None:
    job = Job(arena_root, ("a", "b"), Modes())
    trained(job, Checkpoint(200, generation=3), 250)
    (start, _) = restart(job.topology, job.node_dir, loaded=Checkpoint(100, named=True))
    assert (start.origin, start.origin.generation) == (Checkpoint(100, named=True), 4)


def test_a_job_goes_back_before_an_iteration_once(arena_root: Path) -> None:
    job = Job(arena_root, ("a", "b"), PEER)
    build(job, (240, 250, 260), (260,))
    before = restart(job.topology, job.node_dir, before=251)
    assert {start.decision and start.decision.snapshot.iteration for start in before} == {250}
    assert [event["before"] for event in events_of(before, "went_back")] == [251] * 2
    assert iterations(job) == [[240, 250]] * 2, "parity and packages of 260 cannot bring it back either"
    assert not list_packages(job.node_dir("a")) and not list_packages(job.node_dir("b"))
    assert {(start.origin.before, start.origin.generation) for start in before} == {(251, 1)}


def test_where_nothing_is_behind_it_nothing_was_undone(arena_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(arena_root, ("a", "b"), Modes())
    trained(job, NOTHING, 249, 250)
    caplog.set_level("INFO", "ftckpt")
    starts = restart(job.topology, job.node_dir, before=251)
    assert {start.decision and start.decision.snapshot.iteration for start in starts} == {250}
    assert not events_of(starts, "went_back") and {start.origin.before for start in starts} == {251}
    assert "nothing is undone; goes on from iteration 250" in caplog.text


def test_the_same_number_goes_back_again_only_behind_a_start_without_it(arena_root: Path) -> None:
    job = Job(arena_root, ("a", "b"), Modes())
    trained(job, Checkpoint(generation=1, before=251), 250, 270)
    for number, taken in ((251, 270), (0, 270), (251, 250)):
        (start, _) = restart(job.topology, job.node_dir, before=number)
        assert start.decision is not None and start.decision.snapshot.iteration == taken
        assert start.origin.before == number
        for rank in range(2):
            with closing(Arena.open(job.path(rank), writable=True)) as arena:
                arena.control.mark_origin(start.origin)


def test_where_nothing_is_before_it_a_start_that_goes_back_is_refused(arena_root: Path) -> None:
    job = Job(arena_root, ("a", "b"), Modes())
    (start, _) = restart(job.topology, job.node_dir, before=100)
    assert start.decision is None and start.origin.before == 100, "a first start; later ones go on"
    trained(job, NOTHING, 249, 250)
    with raises(LostError, "no snapshot before iteration 100", "on storage, which have iterations 249, 250; name"):
        restart(job.topology, job.node_dir, before=100)
    with raises(ConfigError, "--ftckpt-restore-before: 100, but the script has loaded iteration 120"):
        restart(job.topology, job.node_dir, before=100, loaded=Checkpoint(120))
    assert iterations(job) == [[249, 250]] * 2, "a start that is refused undoes nothing"
    (start, _) = restart(job.topology, job.node_dir, before=250, loaded=Checkpoint(120))
    assert start.decision is not None and start.decision.snapshot.iteration == 249


def test_what_was_undone_before_an_iteration_does_not_come_back_with_a_node(arena_root: Path) -> None:
    job = Job(arena_root, ("a", "b"), PEER)
    build(job, (240, 260), (260,))
    with closing(Arena.open(job.path(0), writable=True)) as arena:
        arena.control.void(slot_of(arena, 260))
        arena.control.mark_whole(SnapshotId(LINEAGE, 240))
        arena.control.mark_origin(Checkpoint(generation=2, before=251, returned=2, limit=251))
    with closing(Arena.open(job.path(1), writable=True)) as arena:
        arena.control.mark_origin(Checkpoint(generation=1))
    starts = restart(job.topology, job.node_dir, before=251)
    assert {start.decision and start.decision.snapshot.iteration for start in starts} == {240}


def test_what_is_rebuilt_is_of_the_past_that_the_job_is_in(arena_root: Path) -> None:
    """An earlier start went back to before 100; a node is lost, and each start behind that has the number, too."""
    job = Job(arena_root, ("a", "b"), PEER)
    build(job, (500,), (500,))
    for rank in range(2):
        with closing(Arena.open(job.path(rank), writable=True)) as arena:
            arena.control.mark_origin(Checkpoint(generation=3, before=100, returned=3, limit=100))
            arena.control.mark_whole(SnapshotId(LINEAGE, 500))
    shutil.rmtree(job.node_dir("b"))
    for _ in range(2):
        starts = restart(job.topology, job.node_dir, before=100)
        assert {start.decision and start.decision.snapshot.iteration for start in starts} == {500}
        with closing(Arena.open(job.path(1))) as arena:
            origin = arena.control.origin()
        assert (origin.generation, origin.returned, origin.limit) == (3, 3, 100)
    assert list_packages(job.node_dir("a")), "what protects it stays"


def test_what_the_operator_goes_back_from_need_not_be_whole(arena_root: Path) -> None:
    job = Job(arena_root, ("a", "b"), Modes())
    trained(job, NOTHING, 250)
    flip_chunk(job, 1, 250, 0)
    (first, _) = restart(job.topology, job.node_dir, loaded=Checkpoint(100, True), on_lost="fail")
    assert first.decision is None and first.origin == Checkpoint(100, True)


def test_ranks_that_loaded_different_iterations_are_refused_before_anything_is_void(arena_root: Path) -> None:
    job = Job(arena_root, ("a", "b"), Modes())
    trained(job, NOTHING, 250)

    def run(group: Any) -> None:
        mine = replace(job.topology, rank=group.rank)
        one = Restart(cast(Group, group), mine, job.node_dir(mine.me.node), Recorded())
        with closing(one):
            one.choose("storage", Checkpoint(300 + group.rank))

    with raises(ConfigError, "rank 0 300", "rank 1 301"):
        run_ranks(2, run)
    assert iterations(job) == [[250]] * 2


@pytest.mark.parametrize("on_lost", ["storage", "fail", "fresh"])
@pytest.mark.parametrize("loaded", [Checkpoint(0), Checkpoint(100)], ids=["nothing", "100"])
def test_what_a_restart_does_when_snapshots_were_lost(arena_root: Path, on_lost: str, loaded: Checkpoint) -> None:
    job = Job(arena_root, ("a", "b"), Modes())
    trained(job, NOTHING, 250)
    flip_chunk(job, 1, 250, 0)
    if on_lost == "fail" or (on_lost == "storage" and not loaded.is_one):
        remedy = ("iteration 100", "--ftckpt-on-lost storage") if loaded.is_one else ("--ftckpt-on-lost fresh",)
        with raises(LostError, "iteration 250 was whole", "dp1", *remedy):
            restart(job.topology, job.node_dir, loaded=loaded, on_lost=on_lost)
        assert iterations(job) == [[250]] * 2, "a start that is refused leaves what there is"
        return
    starts = restart(job.topology, job.node_dir, loaded=loaded, on_lost=on_lost)
    assert all(start.decision is None and "lost" in start.why for start in starts)
    assert [event["loaded"] for event in events_of(starts, "lost")] == [loaded.iteration] * 2


def test_what_was_loaded_counts_for_the_newest_only_where_storage_is_seen(
    arena_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_storage: FileStorage, _prefix: str = "") -> Any:
        raise StorageError("Input/output error")

    job = Job(arena_root, ("a", "b"), Modes())
    trained(job, NOTHING, 250)
    with monkeypatch.context() as patch:
        patch.setattr(shelf, "_PATIENCE_SECS", 0.01)
        patch.setattr(FileStorage, "list", failing)
        with raises(StorageError, "cannot be seen: Input/output error", "start again when it is back"):
            restart(job.topology, job.node_dir, loaded=Checkpoint(300), storage=str(tmp_path))
        assert iterations(job) == [[250]] * 2
        (first, _) = restart(job.topology, job.node_dir, loaded=Checkpoint(200), storage=str(tmp_path))
        assert first.decision is not None, "memory is the newest that anybody has called whole"
    (first, _) = restart(job.topology, job.node_dir, loaded=Checkpoint(300), storage=str(tmp_path))
    assert first.decision is None


# --- loaded ---


class State:
    """Tensors and objects of one rank."""

    reshapes = True

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces, self.objects, self.calls = pieces, [], []  # type: ignore[var-annotated]

    def describe(self) -> Description:
        return Description(tuple(self.pieces), (), frozenset())

    def save_objects(self) -> Mapping[str, Any]:
        return {}

    def load_objects(self, saved: Mapping[str, Any]) -> None:
        self.objects, self.calls = [saved], [*self.calls, "objects"]

    def load_reshaped(self, saved: Sequence[Mapping[str, Any]], iteration: int) -> None:
        self.objects, self.calls = list(saved), [*self.calls, f"reshaped {iteration}"]

    def finish_load(self) -> None:
        self.calls = [*self.calls, "finish"]


@dataclass
class Model:
    """A weight that ``dp`` ranks have cut among them, a buffer and a counter that each has for itself.

    ``buffers`` gives each rank's, where they differ.
    """

    root: Path
    nodes: tuple[str, ...]
    numel: int = 4000
    buffers: dict[int, float] = field(default_factory=dict)

    @property
    def topology(self) -> Topology:
        members = tuple(RankPlace({"dp": rank}, node) for rank, node in enumerate(self.nodes))
        return Topology(0, members, {"dp": len(self.nodes)})

    def node_dir(self, node: str) -> Path:
        return node_directory(self.root, "job", node)

    def fragments(self, rank: int) -> tuple[Fragment, Fragment, Fragment]:
        begin, end = (self.numel * edge // len(self.nodes) for edge in (rank, rank + 1))
        shard = Fragment("master/w", "F32", (self.numel,), Box((0,), (self.numel,)), begin, end)
        own = [Fragment.whole(key, "F32", (50,), Box((0,), (50,))) for key in ("buffer/b", "local/c")]
        return shard, own[0], own[1]

    def held(self, rank: int) -> tuple[Fragment, ...]:
        """What its slot has."""
        return self.fragments(rank)

    def values(self, rank: int) -> list[np.ndarray]:
        shard = self.fragments(rank)[0]
        weights = np.arange(shard.start, shard.stop, dtype=np.float32)
        return [weights, np.full(50, self.buffers.get(rank, 7.0), np.float32), np.full(50, rank, np.float32)]

    def write(self, iteration: int) -> None:
        for rank, node in enumerate(self.nodes):
            held = self.held(rank)
            private = tuple(fragment.with_key(private_key(fragment.key, f"dp{rank}")) for fragment in held[1:])
            manifest = Manifest({"dp": rank}, self.topology.layout, held[:1], private, 400, 4096)
            with closing(Arena.create(self.node_dir(node), manifest, 2)) as arena:
                arena.control.begin(0)
                encoded = objects.encode({"rank": rank})
                with arena.slot(0) as view:
                    for offset, value in zip(arena.image.offsets, self.values(rank), strict=False):
                        view[offset : offset + value.nbytes] = value.tobytes()
                    begin = arena.image.objects.begin
                    view[begin : begin + len(encoded)] = encoded
                for chunk in range(len(arena.image.chunks)):
                    arena.control.set_chunk_hash(0, chunk, arena.hash_chunk(0, chunk))
                arena.control.set_objects(0, len(encoded), xxhash.xxh3_64_intdigest(encoded))
                arena.control.seal(0, SnapshotId(LINEAGE, iteration))

    def state(self, rank: int) -> State:
        return State([Piece(f, torch.full((f.numel,), -1.0)) for f in self.fragments(rank)])


class Replicated(Model):
    """A weight that all ranks need, and ranks 0 and 2 hold."""

    def fragments(self, rank: int) -> tuple[Fragment, ...]:  # type: ignore[override]
        return (Fragment.whole("master/w", "F32", (self.numel,), Box((0,), (self.numel,))),)

    def values(self, rank: int) -> list[np.ndarray]:
        return [np.arange(self.numel, dtype=np.float32)]

    def held(self, rank: int) -> tuple[Fragment, ...]:
        return self.fragments(rank) if rank in (0, 2) else ()


def loaded(model: Model, unproven: bool = False) -> tuple[list[State], list[Start]]:
    states = [model.state(rank) for rank in range(len(model.nodes))]

    def load(one: Restart, decision: Decision, rank: int) -> None:
        one.load(decision, states[rank], states[rank].describe())

    return states, restart(model.topology, model.node_dir, load, reshapes=True, unproven=unproven)


def tensors(state: State) -> list[list[float]]:
    return [piece.tensor.tolist() for piece in state.pieces]


@pytest.mark.parametrize("unproven", [False, True], ids=["verified first", "on the way"])
@pytest.mark.parametrize("moved", [False, True], ids=["where they were", "on other nodes"])
def test_the_same_layout_gives_each_rank_what_it_had(arena_root: Path, moved: bool, unproven: bool) -> None:
    model = Model(arena_root, ("a", "a", "b"), buffers={1: 8.0})
    model.write(5)
    if moved:
        model = replace(model, nodes=("b", "a", "a"))
    states, starts = loaded(model, unproven)
    for rank, state in enumerate(states):
        assert tensors(state) == [value.tolist() for value in model.values(rank)]
        assert (state.objects, state.calls) == ([{"rank": rank}], ["objects", "finish"])
    assert not any("from" in e for e in events_of(starts, "loaded")) and len(events_of(starts, "verified")) == 3


def test_objects_of_a_shard_on_another_node_come_once(arena_root: Path) -> None:
    """Ranks 1 and 3 have traded their nodes, and no tensor of theirs lies in what was their own shard."""
    old = Replicated(arena_root, ("a", "b", "b", "a"))
    old.write(5)
    states, _ = loaded(replace(old, nodes=("a", "a", "b", "b")), unproven=True)
    for rank, state in enumerate(states):
        assert tensors(state) == [list(map(float, range(old.numel)))]
        assert (state.objects, state.calls) == ([{"rank": rank}], ["objects", "finish"])


@pytest.mark.parametrize("others", [False, True], ids=["one layout", "two layouts"])
def test_only_beside_its_own_layout_is_a_snapshot_proven_on_the_way(
    others: bool, arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another layout would give in its place does not fill all that was written."""
    model = Model(arena_root, ("a", "b"))
    model.write(5)
    if others:
        with monkeypatch.context() as patch:  # before the job was restarted in another layout
            patch.setattr(f"{__name__}.LINEAGE", b"before".ljust(16))
            Model(arena_root, ("a",)).write(3)
    brought, bring = list[StraightFetch](), StraightFetch.bring

    def told(fetch: StraightFetch) -> Traffic:
        brought.append(fetch)
        return bring(fetch)

    monkeypatch.setattr(StraightFetch, "bring", told)
    states, _ = loaded(model, unproven=True)
    assert len(brought) == (0 if others else 2)
    assert [tensors(state) for state in states] == [[v.tolist() for v in model.values(rank)] for rank in range(2)]


@pytest.mark.parametrize("place", ["objects", "chunk"])
def test_what_was_lost_before_any_byte_came_has_touched_nothing(arena_root: Path, place: str) -> None:
    model = Model(arena_root, ("a", "b"))
    model.write(5)
    path = list_arenas(model.node_dir("b"))[0]
    with closing(Arena.open(path)) as arena:
        at = (arena.image.objects if place == "objects" else arena.image.chunks[0]).begin
    flip(path / "slot0.safetensors", at)
    states = [model.state(rank) for rank in range(2)]
    seen = {}

    def load(one: Restart, decision: Decision, rank: int) -> None:
        try:
            one.load(decision, states[rank], states[rank].describe())
        except LostError as error:
            seen[rank] = error.touched

    restart(model.topology, model.node_dir, load, unproven=True)
    assert seen == dict.fromkeys(range(2), place == "chunk")
    assert all(state.calls == [] for state in states)
    if place == "objects":
        assert all(value == -1 for state in states for values in tensors(state) for value in values)


@pytest.mark.parametrize("nodes", [("a", "b"), ("a",), ("a", "b", "a", "b")], ids=len)
def test_another_layout_gives_the_same_elements(arena_root: Path, nodes: tuple[str, ...]) -> None:
    old = Model(arena_root, ("a", "a", "b"))
    old.write(5)
    new = replace(old, nodes=nodes)
    if "b" not in nodes:
        with pytest.raises(LostError):
            loaded(new)
        return
    states, starts = loaded(new)
    for rank, state in enumerate(states):
        weights, buffer, counter = tensors(state)
        assert weights == new.values(rank)[0].tolist() and buffer == [7.0] * 50
        assert counter == [-1.0] * 50, "what belongs to one rank stays as it was built"
        assert (state.objects, state.calls) == ([{"rank": 0}], ["reshaped 5", "finish"])
    assert len([e for e in events_of(starts, "loaded") if "from" in e]) == len(nodes)


def test_copies_that_differ_are_no_state_of_another_layout(arena_root: Path) -> None:
    old = Model(arena_root, ("a", "a", "b"), buffers={2: 8.0})
    old.write(5)
    with raises(MismatchError, "buffer/b", "dp0", "dp2"):
        loaded(replace(old, nodes=("a", "b")))
