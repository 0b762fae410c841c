"""What a checkpointer does with the decisions of its state."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.capture.capture import Capture
from ftckpt.config import Config
from ftckpt.errors import ConfigError, StalledError, StorageError
from ftckpt.events import Events
from ftckpt.memory.launch_record import LauncherRun
from ftckpt.model.lineage import NO_CHECKPOINT
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.restore.restart import Resumption
from ftckpt.schedule.cost import IntervalRequest
from ftckpt.session import checkpointer as checkpointer_module
from ftckpt.session import start
from ftckpt.session.actions import Disable, OldArenaRemoval, UpdateTargets
from ftckpt.session.attempt import AttemptRecord, AttemptReport
from ftckpt.session.checkpointer import Checkpointer
from ftckpt.session.counters import RankNumbers
from ftckpt.session.flush_scheduler import NO_FLUSH
from ftckpt.session.gc_pause import imports_that_stay
from ftckpt.session.protection import ArenaRemains, Protection, in_all_arenas
from ftckpt.session.protection_scheduler import ProtectionStatus
from ftckpt.session.rank_parts import RankContext
from ftckpt.session.session import SessionState
from ftckpt.session.snapshot_driver import SnapshotDriver
from ftckpt.session.vote import AgreementError
from tests.support.errors import raises

LINEAGE = b"l" * 16


def rank_of(**parts: Any) -> Any:
    """A rank with these parts, and as little as can be of the others."""
    config, nothing = parts.get("config", Config()), lambda *_, **__: None
    others = {
        "topology": SimpleNamespace(rank=1, members=()),
        "group": SimpleNamespace(broken=False, outlast_stalls=nothing),
        "training_state": None, "links": None, "storage": None, "config": config, "state": SessionState(config),
        "attempt": SimpleNamespace(trains=nothing, finish=nothing, ends=()), "numbers": RankNumbers(),
        "arenas": SimpleNamespace(path=Path(), withdraw=nothing, release=nothing),
    }  # fmt: skip
    rank = SimpleNamespace(**{**others, **parts})
    events = {"emit": nothing, "announce": nothing, "end_part": nothing, "close": nothing, "parts": ()}
    rank.events = SimpleNamespace(**{**events, **vars(parts.get("events", SimpleNamespace()))})
    protection: dict[str, Any] = dict.fromkeys(("beat", "mark", "tell_counts", "tell_copying", "close"), nothing)
    protection |= {"protects": True, "is_set_up": True, "redundancy": None, "survey": lambda *_: (None, None)}
    protection |= {"observe": lambda target: ProtectionStatus(), "observe_flush": lambda flush: NO_FLUSH}
    rank.protection = parts.get("protection") or SimpleNamespace()
    for name, value in protection.items():
        if not hasattr(rank.protection, name):
            setattr(rank.protection, name, value)
    return rank


def shard_of(capture: Any = None) -> Any:
    parts: dict[str, Any] = dict.fromkeys(("lay_out", "supply", "let_go"), lambda *_: None)
    return SimpleNamespace(
        capture=capture, positions=0, num_differing=0, shortage="", sampled=lambda number: (None, None), **parts
    )


def snapshots_of(capture: Any = None, **parts: Any) -> SnapshotDriver:
    return SnapshotDriver(rank_of(**parts), shard_of(capture), None, None)  # type: ignore[arg-type]


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Checkpointer]:
    """Makes a checkpointer of a rank with some parts."""

    def make(**parts: Any) -> Checkpointer:
        rank = rank_of(**parts)
        monkeypatch.setattr(RankContext, "attach", lambda *_: rank)
        return Checkpointer(rank.config, rank.training_state, rank.topology)

    return make


@pytest.fixture
def restored(attach: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Checkpointer]:
    """Makes one that has restored iteration 2."""

    def make(pacer: Any = None, capture: Any = None, **parts: Any) -> Checkpointer:
        made, shard = attach(**parts), shard_of(capture)
        now = SimpleNamespace(
            snapshot=SnapshotId(LINEAGE, 2), lineage=LINEAGE, in_memory=False, rebuilt=False, cast=(), source="",
            where="",
        )  # fmt: skip
        pacer = SimpleNamespace(**{"close": lambda: None, **vars(pacer or SimpleNamespace())})
        for name, value in {"meet": (None, None, pacer, None), "load": now, "Shard": shard}.items():
            monkeypatch.setattr(checkpointer_module, name, lambda *_, value=value, **__: value)
        assert made.restore() == 2
        return made

    return make


def test_an_action_that_fails_keeps_none_from_being_done() -> None:
    done: list[str] = []

    def remove_old() -> None:
        raise OSError(errno.ENOTEMPTY, "a file was made there meanwhile")

    events = SimpleNamespace(emit=lambda event, **_: done.append(event))
    snapshots = snapshots_of(events=events, arenas=SimpleNamespace(remove_old=remove_old))
    with pytest.raises(OSError, match=str(errno.ENOTEMPTY)):
        snapshots.execute([OldArenaRemoval(), Disable("why")])
    assert done == ["turned_off"]


def test_a_rollback_to_nothing_is_refused(attach: Callable[..., Checkpointer]) -> None:
    with raises(ConfigError, "rollback", "newer_than"):
        attach().restore(rollback=True)


@pytest.mark.parametrize("script_collects", [True, False])
def test_the_collector_rests_during_a_restore(
    script_collects: bool, attach: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def meet(rank: object) -> None:
        seen.append(gc.isenabled())
        raise ConfigError("no")

    monkeypatch.setattr(checkpointer_module, "meet", meet)
    checkpointer = attach()
    (gc.enable if script_collects else gc.disable)()
    try:
        with raises(ConfigError):
            checkpointer.restore()
        assert (seen, gc.isenabled()) == ([False], script_collects)
    finally:
        gc.enable()


@pytest.mark.parametrize("lasting", [True, False])
def test_a_start_that_storage_kept_from_its_snapshot_is_no_failure(
    lasting: bool, attach: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_back = []

    def meet(rank: object) -> None:
        raise StorageError("away", lasting=lasting)

    monkeypatch.setattr(checkpointer_module, "meet", meet)
    checkpointer = attach(attempt=SimpleNamespace(take_back=lambda: taken_back.append(True)))
    with raises(StorageError):
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
        self.marks: list[UpdateTargets] = []

    def survey(
        self, restored: SnapshotId | None, rebuilt: bool = False
    ) -> tuple[SnapshotId | None, SnapshotId | None]:
        return SnapshotId(LINEAGE, 4), restored

    def arrange(self, arena: object, coming_bytes: int, slots: int) -> None:
        self.on = self.protects = False

    def mark(self, marks: UpdateTargets) -> None:
        self.marks.append(marks)


@pytest.mark.parametrize("anew", [False, True], ids=["at start", "while training"])
def test_what_no_mode_guards_any_more_is_not_called_protected(anew: bool) -> None:
    protection = Lessened()
    arenas = SimpleNamespace(path=Path(), coming_bytes=0, slots=4)
    state = SessionState(Config(), protects=True)
    snapshots = snapshots_of(SimpleNamespace(arena=object()), protection=protection, arenas=arenas, state=state)
    if anew:
        state.take_over(SnapshotId(LINEAGE, 4), SnapshotId(LINEAGE, 5))
        snapshots._protect_anew()
    else:
        protection.on = protection.protects = False  # by the time that the arena is there
        snapshots.begin(LINEAGE, SnapshotId(LINEAGE, 5), True)
    assert protection.marks == [UpdateTargets(None, None)], "nor does a mark of an earlier attempt stay in the arena"
    assert state.targets.protected is None and not state.targets.interval


@pytest.mark.parametrize("rebuilt", [False, True])
def test_what_a_start_has_rebuilt_is_to_be_protected_and_is_not_called_so(
    rebuilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that has come anew has no parity yet, whatever the marks of others say."""
    snapshot, state = SnapshotId(LINEAGE, 5), SessionState(Config(), protects=True)
    found: Any = SimpleNamespace(
        choose=lambda *_: SimpleNamespace(snapshot=snapshot), invalidate_newer=lambda _: LINEAGE,
        usage={"peer_parity": {"chunks": 3}} if rebuilt else {}, in_memory=True, resumption=Resumption(), source="",
        capacities=lambda: None, cast=frozenset(), close=lambda: None, record_lineage=lambda: None, why="",
        written_by=lambda _: "", load=lambda one, *_: one,
    )  # fmt: skip
    monkeypatch.setattr(start, "Restart", lambda *_, **__: found)
    remains = [ArenaRemains(mark, (snapshot,)) for mark in (snapshot, None)]
    protection = SimpleNamespace(protects=True, smp=SimpleNamespace(), survey=partial(in_all_arenas, remains))
    rank = rank_of(state=state, protection=protection, storage=SimpleNamespace(snapshots=""))
    rank.training_state = SimpleNamespace()
    loaded = start.load(rank, SimpleNamespace(), None, NO_CHECKPOINT, True)  # type: ignore[arg-type]
    SnapshotDriver(rank, SimpleNamespace(capture=SimpleNamespace(arena=object()), positions=0), None, None).begin(  # type: ignore[arg-type]
        loaded.lineage, loaded.snapshot, loaded.in_memory, loaded.rebuilt
    )
    assert (state.targets.protected, state.targets.target) == (None if rebuilt else snapshot, snapshot)


def test_a_rank_that_has_turned_off_gives_signs_of_life(restored: Callable[..., Checkpointer]) -> None:
    """It trains, and ``ftckpt status`` shows where."""
    beats: list[str] = []
    protection = SimpleNamespace(beat=lambda _, kind: beats.append(kind))
    state = SessionState(Config())
    checkpointer = restored(protection=protection, state=state)
    state.turn_off("why")
    checkpointer.fence()
    checkpointer.step(3)
    assert beats == ["fence", "start"]


@pytest.mark.parametrize("iteration", [2.0, "2", None])
def test_an_iteration_that_is_no_number_is_refused_before_anything_knows_of_it(
    iteration: Any, restored: Callable[..., Checkpointer]
) -> None:
    beats: list[int] = []
    protection = SimpleNamespace(beat=lambda iteration, _: beats.append(iteration))
    checkpointer = restored(SimpleNamespace(pause=lambda: None), protection=protection)
    with raises(ConfigError, "step()", repr(iteration)):
        checkpointer.step(iteration)
    checkpointer.pause()
    assert beats == [2]


def test_turning_off_stops_copies_and_unpins_nothing() -> None:
    """Training goes on: what may wait for its device comes when it has ended."""
    done: list[str] = []
    capture = SimpleNamespace(stop=lambda: done.append("stop"), close=lambda: done.append("close"))
    events = SimpleNamespace(emit=lambda event, **_: done.append(event))
    snapshots_of(capture, events=events).execute([Disable("why")])
    assert done == ["turned_off", "stop"]


def test_a_rank_whose_connections_break_in_the_fence_comes_to_nothing_collective_at_the_boundary(
    restored: Callable[..., Checkpointer],
) -> None:
    """They may have passed where it would wait for them."""
    entered: list[str] = []
    links = SimpleNamespace(broken=False, give_up=lambda reason: entered.append("given up"))

    def unreachable(*_: object) -> None:
        links.broken = True
        raise AgreementError("a rank has gone")

    links.agreement = SimpleNamespace(post=unreachable, read=lambda _: entered.append("read"))
    pacer = SimpleNamespace(
        enter=lambda kind: None,
        boundary=lambda *_: entered.append("pacer"),
        intervals=SimpleNamespace(request=IntervalRequest()),
    )
    events = SimpleNamespace(emit=lambda event, **fields: entered.append(event))
    config = Config()
    checkpointer = restored(pacer, config=config, state=(state := SessionState(config)), links=links, events=events)
    entered.clear()
    state.boundary(3)
    state.agree()
    assert state.owes_vote
    checkpointer.step(4)
    assert state.off and entered == ["given up", "turned_off", "fence", "pacer"]


def test_an_arena_of_which_no_slot_has_its_memory_yet_is_not_ready() -> None:
    """The others would begin a snapshot that this rank cannot take."""
    capture = Capture.__new__(Capture)
    capture._flight, capture._held, capture._slots = None, {}, {}
    assert not capture.is_ready(())


def test_what_is_sealed_is_posted_while_the_rank_computes(
    restored: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the fence alone: where the boundary comes right behind it all ranks would wait for each other."""
    monkeypatch.setattr("ftckpt.session.snapshot_driver._LOOK_SECS", 0.0)
    rounds: list[Any] = []
    guard, state = ProtectionStatus(), SessionState(Config())
    links = SimpleNamespace(broken=False, agreement=SimpleNamespace(post=lambda vote, *_: rounds.append(vote)))
    pacer = SimpleNamespace(intervals=SimpleNamespace(request=IntervalRequest()), enter=lambda kind: None)
    protection = SimpleNamespace(observe=lambda target: guard)
    capture = SimpleNamespace(
        sealed=False, flying=True, newest=None, in_graph=False, is_ready=lambda keep: True, fence=lambda secs: None
    )  # fmt: skip
    checkpointer = restored(pacer, capture, protection=protection, links=links, state=state)
    state.boundary(3)
    state.agree()
    checkpointer.phase("forward")
    assert not rounds, "its copies are under way"
    capture.sealed, capture.flying = True, False
    for kind in ("start", "window"):
        checkpointer.phase(kind)
    assert not rounds, "these belong to the boundary, and to who waits for other ranks"
    state.targets.interval, state.targets.target = 1, SnapshotId(LINEAGE, 0)
    state.targets.timeout_secs = 1e12
    guard = ProtectionStatus(alive=True, configured=True, sealed=True)
    checkpointer.phase("forward")
    assert not rounds, "what is being protected may be protected at the fence"
    guard = ProtectionStatus(alive=True, configured=True, sealed=True, covered=True)
    for kind in ("backward", "forward"):
        checkpointer.phase(kind)
    assert [vote.number for vote in rounds] == [1]
    checkpointer.fence()
    assert len(rounds) == 1, "once per snapshot"


def test_what_is_evaluated_or_saved_is_no_time_of_training(restored: Callable[..., Checkpointer]) -> None:
    paused: list[str] = []
    protection, state = SimpleNamespace(beat=lambda _, kind: paused.append(kind)), SessionState(Config())
    checkpointer = restored(SimpleNamespace(pause=lambda: paused.append("paced")), protection=protection, state=state)
    checkpointer.pause()
    assert paused == ["pause", "paced"]
    state.turn_off("why")
    checkpointer.pause()
    assert paused == ["pause", "paced", "pause"]


@pytest.mark.parametrize(
    ("starts", "stalled"), [([0, 3], False), ([2, 5], False), ([3, 5], True), ([3, -1], True), ([-1, -1], False)]
)
def test_attempts_count_that_all_nodes_have_seen_come_to_nothing(starts: list[int], stalled: bool) -> None:
    """A node that comes and goes has failed in a row while others made snapshots; -1: a rank that speaks for none."""
    members = tuple(RankPlace({"dp": rank}, "node") for rank in range(2))
    attempt = AttemptRecord(Config(), Topology(1, members, {"dp": 2}), LauncherRun(""), Events(None, 1))
    sights = [AttemptReport(num) for num in starts]
    if stalled:
        with raises(StalledError, "3"):
            attempt.begin(sights)
    else:
        attempt.begin(sights)


def protection_of(reasons: list[str], **settings: Any) -> Protection:
    """Of three ranks on two nodes, as far as its modes go."""
    topology = Topology(0, tuple(RankPlace({"dp": n}, f"n{n % 2}") for n in range(3)), {"dp": 3})
    group: Any = SimpleNamespace(rank=0, gather=lambda data: [data] * 3)
    events: Any = SimpleNamespace(emit=lambda event, reason: reasons.append(reason))
    return Protection(Config(**settings), topology, group, events)


def test_where_replicas_have_drifted_apart_what_else_protects_stays() -> None:
    """Nothing of a slot is any other rank's then: memory is whole, and who restarts must come back to it."""
    reasons: list[str] = []
    both = protection_of(reasons, protect="replica,peer")
    assert both.resolve(spans_nodes=True).names == ("replica", "peer")
    assert both.resolve(spans_nodes=False, lessens=True).names == ("peer",)
    assert both.resolve(spans_nodes=False, lessens=True).names == ("peer",)
    assert len(reasons) == 1 and "replica" in reasons[0]
    with raises(ConfigError, "protect", "replica", "peer"):
        protection_of([], protect="replica").resolve(spans_nodes=False, lessens=True)
    with raises(ConfigError, "protect", "replica"):
        both.resolve(spans_nodes=False)


@pytest.mark.parametrize(("done", "brought"), [(True, [True]), (False, [])])
def test_what_training_goes_back_from_does_not_come_to_storage(
    done: bool, brought: list[bool], restored: Callable[..., Checkpointer]
) -> None:
    came: list[bool] = []

    def bring_last(rank: object) -> str:
        came.append(True)
        return ""

    storage = SimpleNamespace(wants_last=True, bring_last=bring_last)
    links = SimpleNamespace(broken=False, meet=lambda _, action: action(), part=lambda _: None)
    pacer = SimpleNamespace(enter=lambda kind: None, pause=lambda: None, wish=IntervalRequest())
    checkpointer = restored(pacer, storage=storage, links=links, state=(state := SessionState(Config())))
    state.turn_off("why")
    checkpointer.close(done=done)
    assert came == brought
