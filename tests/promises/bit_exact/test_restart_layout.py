"""A job resumes in another layout from memory: every element, wherever it is killed in between."""

from __future__ import annotations

import itertools
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ftckpt.cli.main import main
from ftckpt.config import Config
from ftckpt.errors import CaptureError, MemoryBudgetError, MismatchError
from ftckpt.group import Group
from ftckpt.memory import ledger
from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import clean_job, end_smp, list_arenas
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece
from ftckpt.persist.backend import open_storage
from ftckpt.session.checkpointer import Checkpointer
from tests.support import plain
from tests.support.choosing import inventory_of
from tests.support.errors import a_rank_raises
from tests.support.event_logs import read_events
from tests.support.killing import die_at
from tests.support.pool import RankFailure, RankResult, run_ranks
from tests.support.storages import committed
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

WORDS, WIDTH, DEPTH, NORM = 10, 48, 4, 17
"""Rows of the embedding that count, the length of its rows, layers, and the length of what all ranks hold."""


@dataclass(frozen=True)
class Layout:
    """The ranks are tp × pp × dp, dp running fastest; ``nodes`` are names by rank, one node where there are none.
    ``width`` is the length of rows."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    nodes: tuple[str, ...] = ()
    width: int = WIDTH

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def rows(self) -> int:
        """Rows of the embedding: they are padded to a multiple of 4 for each part."""
        return -(-WORDS // (4 * self.tp)) * 4 * self.tp

    def topology(self, rank: int) -> Topology:
        places = itertools.product(range(self.tp), range(self.pp), range(self.dp))
        nodes = self.nodes or ("node",) * self.size
        members = tuple(
            RankPlace({"tp": tp, "pp": pp, "dp": dp}, node) for (tp, pp, dp), node in zip(places, nodes, strict=True)
        )
        return Topology(rank, members, {"tp": self.tp, "pp": self.pp, "dp": self.dp, "zero": True})


def value(key: str, iteration: int, shape: Sequence[int]) -> torch.Tensor:
    """A tensor after ``iteration`` steps: its first rows are the same however many there are."""
    size = 1
    for length in shape:
        size *= length
    seed = sum(map(ord, key))
    return ((torch.arange(size, dtype=torch.float32) + seed) * 0.37).sin().mul(iteration + 1).reshape(tuple(shape))


class State:
    """Layers cut by columns over tp, their masters and moments by flat ranges over dp; an embedding with padding,
    cut by rows; a norm and a buffer that all ranks hold; scratch memory that belongs to the rank."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout, self.rank, self.iteration = layout, rank, 0
        self.told: tuple[list[Mapping[str, Any]], int] | None = None
        coords = layout.topology(rank).me.coords
        tp, pp, dp = coords["tp"], coords["pp"], coords["dp"]
        self.pieces: list[Piece] = []
        width = layout.width
        columns = width // layout.tp
        for layer in range(DEPTH * pp // layout.pp, DEPTH * (pp + 1) // layout.pp):
            box = Box((0, columns * tp), (5, columns))
            cut = (box.numel * dp // layout.dp, box.numel * (dp + 1) // layout.dp)
            moment = Fragment(f"exp_avg/layer{layer}", "F32", (5, width), box, *cut)
            master = self._add(Fragment(f"master/layer{layer}", "F32", (5, width), box, *cut))
            weight = Fragment(f"weight/layer{layer}", "BF16", (5, width), box, *cut)
            self.pieces.append(Piece(weight, torch.zeros(weight.numel, dtype=torch.bfloat16), master))
            self._add(moment)
        part = layout.rows // layout.tp
        embedding = Box((part * tp, 0), (part, width))
        self._add(Fragment.whole("master/words", "F32", (layout.rows, width), embedding))
        self._add(Fragment.whole("master/norm", "F32", (NORM,), Box((0,), (NORM,))))
        stepped = tuple(self.pieces)
        self._add(Fragment.whole("buffer/bias", "F32", (NORM,), Box((0,), (NORM,))))
        self.scratch = self._add(Fragment.whole("local/scratch", "F32", (3,), Box((0,), (3,))))
        self.scratch.fill_(100.0 + rank)
        self.description = Description(stepped, tuple(self.pieces[len(stepped) :]), frozenset({"master/words"}))

    def _add(self, fragment: Fragment) -> torch.Tensor:
        tensor = torch.full((fragment.numel,), -1.0)
        self.pieces.append(Piece(fragment, tensor))
        return tensor

    def describe(self) -> Description:
        return self.description

    def save_objects(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "shard": self.layout.topology(self.rank).me.shard}

    def load_objects(self, objects: Any) -> None:
        assert objects["shard"] == self.layout.topology(self.rank).me.shard
        self.iteration = objects["iteration"]

    def check_objects(self, objects: Any, is_reshaped: bool) -> None:
        pass

    def load_reshaped(self, objects: Sequence[Mapping[str, Any]], iteration: int) -> None:
        self.told = ([dict(one) for one in objects], iteration)
        self.iteration = objects[0]["iteration"]

    def finish_load(self) -> None:
        pass

    def wanted(self, fragment: Fragment, iteration: int) -> torch.Tensor:
        """The values of a fragment."""
        slices = tuple(slice(o, o + n) for o, n in zip(fragment.box.offset, fragment.box.shape, strict=True))
        return value(fragment.key, iteration, fragment.global_shape)[slices].reshape(-1)[
            fragment.start : fragment.stop
        ]

    def advance(self, iteration: int) -> None:
        """One optimizer step; the embedding's padding is this layout's own."""
        self.iteration = iteration
        for piece in self.pieces:
            if piece.derived_from is not None:
                piece.tensor.copy_(piece.derived_from)
            elif piece.tensor is not self.scratch:
                piece.tensor.copy_(self.wanted(piece.fragment, iteration))
        self.scratch.add_(1)

    def problems(self, iteration: int) -> list[str]:
        """Pieces that are not what they were at ``iteration``, bit for bit; padding may be anything."""
        wrong = []
        for piece in self.pieces:
            fragment = piece.fragment
            wanted, found = self.wanted(fragment, iteration), piece.tensor
            if piece.derived_from is not None:
                wanted = self.wanted(fragment.with_key(f"master/{fragment.key.partition('/')[2]}"), iteration)
                wanted = wanted.to(torch.bfloat16)
            elif fragment.key == "master/words":
                counts = max(0, WORDS - fragment.box.offset[0]) * self.layout.width
                wanted, found = wanted[:counts], found[:counts]
            if piece.tensor is not self.scratch and not torch.equal(wanted, found):
                wrong.append(fragment.name)
        return wrong


@dataclass(frozen=True)
class Attempt:
    """Start in ``layout``, train up to and with iteration ``until``, and end: the arenas stay unless ``ends``.
    ``persists``: not before a snapshot is on storage.

    ``kill`` is a point of ``POINTS``. ``spoil`` names a piece that has other bits on rank 1.
    """

    layout: Layout
    until: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    kill: str = ""
    ends: bool = False
    persists: bool = False
    spoil: str = ""


@dataclass(frozen=True)
class Ended:
    """The view of a rank: the iteration it restored, the problems then, the calls of its state, its scratch."""

    start: int | None
    wrong: list[str]
    told: tuple[list[Mapping[str, Any]], int] | None
    scratch: list[float]


def train(rank: int, world_size: int, attempt: Attempt) -> Ended:
    layout = attempt.layout
    assert world_size == layout.size
    state = State(layout, rank)
    topology = layout.topology(rank)
    settings = {"protect": "none", **attempt.settings}
    config = Config(enabled=True, node=topology.me.node, **settings)
    checkpointer = Checkpointer(config, state, topology, group=Group(config.start_timeout_secs))
    if attempt.kill:
        POINTS[attempt.kill](rank, checkpointer)
    start = checkpointer.restore()
    wrong = state.problems(start) if start is not None else []
    scratch = state.scratch.tolist()
    for iteration in itertools.count((start or 0) + 1):
        if iteration > attempt.until:
            if not attempt.persists or checkpointer.persisted is not None:
                break
            time.sleep(0.05)  # an iteration: what goes to storage needs the cores
        checkpointer.fence()
        state.advance(iteration)
        if attempt.spoil and rank == 1:
            next(p for p in state.pieces if p.fragment.key == attempt.spoil).tensor[0] += 1
        checkpointer.step(iteration)
    checkpointer.close(remove=attempt.ends)
    return Ended(start, wrong, state.told, scratch)


# --- points at which an attempt is killed ---


def _at(dotted: str, rank: int, only: int | None, after: bool = True) -> None:
    """Die at the first call of a function, on all ranks or on one."""
    if only in (None, rank):
        die_at(dotted, after=after)


def _after_seal(rank: int, checkpointer: Checkpointer, sealing: Sequence[int]) -> None:
    """The first snapshot is sealed by the ranks ``sealing``, which do not know of each other; then all die."""
    original = checkpointer.step

    def fail(*_: object, **__: object) -> None:
        raise CaptureError("it seals nothing")

    def step(iteration: int) -> None:
        capture = checkpointer.capture
        assert capture is not None
        if rank not in sealing:  # it takes part in what ranks do together before
            capture.begin = fail  # type: ignore[method-assign, assignment]
        with suppress(CaptureError):
            original(iteration)
        if rank in sealing:
            capture.settle(20.0)
            assert capture.newest is not None and capture.newest.iteration == iteration
        checkpointer.group.barrier()
        plain.die()

    checkpointer.step = step  # type: ignore[method-assign]


POINTS: dict[str, Callable[[int, Checkpointer], None]] = {
    "before the choice": lambda rank, _: _at("ftckpt.restore.restart:Restart.choose", rank, None, after=False),
    "newer ones void on one node": lambda rank, _: _at("ftckpt.restore.restart:invalidate", rank, 0),
    "tensors there on one rank": lambda rank, _: _at("ftckpt.restore.restart:execute", rank, 1),
    "all is freed": lambda rank, _: _at(
        "ftckpt.restore.shard_reconstruction:ShardReconstruction.open", rank, 0, after=False
    ),
    "half rebuilt": lambda rank, _: _at("ftckpt.restore.shard_reconstruction:ShardReconstruction.put", rank, 0),
    "rebuilt": lambda rank, _: _at("ftckpt.restore.repair:Repairer.run", rank, 0),
    "objects there": lambda rank, c: _at("test_restart_layout:State.load_reshaped", rank, None),
    "old arenas set aside by one rank": lambda rank, _: _at("ftckpt.session.arenas:OldArenas.free", rank, 0),
    "one new arena": lambda rank, _: _at("ftckpt.session.arenas:NodeArenas._create", rank, 1),
    "all new arenas": lambda rank, _: _at("ftckpt.session.arenas:NodeArenas.open", rank, None),
    "sealed by one rank": lambda rank, c: _after_seal(rank, c, [0]),
    "sealed by all, known to none": lambda rank, c: _after_seal(rank, c, range(99)),
    "old arenas gone with one rank": lambda rank, _: _at("ftckpt.session.arenas:NodeArenas.remove_old", rank, 0),
}
NEWER = {"sealed by all, known to none", "old arenas gone with one rank"}
"""After these the first snapshot of the new layout is committed."""
QUICK = {"one new arena", "sealed by one rank", "sealed by all, known to none"}
REBUILDS = {"all is freed", "half rebuilt", "rebuilt"}
"""Points that an attempt reaches only where shards are lost."""
CASES = [
    pytest.param(point, marks=[] if point in QUICK else [pytest.mark.slow])
    for point in POINTS
    if point not in REBUILDS
]

OLD = Layout(tp=2, dp=2, nodes=("n0", "n0", "n1", "n1"))
NEW = Layout(dp=3, nodes=("n0", "n0", "n1"))
LAST = 5


def restarted(attempt: Attempt) -> list[Ended]:
    """An attempt that ends well, at the same iteration on all ranks."""
    ended = [result.value for result in run_ranks(train, attempt.layout.size, attempt)]
    assert [one.wrong for one in ended] == [[]] * attempt.layout.size
    assert len({one.start for one in ended}) == 1
    return ended


def broken(attempt: Attempt) -> list[RankResult]:
    results = run_ranks(train, attempt.layout.size, attempt, expect_failures=True, grace_secs=1.0)
    assert any(result.exitcode == -signal.SIGKILL for result in results), [r.error for r in results]
    return results


def events(settings: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return read_events(Path(settings["events"]), name)


@pytest.fixture
def plan(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {
        "chunk_size": "64KiB",
        "objects_size": "1MiB",
        "schedule": "thread",
        "on_error": "raise",
        "slots": 2,
    }


PAIRS = {
    "tp2dp2 to dp3": (OLD, NEW),
    "dp3 to tp2dp2": (NEW, OLD),
    "pp2dp2 to tp2": (Layout(pp=2, dp=2, nodes=("n0", "n1", "n0", "n1")), Layout(tp=2, nodes=("n0", "n1"))),
    "tp2 to tp1pp4 on other nodes": (Layout(tp=2), Layout(pp=4, nodes=("node", "x", "y", "x"))),
}


@pytest.mark.parametrize("pair", by_default(PAIRS, ["dp3 to tp2dp2", "tp2 to tp1pp4 on other nodes"]))
def test_every_element_comes_back_in_another_layout(pair: str, plan: dict[str, Any], arena_root: Path) -> None:
    before, after = PAIRS[pair]
    restarted(Attempt(before, LAST, plan))
    for path in arena_root.glob("*/*/tp*"):
        with closing(Arena.open(path)) as arena:
            assert set(arena.manifest.padded) <= {"master/words"}
            assert arena.manifest.padded or before.dp > 1
    ended = restarted(Attempt(after, LAST + 2, plan))
    firsts = [{"iteration": LAST, "shard": f"tp0-pp{stage}-dp0"} for stage in range(before.pp)]
    for rank, one in enumerate(ended):
        assert (one.start, one.told) == (LAST, (firsts, LAST))
        assert one.scratch == [100.0 + rank] * 3, "what belongs to a rank stays as it was built"
    loaded = events(plan, "loaded")
    assert len(loaded) == after.size
    (reshaped,) = {
        (event["from"], event["to"], event["iteration"]) for event in events(plan, "loaded") if event["from"]
    }
    assert reshaped[2] == LAST and reshaped[0].startswith(f"tp{before.tp}pp{before.pp}dp{before.dp}")
    again = restarted(Attempt(after, LAST + 3, plan, ends=True))
    # The second slot gets its memory beside training, when the old arenas have gone: maybe a boundary too late.
    assert {(one.start, one.told) for one in again} in [{(LAST + n, None)} for n in (1, 2)], "it is no reshape"
    assert len([event for event in events(plan, "loaded") if event["from"]]) == after.size
    assert list(arena_root.iterdir()) == [], "an ended job left something behind"


SUFFIXES = {"none": "safetensors", "zstd": "zst"}
FROM_STORAGE = {
    "the same layout": (OLD, OLD, "none", "none"),
    "another layout": (OLD, NEW, "none", "none"),
    "the same layout, of shares with parity in the slots": (OLD, OLD, "replica", "none"),
    "another layout, of copies in the slots": (Layout(tp=2, dp=2, nodes=("n0", "n1") * 2), NEW, "copy", "zstd"),
}


@pytest.mark.faults
@pytest.mark.parametrize("case", by_default(FROM_STORAGE, list(FROM_STORAGE)[-2:]))
def test_a_job_whose_memory_is_gone_goes_on_from_what_it_persisted(
    case: str, plan: dict[str, Any], arena_root: Path, tmp_path: Path
) -> None:
    before, after, protect, compress = FROM_STORAGE[case]
    (tmp_path / "storage").mkdir()
    plan |= {"persist": str(tmp_path / "storage"), "persist_interval": 2, "protect": protect, "slots": 0}
    plan |= {"persist_compress": compress}
    restarted(Attempt(before, LAST, plan, persists=True))
    clean_job(arena_root, "test")
    newest = committed(open_storage(plan["persist"]))[0]
    files = [path.stat().st_size for path in tmp_path.glob(f"storage/iter_*/*.{SUFFIXES[compress]}")]
    assert max(files) < 2 * min(files), "what protects others stays in memory"
    ended = restarted(Attempt(after, 0, plan))
    assert {one.start for one in ended} == {newest}
    assert {one.told is not None for one in ended} == {before != after}
    assert main(["convert", plan["persist"], str(tmp_path / "universal")]) == 0
    tensors = {
        key: tensor for path in tmp_path.glob("universal/*.safetensors") for key, tensor in load_file(path).items()
    }
    assert tensors.keys() >= {"master/norm", "master/words", *(f"exp_avg/layer{number}" for number in range(DEPTH))}
    for key, tensor in tensors.items():
        rows = WORDS if key.endswith("words") else None
        wanted = value(key.replace("weight/", "master/"), newest, tensor.shape).to(tensor.dtype)
        assert torch.equal(tensor[:rows], wanted[:rows]), key
    assert main(["verify", plan["persist"]]) == 0


@pytest.fixture(scope="module")
def old_arenas(module_root: Path) -> Path:
    """The memory that a job in the layout OLD has left: iteration LAST is committed."""
    settings = {"job": "test", "arena": str(module_root), "chunk_size": "64KiB", "objects_size": "1MiB", "slots": 2}
    restarted(Attempt(OLD, LAST, settings))
    return module_root


def copied(source: Path, target: Path) -> None:
    for folder in source.iterdir():
        shutil.copytree(folder, target / folder.name)


@pytest.mark.faults
@pytest.mark.parametrize("point", CASES)
def test_killed_while_it_changes_its_layout(
    point: str, plan: dict[str, Any], arena_root: Path, old_arenas: Path, tmp_path: Path
) -> None:
    """The next start in either layout finds the same iteration, or the first of the new layout once committed."""
    copied(old_arenas, arena_root)
    broken(Attempt(NEW, LAST + 3, plan, kill=point))
    found = LAST + 1 if point in NEWER else LAST
    for number, layout in enumerate((OLD, NEW)):
        root = arena_root / f"copy{number}"
        root.mkdir()
        for folder in arena_root.glob("ftckpt-*"):
            shutil.copytree(folder, root / folder.name)
        ended = restarted(Attempt(layout, found + 2, {**plan, "arena": str(root)}, ends=True))
        assert {one.start for one in ended} == {found}
        assert list(root.iterdir()) == [], "an ended job left something behind"


def sealed(arena_root: Path) -> set[int]:
    """Iterations with a slot on any node."""
    reports = inventory_of(*arena_root.glob("ftckpt-test/n*")).arenas
    assert len(reports) == OLD.size and not any(report.problems for report in reports)
    return {slot.snapshot.iteration for report in reports for slot in report.slots}


@pytest.mark.faults
def test_slots_of_the_old_layout_that_are_newer_are_void(plan: dict[str, Any], arena_root: Path) -> None:
    """Else they would count again, next to newer ones, when the missing node returns."""
    restarted(Attempt(OLD, LAST, plan))
    (path,) = arena_root.glob("ftckpt-test/n1/tp1-pp0-dp1.*")
    with closing(Arena.open(path, writable=True)) as arena:
        for snapshot, slot in arena.snapshots().items():
            if snapshot.iteration == LAST:
                arena.control.void(slot)
    assert sealed(arena_root) == {LAST - 1, LAST}
    broken(Attempt(NEW, LAST + 1, plan, kill="objects there"))
    assert sealed(arena_root) == {LAST - 1}


def test_replicas_that_differ_are_not_mixed(plan: dict[str, Any]) -> None:
    """The ranks find out when they lay out their arenas."""
    restarted(Attempt(OLD, LAST, plan, spoil="master/norm"))
    kept = [r.value for r in run_ranks(train, OLD.size, Attempt(OLD, LAST + 1, plan, spoil="master/norm"))]
    assert [one.wrong for one in kept] != [[]] * OLD.size and {one.start for one in kept} == {LAST}
    with a_rank_raises(MismatchError, "master/norm", "bits"):
        restarted(Attempt(NEW, LAST + 1, plan))


def test_where_old_and_new_arenas_do_not_both_fit_a_job_goes_on_and_loses_nothing(plan: dict[str, Any]) -> None:
    """It takes no snapshots until memory is free."""
    restarted(Attempt(OLD, LAST, plan))
    results = run_ranks(train_without_room, NEW.size, Attempt(NEW, LAST + 3, plan | {"slots": 4}))
    assert all(result.value.start == LAST and not result.value.wrong for result in results)
    assert {one.start for one in restarted(Attempt(OLD, LAST, plan))} == {LAST}


def test_old_arenas_stay_until_a_snapshot_of_the_new_layout_is_protected(
    plan: dict[str, Any], arena_root: Path
) -> None:
    """Until then they, and their parity, are the sources for the reconstruction of a lost node."""
    plan |= {"protect": "peer", "slots": 3}
    try:
        ended = [r.value for r in run_ranks(train_until_protected, OLD.size, Attempt(OLD, settings=plan))]
        assert not any(old for old, _ in ended[0])
        before = len(events(plan, "protected"))
        ended = [r.value for r in run_ranks(train_until_protected, NEW.size, Attempt(NEW, settings=plan))]
        for seen in ended:
            assert seen[0] == (True, False) and set(seen) == {(True, False), (False, True)}
        assert len(events(plan, "protected")) > before and not events(plan, "not_protected")
        assert len([event for event in events(plan, "loaded") if event["from"]]) == NEW.size
    finally:
        clean_job(arena_root, "test")


@pytest.mark.faults
def test_a_node_that_is_lost_right_after_a_restart_in_another_layout(plan: dict[str, Any], arena_root: Path) -> None:
    """The newest snapshot, from which that attempt resumed, was not protected: an older one is restored."""
    plan |= {"protect": "peer", "slots": 4, "protect_interval": 1000, "layouts": "tp2dp2,dp3,tp2dp1"}
    try:
        run_ranks(train_until_protected, OLD.size, Attempt(OLD, settings=plan))
        (protected,) = {event["iteration"] for event in events(plan, "protected")}
        broken(Attempt(NEW, settings=plan, kill="all new arenas"))
        (newest,) = {event["iteration"] for event in events(plan, "loaded")}
        assert newest > protected
        end_smp(arena_root / "ftckpt-test" / "n1", 10.0)
        shutil.rmtree(arena_root / "ftckpt-test" / "n1")
        ended = restarted(Attempt(Layout(tp=2, nodes=("n0", "n0")), 0, plan, ends=True))
        assert {one.start for one in ended} == {protected}
        assert list(arena_root.iterdir()) == [], "an ended job left something behind"
    finally:
        clean_job(arena_root, "test")


@pytest.mark.faults
def test_the_last_node_goes_on_without_the_protection_that_needs_two(plan: dict[str, Any], arena_root: Path) -> None:
    """For jobs with a list of layouts; on one node, without a list, such modes are an error."""
    plan |= {"protect": "copy,peer", "slots": 3}
    before, after = Layout(tp=2, dp=2, nodes=("n0", "n1", "n0", "n1")), Layout(tp=2, nodes=("n0", "n0"))
    try:
        run_ranks(train_until_protected, before.size, Attempt(before, settings=plan))
        protected = min(event["iteration"] for event in events(plan, "protected"))
        end_smp(arena_root / "ftckpt-test" / "n1", 10.0)
        shutil.rmtree(arena_root / "ftckpt-test" / "n1")
        with pytest.raises(RankFailure, match=r"ConfigError: .*needs"):
            restarted(Attempt(after, LAST, plan))
        ended = restarted(Attempt(after, 0, plan | {"layouts": "tp2dp2,tp2dp1"}, ends=True))
        assert all(one.start is not None and one.start >= protected for one in ended)
        reasons = {event["reason"] for event in events(plan, "protection_lessened")}
        assert len(reasons) == 2 and all(reason.startswith("--ftckpt-protect: ") for reason in reasons)
        assert list(arena_root.iterdir()) == [], "an ended job left something behind"
    finally:
        clean_job(arena_root, "test")


def train_until_protected(rank: int, world_size: int, attempt: Attempt) -> list[tuple[bool, bool]]:
    """At each boundary: whether arenas of another layout are there, and whether one of this layout is protected."""
    state = State(attempt.layout, rank)
    topology = attempt.layout.topology(rank)
    config = Config(enabled=True, node=topology.me.node, **attempt.settings)
    checkpointer = Checkpointer(config, state, topology, group=Group(config.start_timeout_secs))
    start = checkpointer.restore() or 0
    seen = []
    root = Path(config.arena) / f"ftckpt-{config.job}" / topology.me.node
    for iteration in range(start + 1, start + 500):
        checkpointer.fence()
        state.advance(iteration)
        checkpointer.step(iteration)
        checkpointer.group.barrier()
        old = len(list_arenas(root)) > len(topology.ranks_on(topology.me.node))
        seen.append((old, checkpointer.protected is not None))
        told = checkpointer.group.gather(b"+" if seen[-1] == (False, True) else b"-")
        if all(word == b"+" for word in told):
            break
        time.sleep(0.05)  # an iteration
    checkpointer.close(remove=False)
    return seen


def train_without_room(rank: int, world_size: int, attempt: Attempt) -> Ended:
    def refuse(path: Path, need_bytes: int) -> None:
        raise MemoryBudgetError("no room in this test")

    ledger.check_budget = refuse  # type: ignore[assignment]
    return train(rank, world_size, attempt)
