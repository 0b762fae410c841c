"""Restarts of ranks that are threads: verify, reconstruct, invalidate, load, in the same layout and in another."""

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
from test_load import run_ranks

from ftckpt.errors import ConfigError, LostError, StorageError
from ftckpt.group import Group
from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import list_arenas, node_directory
from ftckpt.memory.lineage_file import read_lineage, write_lineage
from ftckpt.memory.package import list_packages
from ftckpt.memory.parity_file import list_parity, parity_path
from ftckpt.model import objects
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.lineage import NO_CHECKPOINT, NO_REQUEST, UNKNOWN, Branch, Lineage, LoadedCheckpoint, Request
from ftckpt.model.manifest import Manifest
from ftckpt.model.replicas import private_key
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece
from ftckpt.parity.modes import Modes
from ftckpt.restore.decide import Decision
from ftckpt.restore.restart import Restart
from ftckpt.restore.shard_reconstruction import ShardReconstruction
from tests.support.errors import raises
from tests.support.flips import flip
from tests.support.protected import Job, build, contents, flip_chunk
from tests.support.smp_nodes import Seen
from tests.support.snapshots import LINEAGE, seal, slot_of, store

pytestmark = pytest.mark.usefixtures("as_flags")

NODE, PEER = Modes(node=True), Modes(peer=True)


@dataclass
class Start:
    """A restart as one rank saw it."""

    decision: Decision | None
    source: str
    events: Seen
    lineage: bytes = b""
    after: Lineage = UNKNOWN
    why: str = ""
    is_verified: bool = False


def restart(
    topology: Topology,
    node_dir: Callable[[str], Path],
    then: Callable[[Restart, Decision, int], None] = lambda found, decision, rank: None,
    *,
    loaded: LoadedCheckpoint = NO_CHECKPOINT,
    on_lost: str = "storage",
    request: Request = NO_REQUEST,
    unproven: bool = False,
    storage: str = "",
) -> list[Start]:
    """All ranks choose, invalidate newer snapshots, do ``then`` and record the lineage; ``loaded`` by the script."""

    def run(group: Any) -> Start:
        mine, events = replace(topology, rank=group.rank), Seen()
        one = Restart(cast(Group, group), mine, node_dir(mine.me.node), events, storage=storage)
        try:
            decision = one.choose(on_lost, loaded, request, unproven)
            start = Start(decision, one.source, events, why=one.why, is_verified=bool(events.of("verified")))
            start.lineage = one.invalidate_newer(decision)
            if decision is not None:
                then(one, decision, group.rank)
                one.resume(decision.snapshot.iteration)
            one.record_lineage()
            start.after = one.resumption.lineage
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
    return [fields for start in starts for fields in start.events.of(name)]


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
    """A shard of 4 is lost and has no parity: its slots are useless, and are reused before those of the older 3."""
    job = Job(arena_root, ("a", "a", "a"), NODE)
    build(job, (3, 4, 5), (5,))
    wanted = [contents(job, rank, 3) for rank in range(3)]
    with closing(Arena.open(job.path(0), writable=True)) as arena:
        arena.control.void(slot_of(arena, 4))
    with closing(Arena.open(job.path(1), writable=True)) as arena:
        slot = slot_of(arena, 5)
        arena.control.begin(slot)
        arena.control.seal(slot, SnapshotId(bytes(16), 4))
    monkeypatch.setattr(ShardReconstruction, "check", lambda self, chunk: False)
    starts = restart(job.topology, job.node_dir)
    assert all(start.decision is not None and start.decision.snapshot.iteration == 3 for start in starts)
    assert [contents(job, rank, 3) for rank in range(3)] == wanted


def test_a_wrong_checksum_of_a_package_does_not_pass(arena_root: Path) -> None:
    """An unprotected snapshot with a chunk that was changed after its checksum was taken is not restored."""
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

FIRST = Lineage((Branch(1),))


def found(iteration: int, lineage: Lineage = FIRST) -> Lineage:
    """A history whose starts have found the script's checkpoint of ``iteration``."""
    return replace(lineage, found=iteration)


def named(iteration: int, *branches: Branch) -> Lineage:
    """A history that starts with a load of ``iteration`` by name."""
    return Lineage(branches or (Branch(2),), (f"load of iteration {iteration}",), iteration)


def trained(root: Path, lineage: Lineage, *iterations: int) -> Job:
    """Two nodes with unprotected, committed snapshots of ``lineage``."""
    job = Job(root, ("a", "b"), Modes())
    build(job, iterations, ())
    for rank in range(len(job.nodes)):
        with closing(Arena.open(job.path(rank), writable=True)) as arena:
            arena.control.mark_whole(SnapshotId(LINEAGE, max(iterations)))
    for node in job.nodes:
        write_lineage(job.node_dir(node), lineage)
    return job


def taken(starts: Sequence[Start]) -> int | None:
    """The iteration that all ranks have restored."""
    (iteration,) = {start.decision and start.decision.snapshot.iteration for start in starts}
    return iteration


ONE = LoadedCheckpoint


@pytest.mark.parametrize(
    ("before", "loaded", "restored", "after"),
    [
        pytest.param(FIRST, ONE(0), 250, FIRST, id="nothing on storage"),
        pytest.param(found(200), ONE(0), 250, found(200), id="storage is not mounted"),
        pytest.param(FIRST, ONE(200), 250, found(200), id="saved on the way"),
        pytest.param(found(200), ONE(200), 250, found(200), id="a usual restart"),
        pytest.param(FIRST, ONE(300), None, found(300, Lineage((Branch(2),))), id="storage is newer"),
        pytest.param(found(200), ONE(100), None, found(100, Lineage((Branch(2),))), id="storage went back"),
        pytest.param(FIRST, ONE(100, True), None, named(100), id="named"),
        pytest.param(found(100), ONE(100, True), None, named(100), id="named, and once newest"),
        pytest.param(named(200), ONE(100, True), None, named(100, Branch(3)), id="another one named"),
        pytest.param(named(100), ONE(100, True), 250, named(100), id="a restart with the same name"),
        pytest.param(named(100), ONE(200), 250, found(200, Lineage((Branch(2),))), id="no name any more"),
        pytest.param(found(100), ONE(200, lasting=False), 250, found(100), id="one that may go with a node"),
        pytest.param(found(200), ONE(100, lasting=False), 250, found(200), id="gone with a node"),
        pytest.param(FIRST, ONE(250, True), None, named(250), id="named, as new as memory"),
    ],
)
def test_the_newer_of_storage_and_memory_counts_unless_the_user_went_back(
    arena_root: Path, before: Lineage, loaded: LoadedCheckpoint, restored: int | None, after: Lineage
) -> None:
    job = trained(arena_root, before, 249, 250)
    starts = restart(job.topology, job.node_dir, loaded=loaded)
    assert taken(starts) == restored
    for lineage in [start.after for start in starts] + [read_lineage(job.node_dir(node)) for node in "ab"]:
        assert (lineage.branches, lineage.requests, lineage.found) == (after.branches, after.requests, after.found)
    reports = events_of(starts, "rolled_back") + events_of(starts, "memory_older_than_storage")
    assert len(reports) == (0 if restored else 2)
    assert all("memory (250)" in start.why for start in starts) == (restored is None)
    assert iterations(job) == [[249, 250] if restored else []] * 2, "what is abandoned is in no slot"


def test_what_was_abandoned_while_a_node_was_away_does_not_come_back_with_it(arena_root: Path) -> None:
    """Its parity and packages could reconstruct the others' part of it, too."""
    job = Job(arena_root, ("a", "b"), PEER)
    build(job, (240, 260), (260,))
    with closing(Arena.open(job.path(0), writable=True)) as arena:
        arena.control.void(slot_of(arena, 260))
        arena.control.mark_whole(SnapshotId(LINEAGE, 240))
    write_lineage(job.node_dir("a"), replace(FIRST.branch(250), requests=("rollback-before 251",)))
    write_lineage(job.node_dir("b"), FIRST)
    starts = restart(job.topology, job.node_dir, request=Request(251))
    assert taken(starts) == 240 and iterations(job) == [[240]] * 2
    assert {read_lineage(job.node_dir(node)).branches for node in "ab"} == {(Branch(1), Branch(2, 250))}
    assert [event["iteration"] for event in events_of(starts, "rolled_back")] == [250]


@pytest.mark.parametrize("damage", ["bytes", "layout"])
@pytest.mark.parametrize("storage", [249, 251])
def test_newer_storage_counts_beside_memory_that_cannot_be_taken(arena_root: Path, damage: str, storage: int) -> None:
    """Older snapshots are abandoned, and not queried."""
    job = trained(arena_root, FIRST, 249, 250)
    topology = job.topology
    if damage == "bytes":
        for iteration in (249, 250):
            flip_chunk(job, 1, iteration, 0)
    else:
        topology = replace(topology, members=topology.members[:1], layout={"dp": 1})
    if storage < 250:
        with raises(LostError):
            restart(topology, job.node_dir, loaded=ONE(storage), on_lost="fail")
        return
    (first, *_) = restart(topology, job.node_dir, loaded=ONE(storage), on_lost="fail")
    assert first.decision is None and "memory (250)" in first.why
    assert (first.after.branches, first.after.found) == ((Branch(2),), 251)


@pytest.mark.parametrize("iteration", [0, 100, 250, 260])
@pytest.mark.parametrize("before", [0, 251])
def test_what_was_loaded_in_training_counts_whatever_memory_has(
    arena_root: Path, iteration: int, before: int
) -> None:
    """Also for an iteration that was named at the start, and after a rollback before another one."""
    job = trained(arena_root, FIRST, 249, 250)
    loaded = ONE(iteration, in_training=True)
    starts = restart(job.topology, job.node_dir, loaded=loaded, request=Request(before))
    assert taken(starts) is None and iterations(job) == [[]] * 2
    assert {start.after.branches for start in starts} == {(Branch(2),)}
    assert {start.after.requests for start in starts} == {Request(before).texts}


def test_a_job_is_rolled_back_before_an_iteration_once(arena_root: Path) -> None:
    job = Job(arena_root, ("a", "b"), PEER)
    build(job, (240, 250, 260), (260,))
    starts = restart(job.topology, job.node_dir, request=Request(251))
    assert taken(starts) == 250
    assert [(event["iteration"], event["newest"]) for event in events_of(starts, "rolled_back")] == [(250, 260)] * 2
    assert iterations(job) == [[240, 250]] * 2, "parity and packages of 260 cannot bring it back either"
    assert not list_packages(job.node_dir("a")) and not list_packages(job.node_dir("b"))
    assert {start.after.requests for start in starts} == {("rollback-before 251",)}


def test_where_nothing_is_before_it_a_start_that_rolls_back_is_refused(arena_root: Path) -> None:
    job = Job(arena_root, ("a", "b"), Modes())
    starts = restart(job.topology, job.node_dir, request=Request(100))
    assert taken(starts) is None, "a first start; later ones resume"
    assert {start.after.requests for start in starts} == {("rollback-before 100",)}
    trained(arena_root, FIRST, 249, 250)
    with raises(LostError, "100", "249, 250"):
        restart(job.topology, job.node_dir, request=Request(100))
    with raises(ConfigError, "--ftckpt-rollback-before: 100", "120"):
        restart(job.topology, job.node_dir, request=Request(100), loaded=ONE(120))
    assert iterations(job) == [[249, 250]] * 2, "a start that is refused abandons nothing"
    assert {read_lineage(job.node_dir(node)).branches for node in "ab"} == {FIRST.branches}
    assert taken(restart(job.topology, job.node_dir, request=Request(250), loaded=ONE(120))) == 249


def test_what_is_rebuilt_is_of_the_history_that_the_job_is_in(arena_root: Path) -> None:
    """An earlier start rolled back before 100; a node is lost, and each start after that has the number, too."""
    job = Job(arena_root, ("a", "b"), PEER)
    build(job, (500,), (500,))
    for rank, node in enumerate("ab"):
        write_lineage(job.node_dir(node), replace(FIRST.branch(99), requests=("rollback-before 100",)))
        with closing(Arena.open(job.path(rank), writable=True)) as arena:
            arena.control.mark_whole(SnapshotId(LINEAGE, 500))
    shutil.rmtree(job.node_dir("b"))
    for _ in range(2):
        assert taken(restart(job.topology, job.node_dir, request=Request(100))) == 500
        assert read_lineage(job.node_dir("b")) == FIRST.branch(99)
    assert list_packages(job.node_dir("a")), "what protects it stays"


def test_ranks_that_loaded_different_iterations_are_refused_before_anything_is_void(arena_root: Path) -> None:
    job = trained(arena_root, FIRST, 250)

    def run(group: Any) -> None:
        mine = replace(job.topology, rank=group.rank)
        one = Restart(cast(Group, group), mine, job.node_dir(mine.me.node), Seen())
        with closing(one):
            one.choose("storage", ONE(300 + group.rank))

    with raises(ConfigError, "rank 0 300", "rank 1 301"):
        run_ranks(2, run)
    assert iterations(job) == [[250]] * 2


@pytest.mark.parametrize("on_lost", ["storage", "fail", "fresh"])
@pytest.mark.parametrize("loaded", [ONE(0), ONE(100)], ids=["nothing", "100"])
def test_what_a_restart_does_when_snapshots_were_lost(
    arena_root: Path, on_lost: str, loaded: LoadedCheckpoint
) -> None:
    job = trained(arena_root, FIRST, 250)
    flip_chunk(job, 1, 250, 0)
    if on_lost == "fail" or (on_lost == "storage" and not loaded.is_one):
        remedy = ("iteration 100", "--ftckpt-on-lost storage") if loaded.is_one else ("--ftckpt-on-lost fresh",)
        with raises(LostError, "250", "dp1", *remedy):
            restart(job.topology, job.node_dir, loaded=loaded, on_lost=on_lost)
        assert iterations(job) == [[250]] * 2, "a start that is refused leaves what there is"
        return
    starts = restart(job.topology, job.node_dir, loaded=loaded, on_lost=on_lost)
    assert all(start.decision is None and "lost" in start.why for start in starts)
    assert [event["loaded"] for event in events_of(starts, "lost")] == [loaded.iteration] * 2


# --- loaded ---


class State:
    """Tensors and objects of one rank."""

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
        """The contents of its slot."""
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
                parts = [value.tobytes() for value in self.values(rank)][: len(manifest.fragments)]
                store(arena, 0, parts, objects.encode({"rank": rank}))
                seal(arena, 0, iteration, True, LINEAGE)

    def state(self, rank: int) -> State:
        return State([Piece(f, torch.full((f.numel,), -1.0)) for f in self.fragments(rank)])


def loaded(model: Model, unproven: bool = False) -> tuple[list[State], list[Start]]:
    states = [model.state(rank) for rank in range(len(model.nodes))]

    def load(one: Restart, decision: Decision, rank: int) -> None:
        one.load(decision, states[rank], states[rank].describe())

    return states, restart(model.topology, model.node_dir, load, unproven=unproven)


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


# --- snapshots in doubt ---


def test_a_restart_takes_the_newest_that_is_in_no_doubt_and_one_in_doubt_by_its_name(arena_root: Path) -> None:
    job = trained(arena_root, FIRST, 20, 25)
    write_lineage(job.node_dir("b"), FIRST.doubt(20, 30))  # what one node knows counts for all
    starts = restart(job.topology, job.node_dir, request=Request(name="iter_0000025"))
    assert taken(starts) == 25
    again = restart(job.topology, job.node_dir, request=Request(name="iter_0000025"))
    assert taken(again) == 25, "a start with the same name resumes"


def test_a_restart_passes_over_what_is_in_doubt(arena_root: Path) -> None:
    job = trained(arena_root, FIRST, 20, 25)
    write_lineage(job.node_dir("b"), FIRST.doubt(20, 30))
    starts = restart(job.topology, job.node_dir)
    assert taken(starts) == 20
    assert {start.after.branches for start in starts} == {(Branch(1), Branch(2, 20))}


def test_where_all_is_in_doubt_a_start_is_refused_and_begins_at_the_beginning_only_on_purpose(
    arena_root: Path,
) -> None:
    job = trained(arena_root, FIRST.doubt(-1, 30), 20, 25)
    with raises(LostError, "iter_0000020", "iter_0000025", "--ftckpt-restore-from"):
        restart(job.topology, job.node_dir)
    assert iterations(job) == [[20, 25]] * 2, "nothing is void"
    assert taken(restart(job.topology, job.node_dir, on_lost="fresh")) is None


def test_a_name_that_neither_storage_nor_memory_has_is_refused(arena_root: Path) -> None:
    job = trained(arena_root, FIRST, 20, 25)
    with raises(StorageError, "iter_0000099"):
        restart(job.topology, job.node_dir, request=Request(name="iter_0000099"))


@pytest.mark.parametrize("loaded", [NO_CHECKPOINT, LoadedCheckpoint(5)], ids=["nothing loaded", "loaded"])
@pytest.mark.parametrize("on_lost", ["storage", "fail", "fresh"])
def test_where_what_was_named_is_bad_a_start_is_refused_and_gives_up_nothing(
    arena_root: Path, on_lost: str, loaded: LoadedCheckpoint
) -> None:
    """Newer snapshots are complete, and nobody requested a start without them."""
    job = trained(arena_root, FIRST, 20, 25)
    flip_chunk(job, 1, 20, 0)
    with raises(LostError, "--ftckpt-restore-from iter_0000020"):
        restart(job.topology, job.node_dir, loaded=loaded, on_lost=on_lost, request=Request(name="iter_0000020"))
    assert iterations(job) == [[20, 25]] * 2
    assert taken(restart(job.topology, job.node_dir)) == 25


def test_a_node_whose_memory_spoils_each_reconstruction_is_named_after_one(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, put, tried = Job(arena_root, ("a",) * 3, NODE), ShardReconstruction._put_volatile, list[int]()
    build(job, (3, 4, 5), (4, 5))
    shutil.rmtree(job.path(1))

    def spoils(self: ShardReconstruction) -> None:
        put(self)
        tried.append(1)
        assert len(tried) < 10, "it is tried again and again"
        begin = self.arena.image.volatile.begin
        self._write(begin, bytes([self._whole.volatile[0] ^ 1]))

    monkeypatch.setattr(ShardReconstruction, "_put_volatile", spoils)
    with pytest.raises(LostError, match="memory"):
        restart(job.topology, job.node_dir)
    assert 1 <= len(tried) <= 3
