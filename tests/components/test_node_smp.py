"""A node's leader configures its SMP, and asks it why a flush failed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.config import Config
from ftckpt.errors import SmpError
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.parity.holding import ArenaLayout
from ftckpt.session import node_smp
from ftckpt.session.node_smp import NodeSmp
from ftckpt.smp.requests import guard_digest
from tests.support.errors import lacks
from tests.support.waiting import until

PLACES = (RankPlace({"dp": 0}, "n0"), RankPlace({"dp": 1}, "n0"))
HOLDINGS = [ArenaLayout(f"dp{rank}", "n0", "", "arena", "", 1, (), (0, ())) for rank in range(2)]


class Smp:
    """Stands for a node's SMP, its start and the watch over it.

    ``starts`` run one after the other, before it is there; ``problems`` are what it reports, then it does not answer.
    """

    def __init__(self) -> None:
        self.descriptions: list[Any] = []
        self.starts: list[Callable[[], object]] = []
        self.problems: list[str] = []
        self.ends = False

    def find_or_start(self, *_: object) -> Smp:
        if self.starts:
            self.starts.pop(0)()
        return self

    def configure(self, description: Any) -> str:
        if self.ends:
            self.ends = False
            raise SmpError("it has ended")
        self.descriptions.append(description)
        return ""

    def status(self) -> dict[str, Any]:
        if not self.problems:
            raise SmpError("it does not answer")
        return {"tasks": {"storage": {"problem": self.problems.pop(0)}}}

    @property
    def arenas(self) -> list[str]:
        return [one["places"]["1"]["arena"] for one in self.descriptions]


@pytest.fixture
def smp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Smp]:
    there = Smp()
    monkeypatch.setattr(node_smp, "find_or_start", there.find_or_start)
    monkeypatch.setattr(node_smp, "Watch", lambda *_, **__: SimpleNamespace(stop=lambda: None))
    yield there


def of_rank(rank: int, events: list[str] | None = None, attempt: str = "attempt", **more: Any) -> NodeSmp:
    def emit(event: str, error: str) -> None:
        assert events is not None, error
        events.append(f"{event}: {error}")

    group: Any = SimpleNamespace(name=attempt)
    to: Any = SimpleNamespace(**{"emit": emit, **more})
    return NodeSmp(Config(smp_listen="127.0.0.1"), Topology(rank, PLACES, {"dp": 2}), group, to, ["machine"] * 2)


def configured(leader: NodeSmp, folder: Path, arena: str = "arena") -> int:
    reports = [leader.report(), of_rank(1).report()]
    return leader.configure(folder, reports, [replace(one, arena=arena) for one in HOLDINGS], [], {})


def no_memory() -> None:
    raise OSError("no memory")


def test_a_node_is_asked_until_it_has_a_reason_or_has_come_to_its_end(
    smp: Smp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = of_rank(0)
    configured(leader, tmp_path)
    until(lambda: smp.arenas, "it is configured")

    def asked(problems: list[str], *goes_on: bool) -> str:
        smp.problems, turns = problems, iter(goes_on)
        return leader.flush_problem(lambda: next(turns, False))

    assert not lacks(asked(["", "", "no disk", "too late"], True, True, True, True), "n0", "no disk")
    assert asked(["", "", "no disk"], True, False, False) == "", "its part is there: it has no reason"
    assert not lacks(asked([], True, True), "n0", "it does not answer")
    monkeypatch.setattr(node_smp, "_REASON_SECS", 0.0)
    assert asked(["", "too late"], True, True) == "", "one that writes on is not waited for"
    leader.release()


def test_a_port_is_known_before_there_is_an_smp_and_stays() -> None:
    """A later layout finds other nodes that know of it."""
    leader = of_rank(0)
    pid, address, port = leader.report()
    assert (pid, address) == (os.getpid(), "127.0.0.1") and port
    assert leader.report().port == port and of_rank(1).report() == (os.getpid(), "", 0)
    leader.release()


def test_an_smp_that_starts_late_is_told_the_last_word_and_training_waits_at_its_end_alone(
    smp: Smp, tmp_path: Path
) -> None:
    """One layout may follow another before the SMP has started."""
    has_started = threading.Event()
    smp.starts, leader = [lambda: has_started.wait(20)], of_rank(0)
    begin = time.monotonic()
    digests = [configured(leader, tmp_path, name) for name in ("first", "second")]
    assert not smp.descriptions and time.monotonic() - begin < 5
    threading.Timer(0.1, has_started.set).start()
    leader.release()
    assert smp.arenas[-1] == "second"
    assert guard_digest(smp.descriptions[-1]) == digests[-1] != digests[0]


def test_an_smp_that_could_not_be_told_is_told_again(
    smp: Smp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new layout at once, the same one after a pause."""
    events: list[str] = []
    smp.starts, leader = [no_memory], of_rank(0, events)
    configured(leader, tmp_path, "first")
    until(lambda: events, "it fails")
    configured(leader, tmp_path, "second")
    until(lambda: smp.arenas, "it is told", node_smp._AGAIN_SECS / 2)
    smp.ends = True  # since it was found
    configured(leader, tmp_path, "third")
    until(lambda: smp.arenas[-1] == "third", "another one is told")
    leader.release()
    monkeypatch.setattr(node_smp, "_AGAIN_SECS", 0.01)
    smp.starts, leader = [no_memory, no_memory], of_rank(0, events)
    configured(leader, tmp_path, "fourth")
    until(lambda: smp.arenas[-1] == "fourth", "it is told")
    leader.release()
    assert smp.arenas == ["second", "third", "fourth"] and events == ["smp_error: OSError: no memory"] * 3


def test_a_job_that_ends_waits_for_no_smp_that_cannot_be_told(smp: Smp, tmp_path: Path) -> None:
    """And reports at its end why nothing was flushed."""
    events: list[str] = []
    smp.starts, leader = [no_memory], of_rank(0, events)
    configured(leader, tmp_path)
    until(lambda: events, "it fails")
    assert not lacks(leader.flush_problem(), "n0", "OSError: no memory")
    assert of_rank(1).flush_problem() == "", "another rank leads the node"
    begin = time.monotonic()
    leader.release()
    assert time.monotonic() - begin < 5.0 and not smp.descriptions
