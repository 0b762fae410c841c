"""What the demo says at its end: a table of costs, and everything that the report shows."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launch import demo_measure
from launch.demo_frameworks import Framework
from launch.demo_measure import Comparison, FaultCost
from launch.demo_run import Watch
from launch.demo_shrink import Reshape


def table(costs: Sequence[FaultCost]) -> str:
    """The costs in text."""
    parts = [part.replace("-", " ") for part in demo_measure.PARTS]
    heads = ("fault", "killed at", "restored", "lost", "source", *parts, "total")
    rows: list[tuple[str, ...]] = [heads]
    for cost in costs:
        numbers = (str(cost.iteration), str(cost.restored_iteration), str(cost.iterations_lost))
        secs = (*cost.parts.values(), cost.total_secs)
        rows.append((cost.name, *numbers, cost.source, *(f"{value:.2f} s" for value in secs)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(line) for line in lines)


def summarize(
    argv: Sequence[str],
    framework: Framework,
    comparison: Comparison | None,
    costs: Sequence[FaultCost],
    *,
    reference: Watch,
    faulted: Watch | None,
    reshape: Reshape | None = None,
) -> dict[str, Any]:
    """Everything that the report shows. ``faulted`` and ``comparison`` are None where ``reshape`` is all there is."""
    comparison = comparison or Comparison(0)
    seen = {"reference": reference, **({"faulted": faulted} if faulted else {})}
    blocked = demo_measure.blocked_by_iteration(faulted.events) if faulted else {}
    return {
        "framework": framework.title,
        "job": framework.job,
        "bit_exact": comparison.bit_exact if faulted else None,
        "differences": list(comparison.differences),
        "num_losses_compared": comparison.num_losses,
        "num_tensors_compared": comparison.tensors,
        "faults": [{**asdict(cost), "total_secs": cost.total_secs} for cost in costs],
        "reshape": reshape.summary() if reshape else None,
        **{name: _losses(watch) for name, watch in seen.items()},
        "blocked_secs": {str(iteration): asdict(found) for iteration, found in blocked.items()},
        "run_secs": {name: watch.secs for name, watch in seen.items()},
        "command": shlex.join(["launch/demo.sh", *argv]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "versions": _versions(framework.packages),
        "hardware": _hardware(),
    }


def _losses(watch: Watch) -> dict[str, Any]:
    secs = [line["time"] for line in watch.lines]
    return {
        "losses": [[line["iteration"], line["loss"], line["loss_hex"]] for line in watch.lines],
        "median_iteration_secs": statistics.median(secs) if secs else None,
    }


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def _hardware() -> dict[str, Any]:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes,
        "device": os.environ.get("FTCKPT_DEVICE", "cpu"),
    }
