"""Scalars of ftckpt next to those of the framework, by the writers that the framework has opened."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from tests.support import ds_jobs

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


def test_the_monitor_of_deepspeed_has_them_as_often_as_it_prints(settings: dict[str, Any], tmp_path: Path) -> None:
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}}
    shape = ds_jobs.Shape(2, config=ds_jobs.BF16 | ds_jobs.zero(1) | monitor | {"steps_per_print": 3})
    ds_jobs.outcomes(ds_jobs.Run(shape, until=7, settings=settings))
    rows = {path.stem: list(csv.reader(path.open())) for path in (tmp_path / "run").glob("ftckpt_*.csv")}
    assert {"ftckpt_blocked_ms", "ftckpt_whole_age", "ftckpt_skipped"} <= set(rows)
    blocked = [(int(samples), float(ms)) for samples, ms in rows["ftckpt_blocked_ms"][1:]]
    assert [samples for samples, _ in blocked] == [3 * 8, 6 * 8], "one process writes, with the samples of steps 3, 6"
    assert all(0 < ms < 1000 for _, ms in blocked)
    assert [float(number) for _, number in rows["ftckpt_snapshots"][1:]] == [3, 3]
