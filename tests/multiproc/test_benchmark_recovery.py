"""The benchmark of recovery runs and resumes, names launchers that are not there, and its goals can be missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recovery
from benchmarks.recovery import OURS, USUAL
from benchmarks.recovery_run import LAUNCHERS, PARTS, Rank, parts_of

pytestmark = pytest.mark.multiproc

TORCHRUN = "torchrun, memory"


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    (tmp_path / "disk").mkdir()
    return ["--quick", "--json", str(tmp_path / "result.json"), "--disk", str(tmp_path / "disk")]


def result(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    return found


@pytest.mark.slow
def test_a_quick_run(argv: list[str], tmp_path: Path) -> None:
    assert recovery.main([*argv, "--rows", USUAL, TORCHRUN]) == 0
    found = result(tmp_path)
    assert {"hardware", "versions", "command", "date", "revision"} <= found["environment"].keys()
    assert not [block["error"] for block in found["blocks"] if "error" in block]
    for block in found["blocks"]:
        back = block["faults"]["rank"]
        assert back["source"] == ("storage" if block["row"] == USUAL else "memory")
        assert back["lost"] <= 10 and back["starts"] == 1
        assert sum(back["parts"].values()) == pytest.approx(back["secs"])
        assert all(back["parts"][part] > 0 for part in ("detect", "import", "build", "load", "step"))
    assert not list((tmp_path / "disk").iterdir())


def rank(at: float, groups_secs: float = 0.5) -> Rank:
    """What a rank notes that comes to each place a second after the one before."""
    names = ("process", "imported", "rendezvous", "built", "decided", "loaded", "first step")
    notes = {name: {"time": at + place} for place, name in enumerate(names)}
    notes["built"]["groups_secs"] = groups_secs
    return Rank(1, notes)


def test_a_part_ends_with_the_last_rank_and_the_parts_are_the_whole() -> None:
    parts = parts_of(10.0, 10.2, 11.0, [rank(12.0), rank(12.5)])
    assert parts == {
        "detect": 0.2, "teardown": 0.8, "regroup": 1.0, "start": 0.5, "import": 1.0, "rendezvous": 1.0,
        "groups": 0.5, "build": 0.5, "decide": 1.0, "load": 1.0, "step": 1.0,
    }  # fmt: skip
    assert tuple(parts) == PARTS and sum(parts.values()) == pytest.approx(12.5 + 6 - 10)
    # Processes that were there before the kill, and a launcher that tells nothing.
    parts = parts_of(10.0, 0.0, 10.5, [rank(9.0)])
    assert parts["detect"] == 0 and parts["teardown"] == 0.5 and parts["start"] == parts["import"] == 0
    assert sum(parts.values()) == pytest.approx(5.0)


def block_of(secs: float, **parts: float) -> dict[str, Any]:
    """A way back that takes most of its time in one part."""
    each = {**dict.fromkeys(PARTS, 0.01), "step": 0.3, "groups": 0.2, "build": 0.1, **parts}
    return {"faults": {"rank": {"secs": secs, "parts": each, "lost": 1, "starts": 1, "source": "memory"}}}


def test_a_run_that_was_ended_resumes_and_a_launcher_that_is_not_there_is_a_row(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Any] = []

    def run(plan: recovery.Plan, *_: Any) -> dict[str, Any]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(plan)
        return block_of(1.0) if plan.row == USUAL else {"error": "for once"}

    monkeypatch.setattr(recovery, "run_block", run)
    monkeypatch.setitem(
        LAUNCHERS, "ft_launcher", LAUNCHERS["ft_launcher"]._replace(needs="not_there.at_all", package="not-there")
    )
    rows = [*argv, "--repeats", "2", "--rows", USUAL, TORCHRUN, "ft_launcher, memory"]
    with pytest.raises(KeyboardInterrupt):
        recovery.main(rows)
    first, done[:] = [*done], []
    monkeypatch.setattr(recovery, "run_block", lambda plan, *_: done.append(plan) or block_of(1.0))
    assert recovery.main(rows) == 0
    plans = recovery.plans_of(["megatron"], 2, [USUAL, TORCHRUN])
    assert {plan for plan in plans if plan not in first or plan.row == TORCHRUN} == {*done}
    assert {plan.row for plan in recovery.plans_of(["fsdp2"], 1, list(recovery.ROWS))} == {USUAL, OURS}
    found = result(tmp_path)
    assert len(found["blocks"]) == len(plans) == 4
    assert found["not_run"].keys() == {"ft_launcher, memory"} and "not-there" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"result\.json"):  # other faults in the same file
        recovery.main([*rows, "--faults", "all"])


def test_figures_are_medians() -> None:
    blocks = [
        {"job": "megatron", "row": OURS, "repeat": repeat, **block_of(secs, load=secs / 10)}
        for repeat, secs in enumerate((1.0, 3.0, 2.0))
    ]
    found = recovery.figures_of(blocks, "megatron", "rank", OURS)
    assert (found["quarter"], found["secs"], found["three_quarters"]) == (1.5, 2.0, 2.5)
    assert found["parts"]["load"] == pytest.approx(0.2) and found["lost"] == 1
    assert recovery.figures_of(blocks, "megatron", "node", OURS) == {}


@pytest.mark.parametrize(
    ("place", "ours", "words"),
    [
        ("megatron/rank", block_of(2.1), ["2.10 s, more than 2: step 0.30, groups 0.20"]),
        ("megatron/node", block_of(2.1), []),
        ("fsdp2/rank", block_of(2.1), []),
        ("fsdp2/all", block_of(2.6), ["5.0 times"]),
        ("megatron/all", block_of(2.0, load=0.15), ["load is one"]),
        ("megatron/rank", {}, ["not measured"]),
    ],
)
def test_goals_can_be_missed(place: str, ours: dict[str, Any], words: list[str]) -> None:
    table = {USUAL: block_of(13.0)["faults"]["rank"], OURS: block_of(2.0)["faults"]["rank"]}
    assert recovery.missed({place: table}) == []
    assert recovery.missed({place: {USUAL: table[USUAL]}}) == []
    lines = recovery.missed({place: table | {OURS: ours and ours["faults"]["rank"]}})
    assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines, strict=True))
