"""The replay of failures is that of a job played through step by step, and traces are what they are called."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import cadence
from benchmarks.cadence import Failure, Policy, SyntheticJob, draw, replay
from ftckpt.model.tiers import JOB, NODE, PROCESS

DAY = 86400.0
JOB_OF_TEST = SyntheticJob("test", 8, iteration=10.0, snapshot=1.0, protect=25.0, flush=200.0, flush_slows=0.1)
MEANS = {PROCESS: 4000.0, NODE: 9000.0, JOB: 30000.0}


def played(policy: Policy, trace: list[Failure], horizon: float) -> tuple[float, float]:
    """Overhead and lost work, in steps of a tenth of an iteration."""
    job = JOB_OF_TEST
    length = job.iteration + job.snapshot / policy.snapshot + job.store / policy.store
    there: dict[str, list[tuple[float, float]]] = {PROCESS: [(0, 0)], NODE: [(0, 0)], JOB: [(0, 0)]}
    late = {PROCESS: job.iteration, NODE: job.iteration + job.protect, JOB: job.flush}
    every = {PROCESS: policy.snapshot, NODE: policy.snapshot, JOB: policy.store}
    while every[NODE] * job.iteration < job.protect:
        every[NODE] += policy.snapshot
    at, lost, failures, step = 0.0, 0.0, list(trace), 0
    while step * 0.1 * length < horizon:
        step += 1
        at = round(at + 0.1, 1)
        for kind, interval in every.items():
            # Of what is at this place of the way when it counts, that is ``late`` behind its boundary.
            boundary = at - late[kind] / length
            if boundary >= 0:
                there[kind].append((boundary // interval * interval, at))
        while failures and failures[0].secs <= step * 0.1 * length:
            kind = failures.pop(0).kind
            back = max(place for place, _ in there[kind if policy.memory else JOB])
            lost, at = lost + at - back, round(back, 1)
            for other in (PROCESS, NODE, JOB)[: (PROCESS, NODE, JOB).index(kind)]:
                there[other] = [(back, at)]
    return (lost + at) * (length - job.iteration) / (at * job.iteration), lost / at


@pytest.mark.parametrize("policy", [Policy("a", 1, 50), Policy("b", 7, 70), Policy("c", 20, 20, memory=False)])
@pytest.mark.parametrize("process", ["poisson", "bursts"])
def test_a_replay_is_what_a_job_goes_through(policy: Policy, process: str) -> None:
    trace = draw(process, MEANS, 2 * DAY, 3)
    assert len(trace) > 20
    overhead, lost = replay(JOB_OF_TEST, [Policy("other", 5, 500), policy], trace, 2 * DAY)
    wanted = played(policy, trace, 2 * DAY)
    assert (overhead[1], lost[1]) == pytest.approx(wanted, rel=0.02)


def test_one_failure_loses_what_lies_behind_its_tier() -> None:
    """1003 iterations of 11 s and 2/50 s for storage, back to 1001, 999 and 950."""
    job, policy = JOB_OF_TEST, [Policy("a", 1, 50)]
    length = 11.0 + 20 / 50
    for kind, lost in ((PROCESS, 1003.4 - 1002), (NODE, 1003.4 - 999), (JOB, 1003.4 - 950)):
        trace = [Failure(1003.4 * length, kind)]
        share = replay(job, policy, trace, 1003.4 * length)[1][0]
        assert share * (1003.4 - lost) == pytest.approx(lost), kind


@pytest.mark.parametrize("process", ["poisson", "weibull", "bursts"])
def test_traces_have_the_mean_time_that_was_asked_for(process: str) -> None:
    traces = [draw(process, MEANS, 60 * DAY, seed) for seed in range(20)]
    assert traces[0] == draw(process, MEANS, 60 * DAY, 0) != traces[1]
    for kind, mean in MEANS.items():
        number = sum(failure.kind == kind for trace in traces for failure in trace)
        assert number == pytest.approx(20 * 60 * DAY / mean, rel=0.1), kind
    gaps = np.concatenate([np.diff([f.secs for f in trace if f.kind == PROCESS]) for trace in traces])
    spread = float(np.std(gaps) / np.mean(gaps))
    assert {"poisson": 0.9 < spread < 1.1, "weibull": 1.3 < spread < 1.6, "bursts": spread > 1.4}[process]


def test_a_search_finds_nothing_worse_than_what_it_is_compared_with() -> None:
    job = cadence.JOBS[1]
    case = cadence.run_case(job, "poisson", days=20.0, num_traces=4, seed=1)
    totals = {row["name"]: row["total"] for row in case["rows"]}
    assert totals["best by search"] <= min(totals.values()) * 1.02, "on a grid"


def test_the_command_writes_what_it_rests_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    cadence.main(["--json", str(out), "--days", "2", "--traces", "2"])
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    assert "rests on a model" in printed and "model" in result["rests_on"]
    assert {"hardware", "versions", "command", "date"} <= result["environment"].keys()
    assert len(result["cases"]) == 3 * len(cadence.JOBS) and len(result["cases"][0]["rows"]) == 12
