"""What a rank that leads its node has its SMP say."""

from __future__ import annotations

from typing import Any

import pytest

from ftckpt.config import Config
from ftckpt.errors import SmpError
from ftckpt.job import node_smp
from ftckpt.job.node_smp import NodeSmp
from ftckpt.model.topology import RankPlace, Topology


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
    topology = Topology(0, (RankPlace({"dp": 0}, "n0"),), {"dp": 1})
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
