"""Table of the metrics of an SMP, for dashboards and alerts: names, meanings, and how each is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ftckpt.events import EVENTS

PREFIX = "ftckpt_"

Status = Mapping[str, Any]
"""The status of ``Daemon`` with the ranks' counts, ``loud`` (counts of loud events by name) and ``memory_bytes``."""

Values = Iterable[tuple[str, float]]
"""Values by label; a metric without a label has one value, or none."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. All have the labels ``training_job`` and ``node``, some a further ``label``."""

    kind: Literal["gauge", "counter"]
    meaning: str
    read: Callable[[Status], Values]
    label: str = ""


def _gauge(meaning: str, read: Callable[[Status], float | None]) -> Metric:
    return Metric("gauge", meaning, lambda status: _known(read(status)))


def _counter(meaning: str, read: Callable[[Status], float | None]) -> Metric:
    return Metric("counter", meaning, lambda status: _known(read(status)))


def _known(value: float | None) -> Values:
    return [] if value is None else [("", float(value))]


def _of_ranks(kind: Literal["gauge", "counter"], meaning: str, read: Callable[[Mapping[str, Any]], float]) -> Metric:
    def each(status: Status) -> Iterator[tuple[str, float]]:
        # A rank that moved to another place of the node may have two entries: the live one counts, or the one with
        # the latest heartbeat.
        trainers = {}
        for trainer in sorted(status["trainers"], key=lambda one: (one["lives"] is not False, -one["secs"])):
            if trainer["rank"] is not None:
                trainers[trainer["rank"]] = trainer
        for rank, trainer in sorted(trainers.items()):
            yield str(rank), float(read(trainer))

    return Metric(kind, meaning, each, "rank")


def _counted(name: str, unit: float = 1.0) -> Callable[[Mapping[str, Any]], float]:
    return lambda trainer: trainer["counts"][name] * unit


def _mark(name: str, field: str) -> Callable[[Status], float | None]:
    return lambda status: (status[name] or {}).get(field)


def _persisted(status: Status) -> float | None:
    newest = max((trainer["counts"]["persisted"] for trainer in status["trainers"]), default=0)
    return newest - 1 if newest else None


def _behind(name: str) -> Callable[[Status], float | None]:
    return lambda status: max(
        (one["counts"][name] for one in status["trainers"] if one["lives"] is not False), default=None
    )


def _iteration(status: Status) -> float | None:
    newest = max((trainer["iteration"] for trainer in status["trainers"]), default=-1)
    return newest if newest >= 0 else None


SILENCE = "smp_silent_seconds"


def _loud(status: Status) -> Values:
    """All loud events, from the start: an alert on the increase of a series must see the first event."""
    return [(name, status["loud"].get(name, 0)) for name, kind in EVENTS.items() if kind.loud]


METRICS: dict[str, Metric] = {
    SILENCE: _gauge("since the last iteration of the SMP's loop; all other values are as old", lambda status: 0.0),
    "smp_time_seconds": _gauge(
        "since the epoch, time of all values: a file may be left by a dead SMP",
        lambda status: time.time(),
    ),
    "iteration": _gauge("the last step boundary that a rank of the node has passed", _iteration),
    "ranks": _gauge(
        "live ranks of the node", lambda status: sum(one["lives"] is not False for one in status["trainers"])
    ),
    "whole_iteration": _gauge("the newest committed snapshot", _mark("whole", "iteration")),
    "whole_age_seconds": _gauge("since that snapshot was first observed", _mark("whole", "age_secs")),
    "whole_intervals_behind": _gauge(
        "snapshot intervals that training has passed since then, or since its start; up to 3 is normal",
        _behind("whole_behind"),
    ),
    "protected_iteration": _gauge("the newest protected snapshot", _mark("protected", "iteration")),
    "protected_age_seconds": _gauge("since that snapshot was first observed", _mark("protected", "age_secs")),
    "protected_intervals_behind": _gauge(
        "snapshot intervals that training has passed since then, or since its start",
        _behind("protected_behind"),
    ),
    "persisted_iteration": _gauge("the newest snapshot that this attempt persisted", _persisted),
    "flushing": _gauge("1 while a snapshot is being flushed", lambda status: status["tasks"]["flushing"] is not None),
    "storage_failing": _gauge("1 while storage fails", lambda status: bool(status["tasks"]["storage"]["problem"])),
    "protects": _gauge("1 if snapshots are to be protected", lambda status: status["tasks"]["protects"]),
    "cannot_protect": _gauge(
        "1 while the chosen snapshot cannot be protected",
        lambda status: status["tasks"]["cannot"] is not None,
    ),
    "memory_bytes": _gauge("memory of snapshots, parity and packages on the node", lambda s: s["memory_bytes"]),
    "smp_memory_bytes": _gauge("private memory of the SMP", lambda status: status["anon_bytes"]),
    "received_bytes": _counter("received from other nodes for protection", lambda s: s["tasks"]["received_bytes"]),
    "sent_bytes": _counter("sent to other nodes for protection", lambda status: status["tasks"]["sent_bytes"]),
    "warnings": Metric("counter", "loud events of this SMP, by name (EVENTS.md)", _loud, "event"),
    "rank_alive": _of_ranks("gauge", "1 while the rank lives", lambda trainer: trainer["lives"] is not False),
    "rank_iteration": _of_ranks("gauge", "its last step boundary", lambda trainer: trainer["iteration"]),
    "rank_silent_seconds": _of_ranks("gauge", "since its last heartbeat", lambda trainer: trainer["secs"]),
    "rank_snapshots": _of_ranks("counter", "snapshots that it has started", _counted("snapshots")),
    "rank_snapshots_skipped": _of_ranks("counter", "snapshots that were due and skipped", _counted("skipped")),
    "rank_no_snapshots": _of_ranks(
        "gauge", "1 while it takes no snapshots; the log says why, once a minute", _counted("no_snapshots")
    ),
    "rank_snapshots_failed": _of_ranks("counter", "snapshots that failed on it", _counted("failed")),
    "rank_blocked_seconds": _of_ranks(
        "counter", "training time lost to waits at step boundaries and in fences", _counted("blocked_us", 1e-6)
    ),
    "rank_copied_bytes": _of_ranks("counter", "copied into its slots", _counted("copied_bytes")),
    "rank_replicas_differing": _of_ranks(
        "gauge",
        "fragments that differ from those of its replicas",
        _counted("differing"),
    ),
}
"""By name, without ``PREFIX`` and the ``_total`` of counters. Source of ``METRICS.md``."""


def full_name(name: str) -> str:
    """The name in queries."""
    return f"{PREFIX}{name}{'_total' if METRICS[name].kind == 'counter' else ''}"


def reference() -> Iterator[str]:
    yield "# Metrics"
    yield ""
    yield "With `--ftckpt-metrics-port` each SMP serves these to Prometheus on the loopback interface of its node,"
    yield "and with `--ftckpt-metrics-dir` it writes them every 15 s to a file there, for the textfile collector of a"
    yield "node exporter. All have the labels `training_job` and `node`. Counters of ranks restart with each"
    yield "attempt. Alerts and a dashboard that use them are in `configs/monitoring`. Generated from the table in"
    yield "`smp/metrics.py`:"
    yield "`python -m ftckpt.smp.metrics > ftckpt/METRICS.md`."
    yield ""
    yield "| metric | kind | label | meaning |"
    yield "|---|---|---|---|"
    for name, metric in METRICS.items():
        yield f"| `{full_name(name)}` | {metric.kind} | {metric.label} | {metric.meaning} |"


if __name__ == "__main__":
    print("\n".join(reference()))
