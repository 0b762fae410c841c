"""What a rank that leads its node has its SMP say."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.config import Config
from ftckpt.errors import SmpError
from ftckpt.job import node_smp
from ftckpt.job.node_smp import NodeSmp
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.parity.holding import Holding
from ftckpt.smp.requests import guard_digest

PLACES = (RankPlace({"dp": 0}, "n0"), RankPlace({"dp": 1}, "n0"))


class Saying:
    """Stands for the client of an SMP that comes to its reason after some looks."""

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)

    def status(self) -> dict[str, Any]:
        if not self.problems:
            raise SmpError("it does not answer")
        return {"duties": {"storage": {"problem": self.problems.pop(0)}}}


def asked(client: Saying | None, *goes_on: bool) -> str:
    """What a rank of node ``n0`` learns while the flush goes on as long as is said, and has ended then."""
    topology = Topology(0, PLACES[:1], {"dp": 1})
    smp: Any = NodeSmp(Config(), topology, None, None, ["machine"])  # type: ignore[arg-type]
    smp._client = client
    turns = iter(goes_on)
    return str(smp.flush_problem(lambda: next(turns, False)))


def test_a_node_is_asked_until_it_has_a_reason_or_has_come_to_its_end() -> None:
    assert asked(Saying("", "", "no disk", "too late"), True, True, True, True) == "node n0: no disk"
    assert asked(Saying("", "", "no disk"), True, False, False) == "", "its part is there: it has no reason"
    assert asked(Saying("no disk")) == "node n0: no disk"
    assert asked(Saying(), True, True) == "node n0: it does not answer"
    assert asked(None, True, True) == "", "another rank leads the node"


def test_a_node_that_writes_on_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_smp, "_REASON_SECS", 0.0)
    assert asked(Saying("", "too late"), True, True) == ""


def of_rank(rank: int) -> NodeSmp:
    """With nothing to tell."""
    group: Any = SimpleNamespace(name="attempt")
    events: Any = SimpleNamespace(emit=pytest.fail)
    return NodeSmp(
        Config(smp_listen="127.0.0.1"), Topology(rank, PLACES, {"dp": 2}), group, events, ["machine"] * 2
    )  # fmt: skip


def test_a_port_is_known_before_there_is_an_smp_and_stays() -> None:
    """A later layout finds other nodes that know of it."""
    leader, other = of_rank(0), of_rank(1)
    pid, address, port = leader.report()
    assert (pid, address) == (os.getpid(), "127.0.0.1") and port
    assert leader.report().port == port
    assert other.report() == (os.getpid(), "", 0)
    leader.release()


def test_an_smp_that_starts_late_is_told_all_in_order_and_training_waits_at_its_end_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layout may follow another before the SMP has started."""
    told: list[Any] = []
    starts, has_started = iter([True]), threading.Event()

    def listening(*_: object) -> Any:
        assert not next(starts, False) or has_started.wait(20)
        return SimpleNamespace(configure=told.append)

    monkeypatch.setattr(NodeSmp, "_listening", listening)
    monkeypatch.setattr(node_smp, "Watch", lambda *_: SimpleNamespace(stop=lambda: None))
    smp = of_rank(0)
    reports = [smp.report(), of_rank(1).report()]

    def configure(name: str) -> int:
        holdings = [Holding(f"dp{rank}", "n0", "", name, "", 1, (), (0, ())) for rank in range(2)]
        return smp.configure(tmp_path, reports, holdings, [], {})

    digests = [configure("first"), configure("second")]
    assert smp._set_up is not None
    smp._set_up.join(0.2)
    assert smp._set_up.is_alive() and not told
    threading.Timer(0.1, has_started.set).start()
    smp.release()
    assert [one["places"]["1"]["arena"] for one in told] == ["first", "second"]
    assert digests == [guard_digest(one) for one in told] and all(digests)
