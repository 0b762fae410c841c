"""The table of metrics, the page that is made of it, and what is told of a node whose status is known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftckpt.memory.heartbeat import HeartbeatGauge
from ftckpt.smp.metrics import METRICS, full_name, reference

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "configs" / "monitoring"
NAMES = {full_name(name) for name in METRICS}


def status(**changes: Any) -> dict[str, Any]:
    """Of a node with one rank."""
    trainer = {
        "rank": 3, "place": 0, "pid": 1, "iteration": 9, "secs": 0.5, "lives": True,
        "counts": {count.label: 10 * (count + 1) for count in HeartbeatGauge},
    }  # fmt: skip
    tasks = {
        "flushing": None, "cannot": None, "protects": True, "received_bytes": 5, "sent_bytes": 6,
        "storage": {"problem": ""},
    }  # fmt: skip
    known = {
        "trainers": [trainer], "whole": {"iteration": 8, "age_secs": 1.5}, "protected": None, "tasks": tasks,
        "anon_bytes": 1 << 20, "loud": {"corrupt": 2}, "memory_bytes": 1 << 30,
    }  # fmt: skip
    return {**known, **changes}


def values(known: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(name, label): value for name, metric in METRICS.items() for label, value in metric.read(known)}


def test_the_page_is_made_of_the_table() -> None:
    assert (ROOT / "ftckpt" / "METRICS.md").read_text() == "\n".join(reference()) + "\n"


def test_names_are_as_prometheus_wants_them() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name), name
        assert "_secs" not in name and not name.endswith("_total")
        assert metric.meaning[0] not in " ." and metric.meaning[-1] != "."


def test_what_a_status_says() -> None:
    found = values(status())
    assert found["whole_iteration", ""] == 8 and found["whole_age_seconds", ""] == 1.5
    assert ("protected_iteration", "") not in found, "there is none"
    assert found["rank_iteration", "3"] == found["iteration", ""] == 9
    assert found["rank_blocked_seconds", "3"] == pytest.approx(40e-6)
    assert found["warnings", "corrupt"] == 2
    assert found["persisted_iteration", ""] == 69
    assert found["whole_intervals_behind", ""] == 80 and found["protected_intervals_behind", ""] == 90


def test_what_nobody_knows_is_not_told() -> None:
    nobody = values(status(trainers=[], whole=None, loud={}))
    assert {"iteration", "whole_iteration", "whole_intervals_behind", "persisted_iteration"}.isdisjoint(
        name for name, _ in nobody
    )
    assert nobody["ranks", ""] == 0


def expressions() -> dict[str, str]:
    """Of all alerts and panels, by their titles."""
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    found = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


def test_alerts_and_panels_ask_for_what_there_is() -> None:
    asked = expressions()
    assert len(asked) > 15
    for title, text in asked.items():
        names = set(re.findall(r"\bftckpt_[a-z_]+", text))
        assert names and names <= NAMES, f"{title}: {names - NAMES}"


def test_each_alert_names_a_severity_and_a_page_that_says_what_to_do() -> None:
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            page, _, heading = rule["annotations"]["runbook"].partition(": ")
            assert f"\n## {heading}\n" in (ROOT / page).read_text() and rule["annotations"]["summary"]
