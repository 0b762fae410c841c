"""What a checkpointer does with the decisions of its state."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.capture.capture import Capture
from ftckpt.config import Config
from ftckpt.errors import ConfigError, StalledError, StorageError
from ftckpt.events import Events
from ftckpt.job import start
from ftckpt.job.actions import OldArenaRemoval, TargetMarks, TurnOff
from ftckpt.job.agreement import AgreementError
from ftckpt.job.attempt import AttemptRecord, AttemptSight
from ftckpt.job.checkpointer import Checkpointer
from ftckpt.job.flushes import NO_FLUSH
from ftckpt.job.garbage import imports_that_stay
from ftckpt.job.numbers import RankNumbers
from ftckpt.job.protection import Protection, _ArenaRemains
from ftckpt.job.session import RankState
from ftckpt.job.snapshots import Snapshots
from ftckpt.job.targets import Guard
from ftckpt.job.unclosed import OpenJob
from ftckpt.model.lineage import NO_CHECKPOINT, UNKNOWN
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.parity.modes import Modes
from ftckpt.store.outcome import LauncherRun
from ftckpt.windows.cost import Wish
from tests.support.errors import raises

LINEAGE = b"l" * 16


def rank_of(**parts: Any) -> Any:
    """A rank with these parts, and as little as can be of the others."""
    nothing = dict.fromkeys(("topology", "training_state", "storage", "arenas", "links"))
    others = {"attempt": SimpleNamespace(trains=lambda: None), "numbers": RankNumbers()}
    config = parts.get("config", Config())
    told = SimpleNamespace(
        emit=lambda event, **fields: None, announce=lambda text: None, end_part=lambda name: None
    )  # fmt: skip
    made = {"config": config, "state": RankState(config), "events": told, "protection": SimpleNamespace()}
    return SimpleNamespace(**{**nothing, **others, **made, **parts})


def snapshots_of(capture: Any = None, pacer: Any = None, **parts: Any) -> Snapshots:
    return Snapshots(
        rank_of(**parts), SimpleNamespace(capture=capture, let_go=lambda: False, positions=0), pacer, None
    )  # type: ignore[arg-type]


def checkpointer_of(pacer: Any = None, **parts: Any) -> Checkpointer:
    """One that has restored."""
    checkpointer, rank = Checkpointer.__new__(Checkpointer), rank_of(**parts)
    checkpointer._rank, checkpointer._state, checkpointer._protection = rank, rank.state, rank.protection
    checkpointer.config, checkpointer.events, checkpointer._pacer = rank.config, rank.events, pacer
    shard: Any = SimpleNamespace(capture=None, let_go=lambda: False, sampled=lambda number: (None, None))
    checkpointer._shard, checkpointer._snapshots = shard, Snapshots(rank, shard, pacer, None)
    checkpointer._boundary, checkpointer._closed, checkpointer._fenced = 2, False, False
    checkpointer._tell_counts = lambda: None  # type: ignore[method-assign]
    checkpointer._is_copy, checkpointer._open_job = False, OpenJob(rank.config)
    return checkpointer


def test_an_action_that_fails_keeps_none_from_being_done() -> None:
    done = []

    def perform(action: Any) -> None:
        if isinstance(action, OldArenaRemoval):
            raise OSError("a file was made there meanwhile")
        done.append(action)

    snapshots = snapshots_of()
    snapshots._perform = perform  # type: ignore[method-assign]
    with pytest.raises(OSError):
        snapshots.execute([OldArenaRemoval(), TurnOff("why")])
    assert done == [TurnOff("why")]


def test_a_rollback_to_nothing_is_refused() -> None:
    checkpointer = Checkpointer.__new__(Checkpointer)
    checkpointer._shard, checkpointer._closed = None, False
    with raises(ConfigError, "rollback", "newer_than"):
        checkpointer.restore(rollback=True)


@pytest.mark.parametrize("script_collects", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_collector_rests_during_a_restore(fails: bool, script_collects: bool) -> None:
    seen = []

    def restore(loaded: object, unproven: bool) -> int:
        seen.append(gc.isenabled())
        if fails:
            raise ConfigError("no")
        return 7

    checkpointer = Checkpointer.__new__(Checkpointer)
    checkpointer._shard, checkpointer._closed = None, False
    checkpointer._restore, checkpointer._withdraw = restore, lambda: None  # type: ignore[method-assign]
    (gc.enable if script_collects else gc.disable)()
    try:
        with raises(ConfigError, "no") if fails else nullcontext():
            assert checkpointer.restore() == 7
        assert (seen, gc.isenabled()) == ([False], script_collects)
    finally:
        gc.enable()


@pytest.mark.parametrize("lasting", [True, False])
def test_a_start_that_storage_kept_from_its_snapshot_is_no_failure(lasting: bool) -> None:
    taken_back = []

    def restore(loaded: object, unproven: bool) -> int:
        raise StorageError("away", lasting=lasting)

    checkpointer = Checkpointer.__new__(Checkpointer)
    checkpointer._shard, checkpointer._closed = None, False
    checkpointer._restore, checkpointer._withdraw = restore, lambda: None  # type: ignore[method-assign]
    checkpointer._rank = rank_of(attempt=SimpleNamespace(take_back=lambda: taken_back.append(True)))
    with raises(StorageError, "away"):
        checkpointer.restore()
    assert taken_back == [True] * (not lasting)


@pytest.mark.parametrize("script_collects", [True, False])
def test_the_collector_rests_while_frameworks_are_imported(script_collects: bool) -> None:
    (gc.enable if script_collects else gc.disable)()
    try:
        with imports_that_stay():
            made, rests = [object()], not gc.isenabled()
        assert (rests, gc.isenabled()) == (True, script_collects)
        assert not any(made is found for found in gc.get_objects()), "it is frozen"
    finally:
        gc.unfreeze()
        gc.enable()


class Lessened:
    """Protection whose last mode goes when the arenas are arranged, as where no replica set spans nodes any more."""

    def __init__(self) -> None:
        self.on = self.protects = True
        self.marks: list[TargetMarks] = []

    def survey(
        self, restored: SnapshotId | None, rebuilt: bool = False
    ) -> tuple[SnapshotId | None, SnapshotId | None]:
        return SnapshotId(LINEAGE, 4), restored

    def arrange(self, arena: object, coming_bytes: int, slots: int) -> None:
        self.on = self.protects = False

    def mark(self, marks: TargetMarks) -> None:
        self.marks.append(marks)


@pytest.mark.parametrize("anew", [False, True], ids=["at start", "while training"])
def test_what_no_mode_guards_any_more_is_not_called_protected(anew: bool) -> None:
    protection = Lessened()
    arenas = SimpleNamespace(path=Path(), coming_bytes=0, slots=4)
    state = RankState(Config(), protects=True)
    snapshots = snapshots_of(SimpleNamespace(arena=object()), protection=protection, arenas=arenas, state=state)
    if anew:
        state.take_over(SnapshotId(LINEAGE, 4), SnapshotId(LINEAGE, 5))
        snapshots._protect_anew()
    else:
        protection.on = protection.protects = False  # by the time that the arena is there
        snapshots.begin(LINEAGE, SnapshotId(LINEAGE, 5), True)
    assert protection.marks == [TargetMarks(None, None)], "nor does a mark of an earlier attempt stay in the arena"
    assert state.targets.protected is None and not state.targets.interval


@pytest.mark.parametrize("rebuilt", [False, True])
def test_what_a_start_has_rebuilt_is_to_be_protected_and_is_not_called_so(
    rebuilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that has come anew has no parity yet, whatever the marks of others say."""
    snapshot, state = SnapshotId(LINEAGE, 5), RankState(Config(), protects=True)
    found: Any = SimpleNamespace(
        choose=lambda *_: SimpleNamespace(snapshot=snapshot), void_newer=lambda _: LINEAGE, load=lambda one, *_: one,
        usage={"peer_parity": {"chunks": 3}} if rebuilt else {}, in_memory=True, lineage=UNKNOWN, source="", why="",
        capacities=lambda: None, cast=frozenset(), on_storage=-1, close=lambda: None, record_lineage=lambda: None,
        written_by=lambda _: "",
    )  # fmt: skip
    monkeypatch.setattr(start, "Restart", lambda *_, **__: found)
    protection: Any = Protection.__new__(Protection)
    protection._held = [_ArenaRemains(mark, (snapshot,)) for mark in (snapshot, None)]
    protection.modes, protection._arena, protection.smp = Modes(node=True), None, SimpleNamespace()
    rank = rank_of(state=state, protection=protection, storage=SimpleNamespace(snapshots=""))
    rank.group, rank.arenas, rank.training_state = None, SimpleNamespace(path=Path()), SimpleNamespace()
    loaded = start.load(rank, SimpleNamespace(), None, NO_CHECKPOINT, True)  # type: ignore[arg-type]
    Snapshots(rank, SimpleNamespace(capture=SimpleNamespace(arena=object()), positions=0), None, None).begin(  # type: ignore[arg-type]
        loaded.lineage, loaded.snapshot, loaded.in_memory, loaded.rebuilt
    )
    assert (state.targets.protected, state.targets.target) == (None if rebuilt else snapshot, snapshot)


def test_a_rank_that_has_turned_off_gives_signs_of_life() -> None:
    """It trains, and ``ftckpt status`` shows where."""
    beats: list[str] = []
    protection = SimpleNamespace(beat=lambda _, kind: beats.append(kind))
    checkpointer = checkpointer_of(SimpleNamespace(), protection=protection)
    checkpointer._state.turn_off("why")
    checkpointer.fence()
    checkpointer.step(3)
    assert beats == ["fence", "start"]


@pytest.mark.parametrize("iteration", [2.0, "2", None])
def test_an_iteration_that_is_no_number_is_refused_before_anything_knows_of_it(iteration: Any) -> None:
    checkpointer = checkpointer_of()
    with raises(ConfigError, "step()", repr(iteration)):
        checkpointer.step(iteration)
    assert checkpointer._boundary == 2


def test_turning_off_stops_copies_and_unpins_nothing() -> None:
    """Training goes on: what may wait for its device comes when it has ended."""
    done: list[str] = []
    capture = SimpleNamespace(stop=lambda: done.append("stop"), close=lambda: done.append("close"))
    events = SimpleNamespace(emit=lambda event, **_: done.append(event))
    snapshots_of(capture, events=events)._perform(TurnOff("why"))
    assert done == ["turned_off", "stop"]


def test_a_rank_whose_connections_break_in_the_fence_comes_to_nothing_collective_at_the_boundary() -> None:
    """They may have passed where it would wait for them."""
    entered: list[str] = []
    links = SimpleNamespace(broken=False, give_up=lambda reason: entered.append("given up"))

    def unreachable(*_: object) -> None:
        links.broken = True
        raise AgreementError("a rank has gone")

    links.agreement = SimpleNamespace(post=unreachable)
    pacer = SimpleNamespace(wish=Wish(), enter=lambda kind: None, boundary=lambda flushing: entered.append("pacer"))
    protection = SimpleNamespace(
        beat=lambda *_: None, observe=lambda target: Guard(), observe_flush=lambda flush: NO_FLUSH
    )
    events = SimpleNamespace(emit=lambda event, **fields: entered.append(event))
    checkpointer = checkpointer_of(pacer, config=Config(), protection=protection, links=links, events=events)
    state, snapshots = checkpointer._state, checkpointer._snapshots
    snapshots._snapshot = lambda iteration, begin: entered.append("snapshot")  # type: ignore[method-assign, union-attr]
    state.begin(LINEAGE, None, 0.0)
    state.boundary(1)
    state.agree()
    assert state.owes_round
    checkpointer.step(2)
    assert state.off and entered == ["given up", "turned_off", "fence", "pacer"]


def test_an_arena_of_which_no_slot_has_its_memory_yet_is_not_ready() -> None:
    """The others would begin a snapshot that this rank cannot take."""
    capture = Capture.__new__(Capture)
    capture._flight, capture._held, capture._slots = None, {}, {}
    assert not capture.is_ready(())


def test_what_is_sealed_is_posted_while_the_rank_computes() -> None:
    """Not at the fence alone: where the boundary comes right behind it all ranks would wait for each other."""
    rounds: list[Any] = []
    guard = Guard()
    links = SimpleNamespace(agreement=SimpleNamespace(post=lambda round_, *_: rounds.append(round_)))
    pacer = SimpleNamespace(wish=Wish(), enter=lambda kind: None)
    protection = SimpleNamespace(
        beat=lambda *_: None, observe=lambda target: guard, observe_flush=lambda flush: NO_FLUSH
    )
    checkpointer = checkpointer_of(pacer, protection=protection, links=links)
    capture = SimpleNamespace(
        sealed=False, flying=True, newest=None, is_ready=lambda keep: True, fence=lambda secs: None
    )  # fmt: skip
    checkpointer._shard.capture = capture  # type: ignore[union-attr]
    checkpointer._state.begin(LINEAGE, None, 0.0)
    checkpointer._state.boundary(1)
    checkpointer._state.agree()
    checkpointer._snapshots._pause_secs = 0.0  # type: ignore[union-attr]
    checkpointer.phase("forward")
    assert not rounds, "its copies are under way"
    capture.sealed, capture.flying = True, False
    for kind in ("start", "window"):
        checkpointer.phase(kind)
    assert not rounds, "these belong to the boundary, and to who waits for other ranks"
    checkpointer._state.targets.interval, checkpointer._state.targets.target = 1, SnapshotId(LINEAGE, 0)
    checkpointer._state.targets.timeout_secs = 1e12
    guard = Guard(alive=True, configured=True, sealed=True)
    checkpointer.phase("forward")
    assert not rounds, "what is being protected may be protected at the fence"
    guard = guard._replace(covered=True)
    for kind in ("backward", "forward"):
        checkpointer.phase(kind)
    assert [round_.number for round_ in rounds] == [1]
    checkpointer._snapshots.fence()  # type: ignore[union-attr]
    assert len(rounds) == 1, "once per snapshot"


def test_what_is_evaluated_or_saved_is_no_time_of_training() -> None:
    paused: list[str] = []
    protection = SimpleNamespace(beat=lambda _, kind: paused.append(kind))
    checkpointer = checkpointer_of(SimpleNamespace(pause=lambda: paused.append("paced")), protection=protection)
    checkpointer.pause()
    assert paused == ["pause", "paced"]
    checkpointer._state.turn_off("why")
    checkpointer.pause()
    assert paused == ["pause", "paced", "pause"]


@pytest.mark.parametrize(
    ("starts", "stalled"), [([0, 3], False), ([2, 5], False), ([3, 5], True), ([3, -1], True), ([-1, -1], False)]
)
def test_attempts_count_that_all_nodes_have_seen_come_to_nothing(starts: list[int], stalled: bool) -> None:
    """A node that comes and goes has failed in a row while others made snapshots; -1: a rank that speaks for none."""
    members = tuple(RankPlace({"dp": rank}, "node") for rank in range(2))
    attempt = AttemptRecord(Config(), Topology(1, members, {"dp": 2}), LauncherRun(""), Events(None, 1))
    sights = [AttemptSight(num) for num in starts]
    if stalled:
        with raises(StalledError, "3"):
            attempt.begin(sights)
    else:
        attempt.begin(sights)


def protection_of(**settings: Any) -> Protection:
    """Of three ranks on two nodes, as far as its modes go."""
    protection = Protection.__new__(Protection)
    protection._config, protection._racks, protection._gives_up = Config(**settings), [""] * 3, False
    protection._topology = Topology(0, tuple(RankPlace({"dp": n}, f"n{n % 2}") for n in range(3)), {"dp": 3})
    protection._reasons = set()
    protection._events = SimpleNamespace(emit=lambda event, reason: None)  # type: ignore[assignment]
    return protection


def test_where_replicas_have_drifted_apart_what_else_protects_stays() -> None:
    """Nothing of a slot is any other rank's then: memory is whole, and who restarts must come back to it."""
    both = protection_of(protect="replica,peer")
    assert both._resolve(spans_nodes=True).names == ("replica", "peer")
    assert both._resolve(spans_nodes=False, lessens=True).names == ("peer",)
    assert ["replica" in reason for reason in both._reasons] == [True]
    with raises(ConfigError, "protect"):
        protection_of(protect="replica")._resolve(spans_nodes=False, lessens=True)
    with raises(ConfigError, "protect"):
        both._resolve(spans_nodes=False)


@pytest.mark.parametrize(("done", "brought"), [(True, [True]), (False, [])])
def test_what_training_goes_back_from_does_not_come_to_storage(done: bool, brought: list[bool]) -> None:
    came: list[bool] = []

    def persist() -> str:
        came.append(True)
        return ""

    checkpointer = checkpointer_of(storage=SimpleNamespace(wants_last=True))
    checkpointer.group = SimpleNamespace(broken=False)  # type: ignore[assignment]
    checkpointer._persist_last = persist  # type: ignore[method-assign]
    assert checkpointer._bring_home(done) == (True, None) and came == brought
