"""Protection as a job sees it: real ranks, real SMPs, protected snapshots, and every loss of small jobs."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.campaign_damage import survey
from benchmarks.campaign_job import Ended, Plan, Trouble, train
from ftckpt.memory.directory import SMP_LOCK_NAME, clean_job, end_smp
from ftckpt.memory.locks import holder_of
from ftckpt.parity.modes import resolve_modes
from tests.support.event_logs import read_events
from tests.support.pool import RankFailure, RankGroup, run_ranks, spawn_ranks
from tests.support.tiers import by_default
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

ENDLESS = 100_000


@pytest.fixture
def plan(settings: dict[str, Any], arena_root: Path, tmp_path: Path) -> Iterator[Plan]:
    """Three ranks of one node, protected by its own parity."""
    settings |= {
        "protect": "node",
        "chunk_size": "64KiB",
        "objects_size": "1MiB",
        "schedule": "thread",
        "on_error": "raise",
    }
    (tmp_path / "progress").mkdir()
    yield Plan(settings, ["n0"] * 3, 30, tmp_path / "progress")
    clean_job(arena_root, "test")


def folder(plan: Plan) -> Path:
    return Path(plan.settings["arena"]) / f"ftckpt-{plan.settings['job']}"


def smp_pid(plan: Plan, node: str = "n0") -> int:
    lock = folder(plan) / node / SMP_LOCK_NAME
    return (holder_of(lock) if lock.exists() else None) or 0


def told(plan: Plan, rank: int = 0) -> list[dict[str, Any]]:
    return read_events(Path(plan.settings["events"]), of=f"rank{rank}")


def names(plan: Plan) -> list[str]:
    return [event["event"] for event in told(plan)]


def iteration(plan: Plan) -> int:
    """The iteration that all ranks have trained; a file that is being written is empty for a moment."""
    while "" in (texts := [file.read_text() for file in plan.progress.iterdir()]):
        pass
    return min(map(int, texts), default=0)


def moved(plan: Plan, by: int) -> None:
    goal = iteration(plan) + by
    until(lambda: iteration(plan) >= goal)


def test_snapshots_become_protected_and_nothing_is_left_at_the_end(plan: Plan) -> None:
    ended = [result.value for result in run_ranks(train, 3, replace(plan, protected=3))]
    assert ended == [Ended(None, ())] * 3
    protected = [event["iteration"] for event in told(plan) if event["event"] == "protected"]
    assert protected == sorted(protected) and len(protected) >= 3
    assert not {"smp_error", "not_protected", "snapshot_error"} & set(names(plan))
    assert not folder(plan).exists()
    (report,) = [event for event in told(plan) if event["event"] == "protection"]
    arenas = {row["lost"]: row["survived"] for row in report["failures"]}
    assert arenas["one rank's arena"] == 3 and arenas["one node"] == 0


@pytest.mark.parametrize("slots", [0, 4])
def test_protection_that_takes_many_iterations_costs_snapshots_unless_a_fourth_slot_was_asked_for(
    plan: Plan, slots: int
) -> None:
    """One is protected after the other, however many are left out."""
    slow = {"smp_rate": "8MB/s", "slots": slots, "protect_timeout_secs": 60.0}
    run_ranks(train, 3, replace(plan, protected=4, settings={**plan.settings, **slow}))
    for rank in range(3):
        seen = told(plan, rank)
        done = [event for event in seen if event["event"] == "protected"]
        assert len(done) >= 4 and "not_protected" not in {event["event"] for event in seen}
        between = [e for e in seen if done[0]["time"] < e["time"] <= done[3]["time"]]
        taken, left_out = (sum(e["event"] == name for e in between) for name in ("snapshot", "skipped"))
        assert taken + left_out > 12, "one takes many iterations"
        assert not left_out if slots else left_out > taken
        # As quick as one can be: what it takes of the cores is little.
        assert done[3]["time"] - done[0]["time"] < 1.5 * sum(event["secs"] for event in done[1:4])


def test_a_frozen_smp_degrades_protection_and_never_training(plan: Plan) -> None:
    plan = replace(plan, iterations=ENDLESS, settings={**plan.settings, "protect_timeout_secs": 1.0})
    with spawn_ranks(train, 3, plan) as ranks:
        until(lambda: "protected" in names(plan))
        os.kill(smp_pid(plan), signal.SIGSTOP)
        try:
            moved(plan, 20)
            until(lambda: "not_protected" in names(plan))
            before = sum(name == "snapshot" for name in names(plan))
            moved(plan, 20)
            assert sum(name == "snapshot" for name in names(plan)) >= before + 10, "snapshots go on unprotected"
        finally:
            os.kill(smp_pid(plan), signal.SIGCONT)
        again = len(told(plan))
        until(lambda: "protected" in [event["event"] for event in told(plan)[again:]])
        assert ranks.alive() == [0, 1, 2]


def test_a_killed_smp_is_followed_by_another_and_training_does_not_notice(plan: Plan) -> None:
    with spawn_ranks(train, 3, replace(plan, iterations=ENDLESS)) as ranks:
        until(lambda: "protected" in names(plan))
        dead = smp_pid(plan)
        os.kill(dead, signal.SIGKILL)
        until(lambda: smp_pid(plan) not in (0, dead))
        again = len(told(plan))
        until(lambda: "protected" in [event["event"] for event in told(plan)[again:]])
        assert ranks.alive() == [0, 1, 2] and "snapshot_error" not in names(plan)


def test_what_replicas_copy_from_then_on_is_protected(plan: Plan) -> None:
    """One rank drifts: its share moves into new arenas, whose parity is made from nothing."""
    run_ranks(train, 3, replace(plan, trouble=Trouble("drift", 8, 1, "flip"), protected=8))
    changed = [event["time"] for event in told(plan) if event["event"] == "plan"][-1]
    protected = [
        event["iteration"] for event in told(plan) if event["event"] == "protected" and event["time"] > changed
    ]
    assert names(plan).count("plan") == 2 and protected and max(protected) > 8


def lost_sets(nodes: Sequence[str]) -> list[tuple[set[str], set[str]]]:
    """Every set of arenas of a job on one node, or every set of nodes but all of them."""
    if len(set(nodes)) == 1:
        shards = [f"dp{rank}" for rank in range(len(nodes))]
        return [(set(lost), set()) for n in range(len(nodes) + 1) for lost in itertools.combinations(shards, n)]
    names = sorted(set(nodes))
    return [(set(), set(lost)) for n in range(1, len(names)) for lost in itertools.combinations(names, n)]


def train_until_protected(ranks: RankGroup, plan: Plan) -> None:
    until(lambda: names(plan).count("protected") >= 2)
    for rank in range(len(plan.nodes)):
        ranks.kill(rank)


def kept(plan: Plan, root: Path, number: int) -> Plan:
    """A copy of the job's memory, for a restart that may spoil it."""
    copy = root / str(number)
    shutil.copytree(folder(plan), copy / folder(plan).name, ignore=shutil.ignore_patterns("smp*", ".pulse"))
    return replace(plan, iterations=1, settings={**plan.settings, "arena": str(copy), "protect": "none", "slots": 3})


@pytest.mark.parametrize(
    ("protect", "nodes"),
    by_default(
        [("node", "aaa"), ("peer", "aabb"), ("replica,peer", "abc"), ("copy,peer", "abc")],
        [("node", "aaa"), ("replica,peer", "abc")],
    ),
)
def test_every_loss_of_a_small_job_is_survived_if_and_only_if_the_table_says_so(
    plan: Plan, protect: str, nodes: str
) -> None:
    plan = replace(plan, nodes=list(nodes), iterations=ENDLESS, settings={**plan.settings, "protect": protect})
    modes = resolve_modes(protect, nodes, len(set(nodes)) > 1)
    with spawn_ranks(train, len(nodes), plan) as ranks:
        train_until_protected(ranks, plan)
    for node in set(nodes):
        assert end_smp(folder(plan) / node, 20)
    outcomes = {}
    for number, (shards, lost_nodes) in enumerate(lost_sets(nodes)):
        again = kept(plan, folder(plan).parent / "copies", number)
        memory = survey(folder(again), modes)
        memory.lost_shards, memory.lost_nodes = set(shards), set(lost_nodes)
        on_lost = {holding.shard for holding in memory.holdings if holding.node in lost_nodes}
        for path in memory.folder.glob("*/dp*"):
            if path.name.partition(".")[0] in shards | on_lost:
                shutil.rmtree(path)
        for node in lost_nodes:
            shutil.rmtree(memory.folder / node)
        memory.lost_shards |= on_lost
        outcomes[frozenset(shards | lost_nodes)] = check_restart(again, memory)
        shutil.rmtree(again.settings["arena"])
    assert set(outcomes.values()) == {True, False}, "both kinds of losses were tried"


def check_restart(plan: Plan, memory: Any) -> bool:
    """Whether it was restored, which must be as promised."""
    promise = memory.promise
    results = run_ranks(train, len(plan.nodes), plan, expect_failures=True, grace_secs=20)
    if promise is None:
        assert all(not result.ok and "LostError" in (result.error or "") for result in results)
        lost = memory.lost_shards
        assert any(shard in (results[0].error or "") for shard in lost), results[0].error
        return False
    assert all(result.ok for result in results), [result.error for result in results]
    assert all(result.value.start >= promise and not result.value.wrong for result in results)
    return True


@pytest.mark.parametrize(
    ("changes", "nodes", "text"),
    [
        ({"protect": "peer"}, "aaa", "protect: peer needs two nodes or more"),
        ({"secret_file": "/nowhere/secret"}, "aaa", "--ftckpt-secret-file: /nowhere/secret cannot be read"),
        ({"smp_listen": "192.0.2.1"}, "aaa", "--ftckpt-smp-listen: '192.0.2.1' cannot be listened at here"),
    ],
)
def test_what_cannot_work_is_an_error_at_start_on_all_ranks(
    plan: Plan, changes: dict[str, Any], nodes: Sequence[str], text: str
) -> None:
    plan = replace(plan, nodes=list(nodes), settings={**plan.settings, **changes})
    results = run_ranks(train, 3, plan, expect_failures=True, grace_secs=10)
    for result in results:
        assert result.error is not None and "ConfigError" in result.error and text in result.error


@pytest.mark.slow
def test_a_limit_of_memory_counts_parity_and_packages(plan: Plan) -> None:
    plan = replace(
        plan, nodes=["n0"] * 3 + ["n1"] * 3, settings={**plan.settings, "protect": "node,replica,peer", "slots": 3}
    )
    run_ranks(train, 6, replace(plan, iterations=3))
    (table,) = [event for event in told(plan) if event["event"] == "protection"]
    sums = table["memory_per_node"]
    limited = {**plan.settings, "slots": 0, "memory_limit": f"{sums['sum'] - sums['parity'] // 4}B"}
    with pytest.raises(RankFailure, match=r"MemoryBudgetError: rank 0: --ftckpt-memory-limit: .*--ftckpt-protect"):
        run_ranks(train, 6, replace(plan, settings=limited))


def test_the_limit_of_the_network_is_told_and_said_to_be_too_little_where_it_is(plan: Plan) -> None:
    changes = {"protect": "peer", "network_rate": "1kB/s", "mtbf": "1s"}
    run_ranks(train, 2, replace(plan, nodes=["n0", "n1"], iterations=3, settings={**plan.settings, **changes}))
    for rank in range(2):
        [slow] = [event for event in told(plan, rank) if event["event"] == "protection_slow"]
        assert "1kB/s each way (as set)" in slow["reason"] and slow["secs"] > 1.0
