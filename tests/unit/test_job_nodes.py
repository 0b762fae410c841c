"""The jobs that a machine has memory of, by their directories."""

from __future__ import annotations

from pathlib import Path

from ftckpt.cli.job_nodes import jobs_in
from ftckpt.memory.directory import SMP_LOCK_NAME


def test_records_of_launchers_are_no_job_whatever_jobs_are_called(tmp_path: Path) -> None:
    for name in ("ftckpt-night", "ftckpt-runs-night", "ftckpt-runs-1000"):
        (tmp_path / name / "n0").mkdir(parents=True)
        (tmp_path / name / "n0" / SMP_LOCK_NAME).touch()
    assert jobs_in(tmp_path) == ["night", "runs-night"]
