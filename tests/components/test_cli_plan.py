"""``ftckpt plan``: the groups of a real start, numbers that follow from the size, errors that name the flag."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ftckpt.cli.main import main
from ftckpt.cli.plan_holdings import build
from ftckpt.cli.plan_job import JobShape, StatePartition
from ftckpt.parity.groups import slot_groups
from ftckpt.parity.modes import Modes
from tests.support.errors import lacks
from tests.support.repository import is_golden

TWO_ARENAS = "any two arenas"
ONE_NODE, TWO_NODES = "one node", "any two nodes"
ONE_RACK = "one rack"

BYTES_PER_PARAM = 12
SIZE = "--tp 8 --pp 8 --dp 8 --gpus-per-node 8 --params 34e9"


def planned(capsys: pytest.CaptureFixture[str], arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments.split(), "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def printed(capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    assert main(["plan", *arguments.split()]) == 0
    return capsys.readouterr().out


def failures(value: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {row["lost"]: (row["cases"], row["survived"]) for row in value["failures"]}


def test_the_plan_of_a_large_job(capsys: pytest.CaptureFixture[str]) -> None:
    value = planned(capsys, f"{SIZE} --protect node,peer")
    assert (value["ranks"], value["nodes"], value["protect"], value["slots"]) == (512, 64, "node,peer", 3)
    state = 34e9 * BYTES_PER_PARAM / 64  # of a node
    memory = value["memory_per_node"]
    assert 3 * state < memory["slots"] < 3.3 * state
    assert 2 * 2 * state / 7 < memory["parity"] < 2 * 2 * state / 7 * 1.1  # two modes, two files, a seventh each
    assert state < value["network_bytes"]["node"] < 1.1 * state
    assert failures(value)[TWO_ARENAS] == (512 * 511 // 2, 512 * 511 // 2)
    assert failures(value)[ONE_NODE] == (64, 64)
    assert failures(value)[TWO_NODES] == (2016, 2016 - 8 * 28)  # eight groups of eight nodes


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


def test_racks_are_kept_apart(capsys: pytest.CaptureFixture[str]) -> None:
    apart = planned(capsys, f"{SIZE} --protect peer --nodes-per-rack 8")
    assert failures(apart)[ONE_RACK] == (8, 8)
    alone = planned(capsys, f"{SIZE} --protect peer --nodes-per-rack 64")
    assert failures(alone)[ONE_RACK] == (1, 0)


def shape(**sizes: int) -> JobShape:
    """A million parameters, 600,000 of them in experts, that all data-parallel ranks hold alike."""
    layout = {"tp": 2, "cp": 1, "dp": 8, "pp": 2, "ep": 4, "etp": 2, **sizes}
    holders = StatePartition("", 0, BYTES_PER_PARAM, "")
    return JobShape(
        **layout, gpus_per_node=8, params=1_000_000, expert_params=600_000, holders=holders, nodes_per_rack=0,
        chunk_bytes=4096, objects_bytes=4096,
    )  # fmt: skip


def test_experts_have_replica_sets_of_their_own() -> None:
    job = shape()
    sets = job.replica_sets
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


def test_what_is_next_to_nothing_beside_the_experts_of_a_rank_each_rank_copies_itself() -> None:
    job = replace(shape(dp=4, pp=1, ep=4, etp=2), gpus_per_node=4)
    small = replace(job, expert_params=999_000)
    assert not job.small_sets and {len(ranks) for ranks in small.small_sets} == {4}
    held = build(small, Modes(replica="replica"))
    assert not slot_groups(held) and slot_groups(build(job, Modes(replica="replica")))
    dense = {sum(map(sum, (s.lengths for s in one.sections))) - 999_000 * BYTES_PER_PARAM // 8 for one in held}
    assert dense == {1_000 * BYTES_PER_PARAM // 2}


def test_a_mode_of_several_that_a_job_cannot_have_is_left_out_as_at_a_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    value = planned(capsys, f"{SIZE} --protect replica,peer")
    assert value["protect"] == "peer" and value["left_out"][0]
    assert not lacks(printed(capsys, f"{SIZE} --protect replica,peer"), "--protect")


EIGHT = "--tp 8 --dp 8 --gpus-per-node 8 --params 4.25e9"
"""A node has as much, and groups are as large, as in ``SIZE``."""
NODES = f"{EIGHT} --network-rate 2.5GB/s"


def answer(capsys: pytest.CaptureFixture[str], arguments: str) -> tuple[str, dict[str, Any]]:
    """The line, and the same as JSON with the status of the line."""
    status = main(["plan", *arguments.split()])
    line = capsys.readouterr().out.splitlines()[0]
    assert main(["plan", *arguments.split(), "--json"]) == status
    value: dict[str, Any] = json.loads(capsys.readouterr().out)["verdict"]
    assert line.partition(":")[0] == value["answer"] == ("no" if status else "yes") and status in (0, 1)
    return line, value


def test_what_fits_a_node_is_answered_with_yes(capsys: pytest.CaptureFixture[str]) -> None:
    line, value = answer(capsys, f"{NODES} --node-memory 512GiB")
    assert not lacks(line, "yes", "21.6 GiB", "512.0 GiB", "3")
    assert value["need"]["sum"] == planned(capsys, NODES)["memory_per_node"]["sum"] and value["faults"] == []


def test_what_does_not_fit_names_the_setting_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    def sum_of(arguments: str) -> float:
        return float(planned(capsys, f"{EIGHT} {arguments}")["memory_per_node"]["sum"])

    peer, none = sum_of("--protect peer --slots 3"), sum_of("--protect none")
    line, value = answer(capsys, f"{NODES} --node-memory {peer + 1:.0f}B")
    assert not lacks(line, "no", "--protect")
    assert value["slots"] == 3 and value["need"]["sum"] > peer + 1
    assert printed(capsys, f"{NODES} --node-memory {peer + 1:.0f}B --protect peer").startswith("yes: ")
    line, _ = answer(capsys, f"{NODES} --node-memory {none - 1:.0f}B")
    assert line
    line, _ = answer(capsys, f"{NODES} --protect peer --slots 5 --node-memory {peer + 1:.0f}B")
    assert "--slots 3 needs" in line


_SETTINGS = re.compile(r"((?:--[a-z-]+ \S+ )+)needs ")
_MEMORY = re.compile(r"more ranks, or nodes with ([0-9.]+) (\S+)(?: with (--.+))?, the smallest need of any setting")


def remedied(remedy: str) -> str:
    """Options that follow a remedy; a size is printed with one digit."""
    if remedy.startswith("--network-rate"):
        return f"{remedy} "
    if found := _SETTINGS.match(remedy):
        return found[1]
    found = _MEMORY.fullmatch(remedy)
    assert found is not None, remedy
    return f"--node-memory {float(found[1]) + 0.1:.1f}{found[2]} {found[3] or ''} "


def test_remedies_that_are_named_always_make_it_yes(capsys: pytest.CaptureFixture[str]) -> None:
    draw, answered = random.Random(8), Counter[str]()
    while sum(answered.values()) < 40:
        job = " ".join(
            (
                f"--tp {draw.choice((1, 2))} --pp {draw.choice((1, 2))} --dp {draw.choice((8, 12))} --params 1e9",
                f"--gpus-per-node {draw.choice((1, 2, 4))} --optimizer {draw.choice(('distributed', 'replicated'))}",
                f"--slots {draw.choice((0, 4, 5, 7))} {draw.choice(('', '--persist /there'))}",
                draw.choice(("", "--network-rate 20MB/s", "--network-rate 1MB/s --mtbf 60s")),
                draw.choice(("", "--protect none", "--protect peer")),
            )
        )
        room = draw.uniform(0.2, 1) * planned(capsys, job)["memory_per_node"]["sum"]
        main(["plan", *job.split(), "--node-memory", f"{room:.0f}B", "--json"])
        faults = json.loads(capsys.readouterr().out)["verdict"]["faults"]
        settings = "".join(remedied(fault["remedy"]) for fault in faults)
        answered[" ".join(word for word in settings.split() if word.startswith("--"))] += 1
        status = main(["plan", *f"{job} --node-memory {room:.0f}B {settings}".split()])
        told = capsys.readouterr()
        assert status == 0, (job, room, faults, told)
    assert {"--slots", "--protect", "--protect --slots", "--node-memory --protect --slots"} <= set(answered), answered
    assert any("--network-rate" in one for one in answered), answered


def test_what_cannot_be_protected_before_a_failure_is_answered_with_no(capsys: pytest.CaptureFixture[str]) -> None:
    """66 s for the network, which is nothing against a week."""
    job = f"{EIGHT} --node-memory 512GiB --network-rate"
    assert answer(capsys, f"{job} 100MB/s")[0].startswith("yes")
    line, value = answer(capsys, f"{job} 10kB/s")
    assert not lacks(line, "185 h", "168 h")
    [fault] = value["faults"]
    assert answer(capsys, f"{job} {fault['remedy'].split()[1]}")[0].startswith("yes")
    assert printed(capsys, f"{EIGHT} --network-rate 10kB/s")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--dp 8 --gpus-per-node 16 --params 1e9", "--gpus-per-node 16 8"),
        ("--nodes 2 --tp 3 --gpus-per-node 8 --params 1e9", "2 8 16 3"),
        ("--nodes 2 --dp 8 --gpus-per-node 8 --params 1e9", "8 --dp 16"),
        ("--nodes 2 --tp 3 --gpus-per-node 8 --params 1e9", "2 8 16 3"),
        ("--gpus-per-node 8 --params 34x", "--params 34x 34b 750m 1.5t 34e9"),
        ("--tp 2 --dp 4 --ep 3 --etp 1 --gpus-per-node 8 --params 1e9 --expert-params 1e8", "3"),
        ("--dp 8 --gpus-per-node 8 --params 1e9 --zero 1 --fsdp", "--fsdp --zero"),
        ("--dp 4 --pp 2 --gpus-per-node 8 --params 1e9 --zero 2", "--pp 2"),
        ("--dp 4 --pp 2 --gpus-per-node 8 --params 1e9 --fsdp", "--pp 2 --fsdp"),
        ("--dp 8 --gpus-per-node 8 --params 1e9 --fsdp-replicas 2", "--fsdp-replicas --fsdp"),
        ("--dp 8 --gpus-per-node 4 --params 1e9 --slots 2", "--slots 2"),
        ("--dp 8 --gpus-per-node 4 --params 1e9 --node-memory 5parsec", "--node-memory 5parsec"),
        (
            "--dp 8 --gpus-per-node 4 --params 1e9 --node-memory 5GiB --memory-limit 6GiB",
            "--memory-limit 6GiB --node-memory",
        ),
        ("--dp 8 --gpus-per-node 4 --params 1e9 --persist foo:bar", "--persist foo:bar"),
        ("--dp 8 --gpus-per-node 3 --params 1e9", "--gpus-per-node 8"),
        ("--dp 8 --ep 3 --gpus-per-node 8 --params 1e9", "--ep 3"),
        ("--dp 8 --expert-params 2e9 --gpus-per-node 8 --params 1e9", "--expert-params 2e+09"),
        ("--dp 8 --gpus-per-node 8 --params 1e9 --protect peer", "protect"),
        ("--dp 8 --gpus-per-node 1 --params 1e9 --peer-group 1", "--peer-group 1"),
        ("--dp 8 --params 1e9", "--gpus-per-node"),
    ],
)
def test_a_job_that_cannot_be_names_its_flag(capsys: pytest.CaptureFixture[str], arguments: str, text: str) -> None:
    assert main(["plan", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert not lacks(error, *text.split()) and error.count("\n") == 1


def test_how_often_snapshots_go_to_storage_follows_from_mtbf_and_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """A node writes 6.4 GB, which is assumed to cost a hundredth of the time that it takes."""
    value = planned(capsys, f"{SIZE} --mtbf 40h")
    node_bytes = value["state"]["copied_bytes"] * 8
    assert value["persist_interval_secs"] == pytest.approx((2 * 0.01 * node_bytes / 1e9 * 40 * 3600) ** 0.5)
    slow = planned(capsys, f"{SIZE} --mtbf 40h --persist-rate 1MB/s")
    assert slow["persist_interval_secs"] == pytest.approx(2 * node_bytes / 1e6), "storage rests as long as it works"
    assert planned(capsys, SIZE)["persist_interval_secs"] > value["persist_interval_secs"]
    assert not lacks(printed(capsys, SIZE), "115 h", "--mtbf")


def test_the_text_says_what_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    is_golden("plan", printed(capsys, f"{SIZE} --persist /there"))
    unprotected = printed(capsys, f"{SIZE} --dtype fp32 --protect none")
    assert "none (not: node00)" in unprotected and "assumed: 12 bytes per parameter: fp32 weights" in unprotected
