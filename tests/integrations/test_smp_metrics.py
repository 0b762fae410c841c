"""Metrics as Prometheus gets them from a real SMP: served on request, or in a file that is removed with it."""

from __future__ import annotations

import os
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ftckpt.memory.heartbeat import Heartbeat, HeartbeatGauge
from ftckpt.smp.exporter import Exporter
from ftckpt.smp.metrics import METRICS, PREFIX, full_name
from tests.support.smps import JOB, NODE, SmpSite, site_at
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc

Samples = dict[tuple[str, str], float]
"""The samples by name and, where there is one, the value of the label other than training_job and node."""


@pytest.fixture
def site(arena_root: Path) -> Iterator[SmpSite]:
    with site_at(arena_root) as site:
        yield site


def parsed(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type == METRICS[family.name.removeprefix(PREFIX)].kind
        for sample in family.samples:
            assert (sample.labels.pop("training_job"), sample.labels.pop("node")) == (JOB, NODE)
            found[(sample.name, *(sample.labels.values() or [""]))] = sample.value  # type: ignore[index]
    return found


def scraped(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return parsed(reply.read().decode())


def test_who_asks_gets_what_is_so_at_that_moment(site: SmpSite) -> None:
    client = site.start()
    client.configure(site.description(metrics_port="auto"))
    url = client.status()["metrics"]
    assert url.startswith("http://127.0.0.1:")
    pulse = Heartbeat.open(site.node_dir, 1, rank=5)
    for iteration in (7, 8):
        counts = [0] * len(HeartbeatGauge)
        counts[HeartbeatGauge.SNAPSHOTS], counts[HeartbeatGauge.BLOCKED_US] = iteration, 1500 * iteration
        counts[HeartbeatGauge.PERSISTED] = iteration
        pulse.tell_counts(counts)
        pulse.beat(iteration, "start")
        found = scraped(url)
        assert found[full_name("iteration"), ""] == found[full_name("rank_iteration"), "5"] == iteration
        assert found[full_name("rank_snapshots"), "5"] == iteration
        assert found[full_name("rank_blocked_seconds"), "5"] == pytest.approx(0.0015 * iteration)
        assert found[full_name("persisted_iteration"), ""] == iteration - 1
        assert found[full_name("ranks"), ""] == found[full_name("rank_alive"), "5"] == 1
    assert 0 <= found[full_name("rank_silent_seconds"), "5"] < 10
    assert (full_name("whole_iteration"), "") not in found, "there is none"
    client.configure(site.description())
    assert not client.status()["metrics"]
    with pytest.raises(OSError):
        scraped(url)


def test_a_port_that_is_taken_is_tried_again_and_loud_events_are_counted(site: SmpSite) -> None:
    client = site.start()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        client.configure(site.description(metrics_port=port))
        assert client.status()["metrics"] == ""
    assert f"--ftckpt-metrics-port: {port} cannot be served" in site.log and "ftckpt jobs" in site.log
    until(lambda: bool(client.status()["metrics"]), secs=40)
    found = scraped(client.status()["metrics"])
    assert found[full_name("warnings"), "smp_error"] == 1
    assert found[full_name("warnings"), "corrupt"] == 0, "an alarm is on the increase"
    assert site.log.count("cannot be served") == 1


def test_nothing_is_imported_for_metrics_that_nobody_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package belongs to an extra, which most jobs do without."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    told: list[str] = []
    exporter = Exporter("job", "node", lambda: pytest.fail("nobody asks"), told.append)
    exporter.configure(0, "")
    exporter.step()
    exporter.close()
    assert not told and not exporter.url


def test_a_file_has_them_until_the_smp_ends(site: SmpSite, tmp_path: Path) -> None:
    client, path = site.start(), tmp_path / "made" / f"ftckpt-{JOB}-{NODE}.prom"
    client.configure(site.description(metrics_dir=str(path.parent)))
    until(path.exists)
    assert parsed(path.read_text())[full_name("ranks"), ""] == 0
    # A node exporter is another user.
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o644, 0o755)
    client.end()
    until(lambda: not path.exists())
    assert os.listdir(path.parent) == []


def test_a_directory_that_cannot_be_written_is_told_once_and_ends_nothing(site: SmpSite, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    client = site.start()
    client.configure(site.description(metrics_dir=str(tmp_path / "file")))
    assert client.status()["job"] == JOB
    client.configure(site.description(metrics_dir=str(tmp_path / "file")))
    assert site.log.count("cannot be written") == 1
    client.end()
    until(lambda: not site.files())
