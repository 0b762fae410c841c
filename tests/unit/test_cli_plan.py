"""``ftckpt plan``: the groups of a real start, numbers that follow from the size, errors that name the flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftckpt.commands.main import main
from ftckpt.commands.plan import BYTES_PER_PARAM, JobShape, build
from ftckpt.model.failures import FailureRecord
from ftckpt.parity.groups import slot_groups
from ftckpt.parity.modes import Modes, lessened
from ftckpt.persist.commit import claim
from ftckpt.persist.failures import tell_trained
from ftckpt.persist.storage import open_storage

SIZE = "--tp 8 --pp 8 --dp 8 --gpus-per-node 8 --params 34e9"


def planned(capsys: pytest.CaptureFixture[str], arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments.split(), "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def failures(value: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {row["lost"]: (row["cases"], row["survived"]) for row in value["failures"]}


def test_the_plan_of_a_large_job(capsys: pytest.CaptureFixture[str]) -> None:
    value = planned(capsys, f"{SIZE} --protect node,peer")
    assert (value["ranks"], value["nodes"], value["protect"], value["slots"]) == (512, 64, "node,peer", 4)
    state = 34e9 * BYTES_PER_PARAM / 64  # of a node
    memory = value["memory_per_node"]
    assert 4 * state < memory["slots"] < 4.3 * state
    assert 2 * 2 * state / 7 < memory["parity"] < 2 * 2 * state / 7 * 1.1  # two modes, two files, a seventh each
    assert state < value["network_bytes"]["node"] < 1.1 * state
    assert failures(value)["any two arenas"] == (512 * 511 // 2, 512 * 511 // 2)
    assert failures(value)["one node"] == (64, 64)
    assert failures(value)["any two nodes"] == (2016, 2016 - 8 * 28)  # eight groups of eight nodes


def test_the_text_says_what_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SIZE.split(), "--interval", "5"]) == 0
    text = capsys.readouterr().out
    for words in ("512 ranks on 64 nodes", "any two nodes", "12 bytes per parameter", "layernorms", "iteration of 5"):
        assert words in text
    assert "network limit: 0.781 GB/s each way (25% of 25 Gbit/s, assumed" in text
    assert main(["plan", *SIZE.split(), "--dtype", "fp32", "--protect", "none"]) == 0
    text = capsys.readouterr().out
    assert "network limit" not in text
    assert "fp32 weights" in text and "protect none, 2 slots" in text and "protected is" not in text


@pytest.mark.parametrize(("limit", "gbps"), [("2.5", 2.5), ("0", 0.0), ("auto", 25 / 8 / 4)])
def test_how_long_the_network_takes_at_the_least(capsys: pytest.CaptureFixture[str], limit: str, gbps: float) -> None:
    value = planned(capsys, f"{SIZE} --network-gbps {limit}")
    told, nbytes = value["network_limit"], value["network_bytes"]["node"]
    assert told["gbps"] == gbps and told["secs"] == pytest.approx(nbytes / gbps / 1e9 if gbps else 0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "node,peer"),
        ("--optimizer replicated", "node,replica,peer"),
        ("--optimizer replicated --protect copy", "copy"),
        ("--gpus-per-node 2", "peer"),
        ("--gpus-per-node 512", "node"),
    ],
)
def test_auto_is_what_a_start_would_choose(capsys: pytest.CaptureFixture[str], arguments: str, expected: str) -> None:
    assert planned(capsys, f"{SIZE} {arguments}")["protect"] == expected


def test_a_limit_of_memory_takes_a_slot_and_then_says_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    most = planned(capsys, f"{SIZE} --protect node,peer")["memory_per_node"]["sum"] / 2**30
    value = planned(capsys, f"{SIZE} --protect node,peer --memory-limit {most - 1}")
    assert value["slots"] == 3 and value["memory_per_node"]["sum"] < (most - 1) * 2**30
    assert main(["plan", *f"{SIZE} --protect node,peer --memory-limit 10".split()]) != 0
    text = capsys.readouterr().err
    assert all(
        word in text for word in ("--memory-limit: node", "needs", "slots", "parity", "raise --memory-limit")
    ), text


def test_a_limit_of_memory_gives_up_parity_inside_nodes_unless_it_was_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def sum_of(protect: str) -> float:
        return float(planned(capsys, f"{SIZE} --protect {protect} --slots 3")["memory_per_node"]["sum"]) / 2**30

    most, least = sum_of("node,peer"), sum_of("peer")
    for limit, protect in ((most, "node,peer"), (least, "peer")):
        value = planned(capsys, f"{SIZE} --memory-limit {limit + 0.01}")
        assert (value["protect"], value["slots"]) == (protect, 3)
    for refused in (f"--memory-limit {least - 0.01}", f"--memory-limit {least + 0.01} --protect node,peer"):
        assert main(["plan", *f"{SIZE} {refused}".split()]) != 0


def test_only_parity_that_peers_stand_in_for_is_given_up() -> None:
    fewer = lessened(Modes(node=True, replica="copy", peer=True))
    assert fewer is not None and fewer.names == ("copy", "peer")
    for stays in (fewer, Modes(peer=True), Modes(node=True), Modes(node=True, replica="replica"), Modes()):
        assert lessened(stays) is None


def test_replicas_cost_parity_in_slots_and_no_network_but_packages(capsys: pytest.CaptureFixture[str]) -> None:
    value = planned(capsys, f"{SIZE} --optimizer replicated --protect replica --objects-mib 1")
    memory = value["memory_per_node"]
    share = 34e9 * BYTES_PER_PARAM / 64
    assert 4 * share / 7 < memory["in_slots"] < 4.6 * share / 7
    assert memory["parity"] == 0
    assert value["network_bytes"]["node"] < 0.01 * share
    assert failures(value)["one node"] == (64, 64)


def test_racks_are_kept_apart(capsys: pytest.CaptureFixture[str]) -> None:
    apart = planned(capsys, f"{SIZE} --protect peer --racks 8")
    assert failures(apart)["one rack"] == (8, 8)
    same = planned(capsys, f"{SIZE} --protect peer --nodes-per-rack 8")
    assert failures(same) == failures(apart)
    alone = planned(capsys, f"{SIZE} --protect peer --racks 1")
    assert failures(alone)["one rack"] == (1, 0)


def test_more_losses_survive_more_and_cost_more(capsys: pytest.CaptureFixture[str]) -> None:
    one = planned(capsys, f"{SIZE} --protect peer")
    two = planned(capsys, f"{SIZE} --protect peer --peer-code rs --peer-losses 2")
    assert failures(one)["any two nodes"][1] < failures(two)["any two nodes"][1] == 2016
    assert 1.9 * one["network_bytes"]["job"] < two["network_bytes"]["job"]
    assert one["memory_per_node"]["parity"] < two["memory_per_node"]["parity"]


def test_experts_have_replica_sets_of_their_own() -> None:
    job = JobShape(2, 1, 8, 2, 4, 8, 1_000_000, 600_000, False, 0, 4096, 4096)
    sets = job.replica_sets()
    assert sorted({len(ranks) for ranks in sets}) == [2, 8]
    assert sum(sets.values()) == BYTES_PER_PARAM * 1_000_000
    held = build(job, Modes(replica="replica"))
    assert sum(sum(s.lengths) for h in held for s in h.sections if s.kind in ("private", "shared")) == sum(
        sets.values()
    )
    groups = slot_groups(held)
    assert {len(group.members) for group in groups} == {2}  # eight replicas of a pp and tp lie on two nodes
    for group in groups:
        assert len({member.node for member in group.members}) == 2


def test_a_small_job_with_nothing_to_guard_it(capsys: pytest.CaptureFixture[str]) -> None:
    value = planned(capsys, "--dp 2 --gpus-per-node 2 --params 1e6")
    assert value["protect"] == "none" and value["slots"] == 2
    assert failures(value)["one rank's arena"] == (2, 0)
    one = planned(capsys, "--gpus-per-node 1 --params 10")
    assert one["ranks"] == 1 and "any two arenas" not in failures(one)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--dp 8 --gpus-per-node 3 --params 1e9", "--gpus-per-node: 8 ranks"),
        ("--tp 0 --gpus-per-node 3 --params 1e9", "--tp: 0 is too small"),
        ("--dp 8 --gpus-per-node 8 --params 0", "--params: 0"),
        ("--dp 8 --gpus-per-node 8 --params nan", "--params: nan"),
        ("--dp 8 --gpus-per-node 8 --params 1e30", "--params: 1e+30"),
        ("--dp 8 --ep 3 --gpus-per-node 8 --params 1e9", "--ep: 3 does not divide"),
        ("--dp 8 --ep 2 --gpus-per-node 8 --params 1e9", "--ep: experts need --expert-params"),
        ("--dp 8 --expert-params 2e9 --gpus-per-node 8 --params 1e9", "--expert-params: 2e+09"),
        ("--dp 8 --gpus-per-node 8 --params 1e9 --protect peer", "protect: peer needs two nodes"),
        ("--dp 8 --gpus-per-node 1 --params 1e9 --protect node", "protect: node needs two ranks"),
        ("--dp 8 --gpus-per-node 1 --params 1e9 --protect replica", "protect: replica needs state"),
        ("--dp 8 --gpus-per-node 1 --params 1e9 --protect raid", "protect: 'raid'"),
        ("--dp 8 --gpus-per-node 1 --params 1e9 --peer-group 1", "--peer-group: a group of 1"),
        ("--dp 4 --gpus-per-node 1 --params 1e9 --peer-losses 4 --peer-code rs", "--peer-losses: 4 lost of a group"),
        ("--dp 4 --gpus-per-node 1 --params 1e9 --peer-losses 2", "--peer-losses: xor survives one"),
        ("--dp 8 --gpus-per-node 1 --params 1e9 --racks 3", "--racks: 8 nodes"),
        ("--dp 8 --gpus-per-node 1 --params 1e9 --racks 2 --nodes-per-rack 2", "give one of them"),
        ("--dp 1000000 --pp 1000 --gpus-per-node 8 --params 1e12", "are too many"),
        ("--dp 8 --params 1e9", "--gpus-per-node"),
    ],
)
def test_a_job_that_cannot_be_names_its_flag(capsys: pytest.CaptureFixture[str], arguments: str, text: str) -> None:
    assert main(["plan", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def intervals(value: dict[str, Any]) -> dict[str, int]:
    return {row["place"]: row["interval"] for row in value["cadence"]["intervals"]}


AUTO = f"{SIZE} --protect node,peer --interval auto --persist /there --persist-interval auto --iteration-secs 6"


def test_intervals_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    value = planned(capsys, f"{AUTO} --snapshot-cost-secs 0.3")
    found = intervals(value)
    # 0.3 s of 6 s, under 1 %; 8.5 s for the network are two iterations, but no more than those five.
    assert (found["memory"], found["protected memory"]) == (5, 5) and value["protected_every"] == 5
    assert value["cadence"]["overhead"] == pytest.approx(0.01, abs=0.001)
    rows = value["cadence"]["intervals"]
    assert value["cadence"]["lost"] == pytest.approx(sum(row["lost"] for row in rows))
    best, budget = value["cadence"]["best_interval"], value["cadence"]["best_overhead_budget"]
    told = planned(capsys, f"{AUTO} --snapshot-cost-secs 0.3 --overhead-budget {budget}")["cadence"]
    assert told["intervals"][0]["interval"] == best > 20
    assert told["overhead"] + told["lost"] < value["cadence"]["overhead"] + value["cadence"]["lost"]
    seldom = planned(capsys, f"{AUTO} --mtbf job=100000h")
    assert intervals(seldom)["storage"] > 10 * found["storage"]
    slow = planned(capsys, f"{AUTO} --network-gbps 0.1")
    assert intervals(slow)["protected memory"] == 12, "67 s for the network"


def test_how_old_the_newest_protected_snapshot_gets_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    """A node has 6.4 GB, of which an SMP makes 1.5 GB/s, and 64 cores."""
    job = f"{SIZE} --protect node --iteration-secs 1"

    def every(arguments: str) -> int:
        return int(planned(capsys, f"{job} {arguments}")["protected_every"])

    assert every("") == 5 and every("--protect-interval 1") == 5, "as long as one takes"
    assert every("--protect-interval 20") == 20
    assert every("--smp-cores 0.005") == 14, "4.25 s of a third of a core"
    assert every("--smp-cores 1e-6") == 60, "and one a minute at least"
    assert main(["plan", *job.split()]) == 0
    assert "protected is one iteration of 5; the newest is at most 10.2 s old" in capsys.readouterr().out
    assert main(["plan", *SIZE.split()]) == 0
    assert "protected is every iteration at most" in capsys.readouterr().out


def test_fixed_intervals_are_taken_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    value = planned(capsys, f"{SIZE} --interval 7 --persist /there --persist-interval 30 --iteration-secs 6")
    assert intervals(value) == {"memory": 7, "protected memory": 7, "storage": 30}


def test_where_memory_survives_no_node_storage_answers_that(capsys: pytest.CaptureFixture[str]) -> None:
    value = planned(capsys, AUTO.replace("node,peer", "node"))
    assert set(intervals(value)) == {"memory", "storage"}
    (storage,) = (row for row in value["cadence"]["intervals"] if row["place"] == "storage")
    assert storage["failures"].startswith("a node") and storage["mtbf_secs"] < 168 * 3600 / 2


def test_what_is_predicted_is_told_with_what_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *AUTO.split()]) == 0
    text = capsys.readouterr().out
    for words in ("a process lost each 115 h", "in all", "assumed: failures", "assumed: a flush takes"):
        assert words in text
    assert main(["plan", *SIZE.split(), "--interval", "auto"]) == 0
    text = capsys.readouterr().out
    assert "in all" not in text and "--iteration-secs" in text, "nothing is known of an iteration"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--iteration-secs 0", "--iteration-secs: 0 is not the length"),
        ("--iteration-secs nan", "--iteration-secs: nan"),
        ("--iteration-secs 1 --snapshot-cost-secs -1", "--snapshot-cost-secs: -1 is not a time"),
        ("--mtbf 5", "mtbf: '5' is not a mean time"),
        ("--interval often", "--interval"),
        ("--interval 0", "interval: 0 is too small"),
    ],
)
def test_what_cannot_be_predicted_names_its_flag(
    capsys: pytest.CaptureFixture[str], arguments: str, text: str
) -> None:
    assert main(["plan", *SIZE.split(), *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_failures_that_a_job_has_seen_count(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One job lost in a day of training, and nothing else; assumed is one in two days."""
    seen, storage = {"job": 1}, open_storage(str(tmp_path))
    options = [*AUTO.split(), "--mtbf", "job=48h", "--seen", str(tmp_path)]
    assert main(["plan", *options]) == 2 and "no job has told there" in capsys.readouterr().err
    assert main(["plan", *SIZE.split(), "--seen", str(tmp_path)]) == 2
    assert "--seen: give --iteration-secs, too" in capsys.readouterr().err
    claim(storage, "w", "job", FailureRecord("job", 2, "w", ("a",), (), 1000.0, 82_800.0, 82_800.0, seen))
    tell_trained(storage, "w", 4600.0)
    assert main(["plan", *options]) == 0
    text = capsys.readouterr().out
    assert "the whole job lost each 36 h" in text and "job 1 in 24 h seen, one in 48 h assumed: one in 36 h" in text
    assert main(["list", str(tmp_path)]) == 0
    told = "job job: failures before attempt 2: process 0, node 0, job 1; 24 h of training"
    assert told in capsys.readouterr().out
