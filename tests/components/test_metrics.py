"""The table of metrics, its generated page, and the metrics of a node whose status is known."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from ftckpt.smp.metrics import METRICS, full_name, reference

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "configs" / "monitoring"
NAMES = {full_name(name) for name in METRICS}


def test_the_page_is_made_of_the_table() -> None:
    assert (ROOT / "ftckpt" / "METRICS.md").read_text() == "\n".join(reference()) + "\n"


def expressions() -> dict[str, str]:
    """The queries of all alerts and panels, by their titles."""
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
            page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
            headings = re.findall(r"^## (.*)$", (ROOT / page).read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings]
            assert rule["annotations"]["summary"]
