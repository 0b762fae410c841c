"""What a rank that leads its node has its SMP say."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ftckpt.config import Config
from ftckpt.errors import SmpError
from ftckpt.memory.environment import Hazard
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.parity.holding import ArenaLayout
from ftckpt.session import node_smp
from ftckpt.session.node_smp import NodeSmp
from ftckpt.smp.requests import guard_digest
from tests.support.errors import lacks
from tests.support.waiting import until

PLACES = (RankPlace({"dp": 0}, "n0"), RankPlace({"dp": 1}, "n0"))


class Saying:
    """Stands for the client of an SMP that comes to its reason after some looks."""

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)

    def status(self) -> dict[str, Any]:
        if not self.problems:
            raise SmpError("it does not answer")
        return {"tasks": {"storage": {"problem": self.problems.pop(0)}}}


def asked(client: Saying | None, *goes_on: bool) -> str:
    """What a rank of node ``n0`` learns while the flush goes on as long as is said, and has ended then."""
    topology = Topology(0, PLACES[:1], {"dp": 1})
    smp: Any = NodeSmp(Config(), topology, None, None, ["machine"])  # type: ignore[arg-type]
    smp._client = client
    turns = iter(goes_on)
    return str(smp.flush_problem(lambda: next(turns, False)))


def test_a_node_is_asked_until_it_has_a_reason_or_has_come_to_its_end() -> None:
    assert not lacks(asked(Saying("", "", "no disk", "too late"), True, True, True, True), "n0", "no disk")
    assert asked(Saying("", "", "no disk"), True, False, False) == "", "its part is there: it has no reason"
    assert not lacks(asked(Saying("no disk")), "n0", "no disk")
    assert not lacks(asked(Saying(), True, True), "n0", "it does not answer")
    assert not lacks(asked(None, True, True), "n0")


def test_a_node_that_writes_on_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_smp, "_REASON_SECS", 0.0)
    assert asked(Saying("", "too late"), True, True) == ""


def of_rank(rank: int, told: list[tuple[str, str]] | None = None, attempt: str = "attempt") -> NodeSmp:
    """With nothing to tell, or errors that come to ``told``."""

    def emit(event: str, error: str) -> None:
        assert told is not None, error
        told.append((event, error))

    group: Any = SimpleNamespace(name=attempt)
    events: Any = SimpleNamespace(emit=emit)
    return NodeSmp(Config(smp_listen="127.0.0.1"), Topology(rank, PLACES, {"dp": 2}), group, events, ["machine"] * 2)


def test_a_port_is_known_before_there_is_an_smp_and_stays() -> None:
    """A later layout finds other nodes that know of it."""
    leader, other = of_rank(0), of_rank(1)
    pid, address, port = leader.report()
    assert (pid, address) == (os.getpid(), "127.0.0.1") and port
    assert leader.report().port == port
    assert other.report() == (os.getpid(), "", 0)
    leader.release()


HOLDINGS = [ArenaLayout(f"dp{rank}", "n0", "", "arena", "", 1, (), (0, ())) for rank in range(2)]


def no_memory() -> None:
    raise OSError("no memory")


class Told:
    """Stands for the start of an SMP, its client and the watch over it: what it was told, and what goes before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *starts: Callable[[], object]) -> None:
        self.descriptions: list[Any] = []
        self._starts = iter(starts)
        monkeypatch.setattr(NodeSmp, "_find_or_start", self._find_or_start)
        monkeypatch.setattr(node_smp, "Watch", lambda *_, **__: SimpleNamespace(stop=lambda: None))

    def _find_or_start(self, *_: object) -> Any:
        next(self._starts, lambda: None)()
        return SimpleNamespace(configure=self.descriptions.append)

    def arenas(self) -> list[str]:
        return [one["places"]["1"]["arena"] for one in self.descriptions]


def configured(smp: NodeSmp, folder: Path, arena: str) -> int:
    reports = [smp.report(), of_rank(1).report()]
    return smp.configure(folder, reports, [replace(one, arena=arena) for one in HOLDINGS], [], {})


def test_an_smp_that_starts_late_is_told_the_last_word_and_training_waits_at_its_end_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layout may follow another before the SMP has started."""
    has_started = threading.Event()
    told, smp = Told(monkeypatch, lambda: has_started.wait(20)), of_rank(0)
    begin = time.monotonic()
    digests = [configured(smp, tmp_path, name) for name in ("first", "second")]
    assert not told.descriptions and time.monotonic() - begin < 5
    threading.Timer(0.1, has_started.set).start()
    smp.release()
    assert told.arenas()[-1] == "second"
    assert guard_digest(told.descriptions[-1]) == digests[-1] != digests[0]


def test_an_smp_that_cannot_answer_other_nodes_is_told_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What guards and flushes this node's memory needs no other node."""
    seen, watched = list[tuple[str, str]](), list[object]()
    smp = of_rank(0, seen)
    client = SimpleNamespace(configure=lambda _: "the address has gone")
    monkeypatch.setattr(NodeSmp, "_find_or_start", lambda *_: client)
    monkeypatch.setattr(
        node_smp, "Watch", lambda of, *_, **__: watched.append(of) or SimpleNamespace(stop=lambda: None)
    )
    configured(smp, tmp_path, "arena")
    until(lambda: seen, "it fails")
    assert "the address has gone" in seen[0][1] and watched == [client]
    smp.release()


def test_an_smp_that_could_not_be_told_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_smp, "_AGAIN_SECS", 0.01)
    told, seen = Told(monkeypatch, no_memory, no_memory), list[tuple[str, str]]()
    smp = of_rank(0, seen)
    configured(smp, tmp_path, "arena")
    until(told.arenas, "it is told")
    smp.release()
    assert told.arenas() == ["arena"] and seen == [("smp_error", "OSError: no memory")] * 2


def test_a_job_that_ends_waits_for_no_smp_that_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says at its end why nothing came to storage."""
    told, seen = Told(monkeypatch, no_memory), list[tuple[str, str]]()
    smp = of_rank(0, seen)
    configured(smp, tmp_path, "arena")
    until(lambda: seen, "it fails")
    assert not lacks(smp.flush_problem(), "n0", "OSError: no memory")
    assert of_rank(1).flush_problem() == "", "another rank leads the node"
    begin = time.monotonic()
    smp.release()
    assert time.monotonic() - begin < node_smp._LAST_SECS and not told.descriptions


def test_an_smp_that_an_earlier_attempt_has_told_does_not_guard_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would bring this one's snapshots to storage in the name of that one."""
    Told(monkeypatch)
    digests = []
    for attempt in ("earlier", "this"):
        smp = of_rank(0, attempt=attempt)
        digests.append(configured(smp, tmp_path, "arena"))
        smp.release()
    assert len(set(digests)) == 2


def test_an_smp_that_has_ended_since_it_was_found_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, smp = Told(monkeypatch), of_rank(0)
    smp._client = Mock(configure=Mock(side_effect=SmpError("it has ended")))
    port = smp.report().port
    configured(smp, tmp_path, "arena")
    smp.release()
    assert [(one["address"], one["port"]) for one in told.descriptions] == [("127.0.0.1", port)]


def test_what_is_wanted_anew_waits_for_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, seen = Told(monkeypatch, no_memory), list[tuple[str, str]]()
    smp = of_rank(0, seen)
    configured(smp, tmp_path, "first")
    until(lambda: seen, "it fails")
    configured(smp, tmp_path, "second")
    until(told.arenas, "it is told", node_smp._AGAIN_SECS / 2)
    smp.release()
    assert told.arenas() == ["second"]


def test_what_helps_against_a_hazard_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that starts again has a log of its own to read; events have all of it each time."""
    hazard = Hazard("small_tmpfs", "little room", "more of it")
    monkeypatch.setattr(node_smp, "hazards", lambda *_: [hazard])
    emitted, lines = list[str](), list[str]()
    events = SimpleNamespace(emit=lambda event, **_: emitted.append(event), announce=lines.append)
    smp = NodeSmp(Config(), Topology(0, PLACES[:1], {"dp": 1}), None, events, ["machine"])  # type: ignore[arg-type]
    smp.tell_hazards(tmp_path)
    (tmp_path / "dp0.12345678").mkdir()
    smp.tell_hazards(tmp_path)
    assert emitted == ["environment"] * 2
    assert lines == ["little room; more of it", "little room; ftckpt check says what to do"]
