"""Restarts from memory in another layout: every element of every tensor, for each feature of a model that cuts it."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import RankFailure, run_ranks
from tests.support.reshaping import ITERATION, MODELS, Check, Layout, arrive, attach, build, leave
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

MATRIX: dict[str, dict[str, list[str]]] = {
    "gpt-tied": {
        "tp2pp2dp2": ["tp1pp1dp1", "tp2pp1dp2", "tp1pp2dp2", "tp2pp2dp1", "tp4pp1dp1", "tp1pp4dp1", "tp2pp2dp1:z"],
        "tp1pp2vpp2dp2:z": ["tp2pp2dp1", "tp1pp2vpp2dp2", "tp1pp1dp4", "tp2pp1cp2dp1"],
    },
    "llama-gqa-untied": {
        "tp4pp1dp1": ["tp2pp2dp1", "tp1pp2vpp2dp2", "tp2pp1dp2:z"],
        "tp2pp1cp2dp1": ["tp4pp1dp1", "tp1pp1dp2"],
    },
    "moe-sequential": {
        "tp2pp1ep2dp2": ["tp1pp2ep2dp2", "tp1pp1ep4dp4", "tp2pp2etp2dp1", "tp2pp1ep4etp1dp2:z"],
        "tp1pp1ep1dp2:z": ["tp1pp1ep2dp2", "tp2pp1ep2etp1dp1"],
    },
    "moe-grouped": {"tp1pp1ep2dp2": ["tp1pp1ep4dp4", "tp2pp1ep1dp1", "tp2pp2ep2etp1dp1"]},
    "mla": {"tp2pp1dp2": ["tp4pp1dp1", "tp1pp2dp2", "tp1pp1dp1:z"]},
    "gpt-fp32": {"tp2pp1dp1": ["tp1pp2dp1", "tp1pp1dp2:z"]},
}
"""Model → source → targets. After a colon ``z``: without the distributed optimizer."""

QUICK = {("gpt-tied", "tp2pp2dp2"), ("moe-sequential", "tp2pp1ep2dp2")}
"""All axes, tied weights, experts, with and without the distributed optimizer."""

PAIRS = [
    (model, source, target)
    for model, sources in MATRIX.items()
    for source, targets in sources.items()
    for target in targets
]
Found = dict[str, Any]
_found: dict[tuple[str, str], Found] = {}


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """The pairs that are run: with -k not all of them."""
    return [item.callspec.params for item in request.session.items if item.originalname == "test_reshape"]


def settings_in(root: Path) -> dict[str, Any]:
    small = {"chunk_size": "64KiB", "objects_size": "1MiB", "slots": 2}
    return {"job": "test", "arena": str(root), "start_timeout_secs": 60.0, **small}


def reshape_all(root: Path, model: str, source: str, targets: Sequence[str]) -> Found:
    """Leave one snapshot, and restore copies of it in each target; what each found, or how it failed."""
    made = root / f"{model}-{source.replace(':', '-')}"
    made.mkdir()
    layout = Layout(source)
    run_ranks(leave, layout.world_size, layout, MODELS[model], settings_in(made), timeout_secs=120)
    found: Found = {}
    layouts = sorted(map(Layout, targets), key=lambda target: target.world_size)
    for size, group in itertools.groupby(layouts, key=lambda target: target.world_size):
        cases = []
        for target in group:
            copy = root / f"{made.name}-{target.text.replace(':', '-')}"
            shutil.copytree(made, copy, copy_function=shutil.copy)
            cases.append((target, settings_in(copy)))
        found.update(arrive_in(layout, model, size, cases))
    shutil.rmtree(made)
    return found


def arrive_in(source: Layout, model: str, size: int, cases: list[Any]) -> Found:
    try:
        results = run_ranks(arrive, size, source, MODELS[model], cases, timeout_secs=120)
    except RankFailure as error:
        return {target.text: error for target, _ in cases}
    left = {t.text: [str(path) for path in Path(s["arena"]).rglob("slot*")] for t, s in cases}
    return {t.text: ([r.value[i] for r in results], left[t.text]) for i, (t, _) in enumerate(cases)}


@pytest.mark.parametrize(
    ("model", "source", "target"),
    by_default(PAIRS, [pair for pair in PAIRS if pair[:2] in QUICK]),
    ids=[f"{s} to {t} of {m}" for m, s, t in PAIRS],
)
def test_reshape(module_root: Path, chosen: list[dict[str, str]], model: str, source: str, target: str) -> None:
    """The first pair of a source runs all of its targets: ranks are started once for each number of them."""
    if (model, source) not in _found:
        targets = [pair["target"] for pair in chosen if (pair["model"], pair["source"]) == (model, source)]
        _found[model, source] = reshape_all(module_root, model, source, targets)
    found = _found[model, source][target]
    if isinstance(found, RankFailure):
        raise found
    checks, left = found
    problems = [f"rank {rank}: {text}" for rank, check in enumerate(checks) for text in check.problems]
    assert not problems, problems[:10]
    assert {check.start for check in checks} == {ITERATION}
    assert all(check.elements > 1000 for check in checks)
    assert not left, "arenas are left after the job has ended"
    assert_generators(checks)
    assert_trained(checks, model, target)


def assert_generators(checks: list[Check]) -> None:
    """What the job seeded alike on two ranks stays alike, what it seeded differently differs, none is as seeded."""
    for name in checks[0].generators:
        pairs = {check.generators[name] for check in checks}
        before, after = {seeded for seeded, _ in pairs}, {derived for _, derived in pairs}
        assert len(pairs) == len(before) == len(after) and not before & after, name
    for check in checks:
        assert len({derived for _, derived in check.generators.values()}) == len(check.generators)


NOISE = 5e-3
"""Relative; products of bf16 numbers are summed in another order."""


def trained(rank: int, world_size: int, layout: Layout, model: Any, goal: tuple[dict[str, Any], int]) -> Any:
    """Train from wherever the job stands to an iteration: where it began, and the losses."""
    settings, until = goal
    import train_gpt

    train_gpt.NUM_TOKENS = 288  # no padding in any layout: rows of padding take part in the softmax
    job = build(layout, model, 1234)
    checkpointer = attach(job, settings, ["node"], rank)
    start = job.iteration = checkpointer.restore() or 0
    losses = {}
    while job.iteration < until:
        loss = train_gpt.train_step(job)["loss"]
        losses[job.iteration] = loss
        checkpointer.step(job.iteration)
    checkpointer.close(remove=until == UNTIL)
    return start, {iteration: loss for iteration, loss in losses.items() if loss is not None}


UNTIL = 8


@pytest.mark.parametrize(
    ("model", "source", "target"),
    by_default(
        [
            ("gpt-tied", "tp2pp1dp2", "tp1pp2vpp2dp1:z"),
            ("llama-gqa-untied", "tp1pp2dp1", "tp4pp1dp1"),
            ("moe-sequential", "tp1pp1ep2dp2", "tp2pp1ep1dp1"),
        ],
        [],
    ),
)
def test_training_goes_on_with_the_losses_of_an_unbroken_run(
    module_root: Path, model: str, source: str, target: str
) -> None:
    settings = {**settings_in(module_root / f"trained-{model}")}
    Path(settings["arena"]).mkdir()
    kind = MODELS[model]

    def run(layout: str, job: str, until: int) -> tuple[int, dict[int, float]]:
        size = Layout(layout).world_size
        results = run_ranks(trained, size, Layout(layout), kind, ({**settings, "job": job}, until))
        losses: dict[int, float] = {}
        for result in results:
            losses.update(result.value[1])
        return results[0].value[0], losses

    _, unbroken = run(source, "unbroken", UNTIL)
    run(source, "test", UNTIL - 3)
    start, resumed = run(target, "test", UNTIL)
    assert start == UNTIL - 3
    assert sorted(resumed) == list(range(start + 1, UNTIL + 1))
    off = {i: abs(resumed[i] - unbroken[i]) / unbroken[i] for i in resumed}
    assert max(off.values()) < NOISE, off
    assert abs(unbroken[UNTIL] - unbroken[start]) / unbroken[start] > 2 * NOISE, (
        "losses that stand still tell nothing"
    )


def assert_trained(checks: list[Check], model: str, target: str) -> None:
    losses = [check.loss for check in checks if check.loss is not None]
    if MODELS[model].trains and "cp" not in target:
        assert losses and all(0 < loss < 1e4 for loss in losses)
