"""A node is lost without replacement: the job resumes with fewer ranks, in another layout, from memory.

And with more again, once a node joins.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import jobs
from tests.support.launching import ITERATIONS, Nodes
from tests.support.pool import run_ranks
from tests.support.repository import ROOT

pytestmark = [pytest.mark.multiproc, pytest.mark.faults, pytest.mark.timeout(600)]

# No dropout, whose masks depend on the layout, and one tensor parallel size, on which the padding of the vocabulary
# depends: losses differ by no more than rounding.
MODEL = (
    *("--layers", "2", "--hidden", "32", "--seq", "32", "--global-batch", "8", "--micro-batch", "2"),
    *("--dropout", "0", "--lr-warmup", "2"),
)
SETTINGS = ("--ftckpt-chunk-size", "64KiB", "--ftckpt-objects-size", "1MiB", "--ftckpt-layouts", "tp2pp2,tp2pp1")
ROUNDING = 0.03
LAYOUTS = {4: "tp2pp2dp1", 2: "tp2pp1dp1"}


@functools.cache
def reference() -> list[float]:
    """Losses of a run in the first layout."""
    words = [*MODEL, "--tp", "2", "--pp", "2", "--iterations", str(ITERATIONS)]
    return [loss for loss in run_ranks(jobs.losses, 4, words)[-1].value if loss is not None]


@pytest.fixture
def nodes(tmp_path: Path, arena_root: Path) -> Iterator[Nodes]:
    digests = ("--log-digest", str(tmp_path / "digests.jsonl"))
    script = str(ROOT / "launch" / "train_gpt.py")
    job = Nodes(tmp_path, arena_root, [script, *MODEL, *digests, *SETTINGS], count=2, nproc=2)
    yield job
    job.stop()


def start(nodes: Nodes, node: str, address: str) -> None:
    """The time in which a second node must join is long enough for both to start, and passes once more without it."""
    calm = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=5"
    nodes.start_node(node, address, "--nodes", "1:2", "--runner", "ftckpt.megatron", "--rdzv-conf", calm)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def world(nodes: Nodes) -> int:
    """Ranks that train."""
    joined = {event["pid"] for rank in range(4) for event in nodes.events(rank, "joined")}
    return len(joined & set(nodes.pids()))


def came_back(nodes: Nodes, since: float, ranks: int) -> dict[str, Any]:
    """Waits for a restart from memory on so many ranks; the digest that it logged."""

    def restored() -> Any:
        events = [nodes.events(rank, "restored") for rank in range(4)]
        return sum(any(e["iteration"] and e["time"] > since for e in each) for each in events) == ranks

    nodes.wait_for(f"restart on {ranks} ranks", restored)
    path = nodes.here / "digests.jsonl"
    return nodes.wait_for("digest", lambda: [line for line in lines(path) if line["restored"]][-1:])[0]


def check_same_state(nodes: Nodes, told: dict[str, Any]) -> None:
    """The restored state is, bit for bit, that of the last attempt at that iteration."""
    before = [
        line["digest"]
        for line in lines(nodes.here / "digests.jsonl")
        if line["iteration"] == told["iteration"] and not line["restored"]
    ]
    assert before, f"iteration {told['iteration']} was never trained"
    last = before[-1]  # an attempt may have trained it before, in another layout
    differing = [key for key in last if last[key] != told["digest"].get(key)]
    assert not differing and told["digest"].keys() == last.keys(), f"differ: {differing[:5]}"
    assert len({key.partition("/")[0] for key in last}) >= 4, "weights, masters and two moments"


def check_told(nodes: Nodes, before: int, now: int) -> None:
    told = nodes.events(0, "loaded")[-1]
    assert (told["from"], told["to"]) == (LAYOUTS[before], LAYOUTS[now])
    assert f"layout {LAYOUTS[now]} for {now} ranks" in nodes.output(100_000)


@pytest.mark.slow
def test_a_node_is_lost_for_good(nodes: Nodes) -> None:
    start(nodes, "a", "127.0.0.2")
    start(nodes, "b", "127.0.0.3")
    nodes.wait_for("protected snapshots", lambda: [n for n in nodes.protected() if n >= 6])
    assert world(nodes) == 4
    protected = nodes.protected()[-1]
    lost_at = time.time()
    lost = nodes.lose("b")
    told = came_back(nodes, lost_at, 2)
    assert told["iteration"] >= protected
    nodes.finish()
    assert len(lost) == 2 and nodes.rebuilt().keys() == lost
    check_told(nodes, 4, 2)
    check_same_state(nodes, told)
    rows = lines(nodes.log)
    assert sorted({row["iteration"] for row in rows}) == list(range(1, ITERATIONS + 1))
    off = {row["iteration"]: abs(row["loss"] - reference()[row["iteration"] - 1]) for row in rows}
    assert max(off.values()) < ROUNDING, off
    assert reference()[0] - rows[-1]["loss"] > 10 * ROUNDING, "it learns, so that a wrong state would show"
    nodes.check_nothing_left()


@pytest.mark.slow
def test_a_node_that_joins_makes_it_larger_again(nodes: Nodes) -> None:
    nodes.common += ["--iterations", "100000"]
    start(nodes, "a", "127.0.0.2")
    nodes.wait_for("snapshots of two ranks", lambda: nodes.events(1, "snapshot")[5:])
    assert world(nodes) == 2
    joined_at = time.time()
    start(nodes, "b", "127.0.0.3")
    told = came_back(nodes, joined_at, 4)
    check_told(nodes, 2, 4)
    check_same_state(nodes, told)
    protected = nodes.wait_for("protection on two nodes", lambda: nodes.protected(joined_at))[-1]
    assert protected > told["iteration"]
    lost_at = time.time()
    nodes.lose("b")
    check_same_state(nodes, came_back(nodes, lost_at, 2))
    check_told(nodes, 4, 2)
