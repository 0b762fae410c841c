"""The report of events that real ranks left: two attempts; the first dies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ftckpt.cli.report import write_report
from tests.components.made_logs import check_page
from tests.support import plain
from tests.support.event_logs import read_events
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc

NODES = ["n0", "n0", "n1", "n1"]
LOST_AFTER, LAST = 5, 9


def train(rank: int, world_size: int, settings: dict[str, Any], last: int, close: bool) -> int | None:
    """Up to iteration ``last``; then dies, or ends well."""
    checkpointer, state = plain.make(rank, world_size, settings, NODES[:world_size])
    start = checkpointer.restore()
    plain.train(checkpointer, state, range((start or 0) + 1, last + 1))
    if not close:
        plain.die()
    checkpointer.close()
    return start


def test_a_run_that_died_and_came_back(settings: dict[str, Any], tmp_path: Path) -> None:
    settings |= {"protect": "node", "timeline_every": 1, "chunk_size": "128KiB", "objects_size": "1MiB"}
    run_ranks(train, 4, settings, LOST_AFTER, False, expect_failures=True)
    results = [result.value for result in run_ranks(train, 4, settings, LAST, True)]
    assert results[0] is not None and set(results) == {results[0]}
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps({"iteration": n, "loss": 5.0 / n}) + "\n" for n in range(1, LAST + 1))
    )
    history = write_report(tmp_path, tmp_path / "report.html")
    (restart,) = history.restarts
    assert restart.restored_iteration == results[0] and restart.source == "memory" and restart.trained
    assert re.match(r"node n[01]: ranks [02] \(pid ", restart.cause) and f"iteration {LOST_AFTER}" in restart.cause
    assert restart.iterations_lost == LOST_AFTER - results[0]
    assert restart.parts["load"] > 0 and restart.parts["first-step"] > 0
    assert [attempt.ended_well for attempt in history.attempts] == [False, True]
    # A snapshot may be skipped while another is being protected.
    skipped = {line["iteration"] for line in read_events(Path(settings["events"]), "skipped")}
    assert history.blocked and history.blocked.keys() | skipped == set(range(1, LAST + 1))
    assert any(age.committed is not None for age in history.ages())
    assert history.protection is not None and {line["node"] for line in history.conditions} == {"n0", "n1"}
    text = (tmp_path / "report.html").read_text()
    check_page(text)
    assert "4 ranks trained to iteration 9" in text and "one rank&#39;s arena" in text
    assert "broken line" not in text
