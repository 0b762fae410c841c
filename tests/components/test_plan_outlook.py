"""The outlook of ``ftckpt plan``: published cases, the closed form against a simulation of failures, names, flags."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from ftckpt.cli.main import main
from ftckpt.cli.plan_holdings import StartPlan, plan
from ftckpt.cli.plan_job import add_shape, job_of
from ftckpt.cli.plan_names import CLUSTERS, MODELS
from ftckpt.cli.plan_outlook import MONTH_SECS, Pace, month_survived, outlook_of, sampled_share, share_survived
from ftckpt.config import Config
from ftckpt.parity.survive import Forecast


def started(nodes: int, group: int, losses: int = 1) -> StartPlan:
    """A job of ZeRO 3, protected by peer parity in groups of so many nodes."""
    parser = argparse.ArgumentParser()
    add_shape(parser)
    config = Config(protect="peer", peer_group=group, peer_losses=losses)
    words = f"--zero 3 --params 1b --gpus-per-node 2 --nodes {nodes} --tp 1 --chunk-size 1MiB"
    arguments, _ = parser.parse_known_args(words.split())
    return plan(job_of(arguments, config), config)


def forecast_of(planned: StartPlan) -> Forecast:
    arrangement = planned.arrangement
    return Forecast(arrangement.groups, arrangement.mirrors, arrangement.holdings)


def grouped_share(groups: Sequence[tuple[int, int]], at_once: int) -> float:
    """The published form, for disjoint groups of (nodes, losses that a group tolerates): the share of cases of
    ``at_once`` lost nodes in which no group loses more.

    GEMINI (SOSP'23) has it for groups of replicas, REFT (arXiv 2310.12670) for groups with one parity block each.
    """
    ways = [1]  # by number of lost nodes: the cases that are survived in the groups so far
    for size, losses in groups:
        of_group = [math.comb(size, lost) for lost in range(min(losses, size) + 1)]
        ways = [
            sum(ways[total - lost] * num for lost, num in enumerate(of_group) if 0 <= total - lost < len(ways))
            for total in range(len(ways) + len(of_group) - 1)
        ]
    cases = math.comb(sum(size for size, _ in groups), at_once)
    return ways[at_once] / cases if at_once < len(ways) else 0.0


def test_the_published_case_of_gemini() -> None:
    """16 nodes in groups of 2, a copy of each in its group, 2 lost at once: 93.3 %."""
    published = grouped_share([(2, 1)] * 8, 2)
    assert round(published, 3) == 0.933 and published == 1 - 8 / 120
    planned = started(16, 2)
    assert share_survived(planned, 2) == published
    assert sampled_share(forecast_of(planned), 2, 4000) == pytest.approx(published, abs=0.015)
    # A package has three keepers: 16 of the 560 cases lose one, although each group has a node left.
    three = grouped_share([(2, 1)] * 8, 3) - 16 / 560
    assert sampled_share(forecast_of(planned), 3, 4000) == pytest.approx(three, abs=0.02)


def test_a_group_may_lose_as_many_as_it_has_parity_for() -> None:
    planned = started(8, 8, losses=2)
    assert [share_survived(planned, k) for k in (1, 2)] == [1.0, 1.0]
    assert sampled_share(forecast_of(planned), 3, 50) == grouped_share([(8, 2)], 3) == 0.0


def simulated(forecast: Forecast, mtbf_secs: float, exposed_secs: float, months: int) -> float:
    """Failure by failure: those within ``exposed_secs`` of the first of an episode are lost at once with it."""
    draw, nodes, survived = random.Random(5), sorted(forecast.on_node), 0
    for _ in range(months):
        now, good = 0.0, True
        while good and (now := now + draw.expovariate(len(nodes) / mtbf_secs)) < MONTH_SECS:
            lost, until = {draw.choice(nodes)}, now + exposed_secs
            while (now := now + draw.expovariate((len(nodes) - len(lost)) / mtbf_secs)) < until:
                lost.add(draw.choice(sorted(set(nodes) - lost)))
            now = until  # the failure drawn last is drawn anew: the process has no memory
            good = forecast.survived(frozenset(), frozenset(lost))
        survived += good
    return survived / months


PACE = Pace(
    iteration_secs=1, snapshot_secs=1, protect_secs=6 * 3600 - 301, flush_secs=1, flush_interval_secs=1, mtbf_secs=1,
    link_rate=1,
)  # fmt: skip


def test_the_closed_form_is_what_a_simulation_of_failures_finds() -> None:
    planned = started(16, 2)
    forecast, mtbf_secs, exposed_secs = forecast_of(planned), 20 * 86400.0, 6 * 3600.0
    form = month_survived(lambda k: grouped_share([(2, 1)] * 8, k), 16, mtbf_secs, exposed_secs)
    assert 0.5 < form < 0.9
    by_failures = simulated(forecast, mtbf_secs, exposed_secs, 1500)
    assert by_failures == pytest.approx(form, abs=0.05)
    at_least = month_survived(lambda k: share_survived(planned, k), 16, mtbf_secs, exposed_secs)
    sampled = outlook_of(planned, PACE, mtbf_secs).sampled
    assert at_least < by_failures and sampled == pytest.approx(by_failures, abs=0.05)


def planned_json(capsys: pytest.CaptureFixture[str], arguments: str) -> dict[str, Any]:
    main(["plan", *arguments.split(), "--json"])
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


JOB = "--model llama3-70b --cluster dgx-h100 --nodes 8 --tp 8 --pp 4"


def test_names_stand_for_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    model, cluster = MODELS["llama3-70b"], CLUSTERS["dgx-h100"]
    named = planned_json(capsys, JOB)
    assert (named["ranks"], named["state"]["bytes"]) == (64, model.params * 12)
    assert named["verdict"]["node_memory"] == cluster.node_bytes == 2 * 10**12
    assert named["network_limit"]["bytes_per_sec"] == 0.25 * 400e9 / 8
    words = (
        f"--params {model.params} --gpus-per-node 8 --nodes 8 --tp 8 --pp 4 --node-memory 2TB --network-rate 12.5GB/s"
    )
    given = planned_json(capsys, words)
    for part in ("failures", "memory_per_node", "network_bytes"):
        assert given[part] == named[part]
    other = planned_json(capsys, f"{JOB} --params 8b --node-memory 1TB --network-rate 1GB/s")
    assert other["state"]["bytes"] == 96e9 and other["network_limit"]["bytes_per_sec"] == 1e9
    assert other["verdict"]["node_memory"] == 10**12


def test_a_failure_costs_more_the_further_a_restart_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    costs = planned_json(capsys, f"{JOB} --iteration-time 20s")["costs"]
    assert [(one["lost"], one["source"]) for one in costs] == [
        ("one rank", "memory"), ("one node", "parity"), ("more than that", "storage"),
    ]  # fmt: skip
    sums = [one["work_secs"] + one["load_secs"] for one in costs]
    assert costs[0]["work_secs"] == 50.0 and sums == sorted(sums)
    unprotected = planned_json(capsys, f"{JOB} --protect none")
    assert unprotected["costs"][1]["source"] == "storage"
    failures = 8 * 30 / 308
    assert unprotected["month_survived"]["at_least"] == pytest.approx(math.exp(-failures))
    assert unprotected["month_survived"]["sampled"] == pytest.approx(math.exp(-failures))
