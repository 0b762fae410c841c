"""A checkpointer executes the decisions of its state."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.config import Config
from ftckpt.errors import ConfigError, StalledError, StorageError
from ftckpt.events import Events
from ftckpt.memory.launch_record import LauncherRun
from ftckpt.model.lineage import NO_CHECKPOINT
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.restore.restart import Resumption
from ftckpt.session import checkpointer as checkpointer_module
from ftckpt.session import start
from ftckpt.session.actions import Disable, OldArenaRemoval, UpdateTargets
from ftckpt.session.attempt import AttemptRecord, AttemptReport
from ftckpt.session.checkpointer import Checkpointer
from ftckpt.session.counters import RankNumbers
from ftckpt.session.flush_scheduler import NO_FLUSH
from ftckpt.session.protection import ArenaRemains, Protection, in_all_arenas
from ftckpt.session.protection_scheduler import ProtectionStatus
from ftckpt.session.rank_context import RankContext
from ftckpt.session.session import SessionState
from ftckpt.session.snapshot_driver import SnapshotDriver
from ftckpt.session.start import LoadResult
from tests.support.errors import raises

LINEAGE = b"l" * 16


def nothing(*_: object, **__: object) -> None: ...


def rank_of(**parts: Any) -> Any:
    """A rank with these parts, and as little as can be of the others."""
    config = parts.get("config", Config())
    others = {
        "topology": SimpleNamespace(rank=1, members=()), "group": SimpleNamespace(outlast_stalls=nothing),
        "training_state": None, "links": None, "config": config, "state": SessionState(config),
        "attempt": SimpleNamespace(trains=nothing, finish=nothing, ends=()), "numbers": RankNumbers(),
        "arenas": SimpleNamespace(path=Path(), withdraw=nothing, release=nothing), "flushes_at_end": False,
    }  # fmt: skip
    rank = SimpleNamespace(**{**others, **parts})
    events = {"emit": nothing, "announce": nothing, "end_part": nothing, "close": nothing, "parts": ()}
    rank.events = SimpleNamespace(**{**events, **vars(parts.get("events", SimpleNamespace()))})
    protection: dict[str, Any] = dict.fromkeys(("beat", "mark", "publish_counts", "report_copying", "close"), nothing)
    protection |= {"protects": True, "survey": lambda *_: (None, None), "observe_flush": lambda flush: NO_FLUSH}
    rank.protection = parts.get("protection") or SimpleNamespace(observe=lambda target: ProtectionStatus())
    for name, value in protection.items():
        if not hasattr(rank.protection, name):
            setattr(rank.protection, name, value)
    return rank


def shard_of(capture: Any = None) -> Any:
    parts: dict[str, Any] = dict.fromkeys(("lay_out", "supply", "release"), nothing)
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

    def make(scheduler: Any = None, capture: Any = None, **parts: Any) -> Checkpointer:
        made, shard = attach(**parts), shard_of(capture)
        now = LoadResult(LINEAGE, SnapshotId(LINEAGE, 2), "")
        scheduler = SimpleNamespace(**{"close": nothing, **vars(scheduler or SimpleNamespace())})
        for name, value in {"meet": (None, scheduler, None), "load": now, "Shard": shard}.items():
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


def test_a_checkpoint_whose_iteration_is_no_number_is_refused(attach: Callable[..., Checkpointer]) -> None:
    with raises(ConfigError, "newer_than", "None"):
        attach().restore(newer_than=None)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("anew", [False, True], ids=["at start", "while training"])
def test_what_no_mode_guards_any_more_is_not_called_protected(anew: bool) -> None:
    """Its last mode goes when the arenas are arranged, as where no replica set spans nodes any more."""
    marks: list[UpdateTargets] = []
    protection = SimpleNamespace(
        protects=anew, mark=marks.append, survey=lambda restored, rebuilt: (SnapshotId(LINEAGE, 4), restored),
        arrange=lambda *_: setattr(protection, "protects", False),
    )  # fmt: skip
    arenas, state = SimpleNamespace(path=Path(), coming_bytes=0, slots=4), SessionState(Config(), protects=True)
    snapshots = snapshots_of(SimpleNamespace(arena=object()), protection=protection, arenas=arenas, state=state)
    if anew:
        state.adopt(SnapshotId(LINEAGE, 4), SnapshotId(LINEAGE, 5))
        snapshots.protect_new_arena()
    else:
        snapshots.begin(LINEAGE, SnapshotId(LINEAGE, 5), True)
    assert marks == [UpdateTargets(None, None)], "nor does a mark of an earlier attempt stay in the arena"
    assert state.targets.protected is None and not state.targets.interval


@pytest.mark.parametrize("rebuilt", [False, True])
def test_what_a_start_has_rebuilt_is_to_be_protected_and_is_not_called_so(
    rebuilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement node has no parity yet, whatever the marks of others are."""
    snapshot, state = SnapshotId(LINEAGE, 5), SessionState(Config(), protects=True)
    found: Any = SimpleNamespace(
        choose=lambda *_: SimpleNamespace(snapshot=snapshot), invalidate_newer=lambda _: LINEAGE,
        usage={"peer_parity": {"chunks": 3}} if rebuilt else {}, in_memory=True, resumption=Resumption(), source="",
        cast=frozenset(), close=lambda: None, record_lineage=lambda: None, why="",
        written_by=lambda _: "", load=lambda one, *_: one,
    )  # fmt: skip
    monkeypatch.setattr(start, "Restart", lambda *_, **__: found)
    remains = [ArenaRemains(mark, (snapshot,)) for mark in (snapshot, None)]
    smp = SimpleNamespace()
    protection = SimpleNamespace(protects=True, smp=smp, survey=partial(in_all_arenas, remains))
    rank = rank_of(state=state, protection=protection, training_state=SimpleNamespace())
    shard = shard_of(SimpleNamespace(arena=object()))
    shard.state = None
    loaded = start.load(rank, shard, NO_CHECKPOINT)
    SnapshotDriver(rank, shard, None, None).begin(  # type: ignore[arg-type]
        loaded.lineage, loaded.snapshot, loaded.in_memory, loaded.rebuilt
    )
    assert (state.targets.protected, state.targets.target) == (None if rebuilt else snapshot, snapshot)


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
    """A checkpointer of three ranks on two nodes, as far as its modes matter."""
    topology = Topology(0, tuple(RankPlace({"dp": n}, f"n{n % 2}") for n in range(3)), {"dp": 3})
    group: Any = SimpleNamespace(rank=0, gather=lambda data: [data] * 3)
    events: Any = SimpleNamespace(emit=lambda event, reason: reasons.append(reason))
    return Protection(Config(**settings), topology, group, events)


def test_where_replicas_have_drifted_apart_what_else_protects_stays() -> None:
    """No slot belongs to another rank then: memory has a committed snapshot, and a restart must use it."""
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


@pytest.mark.parametrize(("done", "flushes"), [(True, 1), (False, 0)])
def test_what_training_goes_back_from_does_not_come_to_storage(
    done: bool, flushes: int, restored: Callable[..., Checkpointer]
) -> None:
    flushed: list[object] = []
    links = SimpleNamespace(meet=lambda _, flush: flushed.append(flush) or "", part=nothing)
    group = SimpleNamespace(broken=False, outlast_stalls=nothing)
    scheduler = SimpleNamespace(enter=nothing, pause=nothing)
    state = SessionState(Config())
    checkpointer = restored(scheduler, links=links, group=group, state=state, flushes_at_end=True)
    state.turn_off("why")
    checkpointer.close(done=done)
    assert len(flushed) == flushes
