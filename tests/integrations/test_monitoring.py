"""Alerts as Prometheus itself reads and evaluates them, and the dashboard as Grafana's own types read it."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.smps import site_at

MONITORING = Path(__file__).parents[2] / "configs" / "monitoring"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool: apt-get install --no-install-recommends prometheus"
)


def promtool(*words: str, text: str = "") -> str:
    found = subprocess.run(["promtool", *words], check=False, input=text, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    named = ",".join(f'{key}="{value}"' for key, value in {"training_job": "j", "node": "n0", **labels}.items())
    return {"series": f"{name}{{{named}}}", "values": values}


CASES: dict[str, tuple[list[dict[str, str]], str]] = {
    "old": ([series("ftckpt_ranks", "8x60"), series("ftckpt_whole_age_seconds", "0+60x60")], "FtckptNoWholeSnapshot"),
    "rare": (
        [
            series("ftckpt_ranks", "8x60"),
            series("ftckpt_whole_age_seconds", "0+60x19 0+60x19 0+60x20"),
            series("ftckpt_whole_intervals_behind", "1x19 2x41"),
        ],
        "",
    ),
    "rare, and none yet": (
        [series("ftckpt_ranks", "8x60"), series("ftckpt_whole_intervals_behind", "0x30 1x30")],
        "",
    ),
    "rare and old": (
        [
            series("ftckpt_ranks", "8x60"),
            series("ftckpt_whole_age_seconds", "0+60x60"),
            series("ftckpt_whole_intervals_behind", "0+0.1x60"),
        ],
        "FtckptNoWholeSnapshot",
    ),
    "never": ([series("ftckpt_ranks", "8x60")], "FtckptNoWholeSnapshot"),
    "well": ([series("ftckpt_ranks", "8x60"), series("ftckpt_whole_age_seconds", "1x60")], ""),
    "ended": ([series("ftckpt_ranks", "0x60")], ""),
    "unprotected": (
        [
            series("ftckpt_ranks", "8x60"),
            series("ftckpt_whole_age_seconds", "1x60"),
            series("ftckpt_protects", "1x60"),
        ],
        "FtckptNotProtected",
    ),
    "rarely protected": (
        [
            series("ftckpt_ranks", "8x60"),
            series("ftckpt_whole_age_seconds", "1x60"),
            series("ftckpt_protects", "1x60"),
            series("ftckpt_protected_age_seconds", "0+60x60"),
            series("ftckpt_protected_intervals_behind", "0+0.05x60"),
        ],
        "",
    ),
    "stuck": ([series("ftckpt_smp_silent_seconds", "1x50 130x10")], "FtckptSmpStandsStill"),
    "gone": ([series("ftckpt_smp_time_seconds", "0+60x50 3000x10")], "FtckptSmpStandsStill"),
    "there": ([series("ftckpt_smp_time_seconds", "0+60x60")], ""),
    "left out": (
        [
            series("ftckpt_rank_snapshots_skipped_total", "0+10x60", rank="0"),
            series("ftckpt_rank_snapshots_total", "0+10x60", rank="0"),
        ],
        "FtckptSnapshotsSkipped",
    ),
    "corrupt": ([series("ftckpt_warnings_total", "0x50 1x10", event="corrupt")], "FtckptCorruption"),
    "corrupt when first seen": ([series("ftckpt_warnings_total", "_x50 1x10", event="corrupt")], "FtckptCorruption"),
    "corrupt long ago": ([series("ftckpt_warnings_total", "1x120", event="corrupt")], ""),
    "differ": (
        [series("ftckpt_rank_replicas_differing", "0x50 3x10", rank="5"), series("ftckpt_iteration", "5000x60")],
        "FtckptReplicasDiffer",
    ),
    "differ by design": (
        [series("ftckpt_rank_replicas_differing", "3x60", rank="5"), series("ftckpt_iteration", "8x60")],
        "",
    ),
    "storage": ([series("ftckpt_storage_failing", "1x60")], "FtckptStorageFails"),
    "restarts": ([series("ftckpt_rank_snapshots_total", "0x10 1 0 1 0 1 0 1 0 1 0 1 0 1x40")], "FtckptRestarts"),
    "a few restarts, then another job": ([series("ftckpt_attempt", "9x20 10x10 1x29")], ""),
}


@needs_promtool
@pytest.mark.slow
def test_alerts_fire_where_they_should_and_nowhere_else(tmp_path: Path) -> None:
    rules = MONITORING / "alerts.yaml"
    promtool("check", "rules", str(rules))
    alerts = [rule for group in yaml.safe_load(rules.read_text())["groups"] for rule in group["rules"]]
    assert {alert for _, alert in CASES.values() if alert} == {rule["alert"] for rule in alerts}
    tests: list[dict[str, Any]] = []
    for name, (inputs, expected) in CASES.items():
        fires = {rule["alert"]: [] for rule in alerts}
        # Labels and texts are checked by their being there alone: an alert that should not fire has none.
        queries = [
            {
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)',
                "eval_time": "1h",
                "exp_samples": [{"labels": "{}", "value": int(alert == expected)}],
            }
            for alert in fires
        ]
        tests.append({"name": name, "interval": "1m", "input_series": inputs, "promql_expr_test": queries})
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", str(path))


@needs_promtool
@pytest.mark.slow
def test_prometheus_has_nothing_to_say_of_what_an_smp_serves(arena_root: Path) -> None:
    with site_at(arena_root) as site:
        client = site.start()
        client.configure(site.description(metrics_port="auto"))
        with urllib.request.urlopen(client.status()["metrics"], timeout=10) as reply:
            promtool("check", "metrics", text=reply.read().decode())


def test_the_dashboard_survives_the_types_of_grafana() -> None:
    """A field that Grafana does not know would be dropped."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    given = json.loads((MONITORING / "grafana.json").read_text())
    read = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(given)))

    def lost(before: Any, after: Any, place: str) -> list[str]:
        if isinstance(before, dict):
            return [
                name
                for key, value in before.items()
                for name in (lost(value, after[key], f"{place}/{key}") if key in after else [f"{place}/{key}"])
            ]
        if isinstance(before, list):
            pairs = zip(before, after, strict=True)
            return [name for at, (a, b) in enumerate(pairs) for name in lost(a, b, f"{place}/{at}")]
        return [] if before == after else [place]

    assert lost(given, read, "") == []
