"""The report of ``ftckpt check`` about the cores of ranks, however a launcher has bound them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ftckpt.capture import affinity
from ftckpt.cli import check_device
from ftckpt.cli.check_host import host_checks
from ftckpt.cli.findings import PASSED, SKIPPED, WARNED, CheckResult
from tests.support.errors import lacks


def cores(tmp_path: Path, *ranks: set[int]) -> CheckResult:
    return next(one for one in host_checks(tmp_path / "none", 0, ranks) if one.name == "cores")


def test_ranks_that_are_bound_have_the_cores_of_all(tmp_path: Path) -> None:
    found = cores(tmp_path, {0, 1}, {2, 3}, {4, 5}, {6, 7})
    assert found.state == PASSED and found.figures["cores"] == 8
    assert not lacks(found.text, "8", "4", "2")
    assert not lacks(cores(tmp_path, {0, 1}, {2}).text, "1", "2")
    shared = cores(tmp_path, {0, 1, 2}, {0, 1, 2})
    assert shared.state == PASSED and not lacks(shared.text, "3", "2")
    assert "own" not in shared.text and "own" not in cores(tmp_path, {0, 1}).text


@pytest.mark.parametrize(
    ("node", "lists", "state"),
    [
        (0, ["{own}", "{other}"], PASSED), (1, ["{own}", "{other}"], WARNED), (1, ["{own}", ""], SKIPPED),
        (None, ["{own}", "{other}"], SKIPPED), (0, ["{other}"], SKIPPED),
    ],
)  # fmt: skip
def test_a_rank_and_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int | None, lists: list[str], state: str
) -> None:
    own = min(os.sched_getaffinity(0))
    monkeypatch.setattr(affinity, "SYSFS", tmp_path)
    monkeypatch.setattr(check_device, "numa_node_of", lambda device: node)
    for number, text in enumerate(lists):
        (folder := tmp_path / f"devices/system/node/node{number}").mkdir(parents=True)
        (folder / "cpulist").write_text(text.format(own=own, other=5000) + "\n")
    found = check_device._near(torch.device("cuda", 0))
    assert found.state == state, found
    if state == WARNED:
        assert not lacks(found.text, "5000", "1") and "--cpunodebind=1" in found.remedy
