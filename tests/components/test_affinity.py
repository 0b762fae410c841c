"""Which cores background threads run on, and that only the calling thread moves."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.capture import affinity
from ftckpt.capture.affinity import format_cores, near_cores, numa_node_of, parse_cores, pin

CORES = st.sets(st.integers(0, 300), min_size=1)


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(affinity, "SYSFS", tmp_path)
    for node, cpulist in enumerate(["0-3,8-11\n", "4-7\n", "\n", "what\n"]):
        directory = tmp_path / "devices/system/node" / f"node{node}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(cpulist)
    return tmp_path


@given(CORES)
def test_a_written_list_reads_as_the_same_cores(wanted: set[int]) -> None:
    text = format_cores(wanted)
    assert parse_cores(text) == wanted


@pytest.mark.parametrize("text", ["3-0", "0-99999999999", "123456", "", "1,", "-1", "0-3-5", "1 2", "1\n", "١"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cores(text)


def test_threads_stay_on_the_allowed_cores_of_the_devices_node(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 9})
    for node, near in ((0, {2, 3, 9}), (1, {4}), (None, None), (2, None), (3, None), (4, None)):
        monkeypatch.setattr(affinity, "numa_node_of", lambda device, node=node: node)
        assert near_cores(torch.device("cuda", 0)) == near


def fake_properties(monkeypatch: pytest.MonkeyPatch, **properties: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))


@pytest.mark.parametrize(("content", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None), ("x", None)])
def test_the_numa_node_of_a_device(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch, content: str, node: int | None
) -> None:
    fake_properties(monkeypatch, pci_domain_id=0x10, pci_bus_id=0xDC, pci_device_id=2)
    device = sysfs / "bus/pci/devices/0010:dc:02.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(content)
    assert numa_node_of(torch.device("cuda", 0)) == node


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_pin_moves_the_calling_thread_alone() -> None:
    before = os.sched_getaffinity(0)
    other = threading.Event()
    seen: dict[str, object] = {}

    def bystander() -> None:
        other.wait(10)
        seen["bystander"] = os.sched_getaffinity(0)

    def pinned() -> None:
        seen["answer"] = pin({min(before)})
        seen["pinned"] = os.sched_getaffinity(0)

    threads = [threading.Thread(target=bystander), threading.Thread(target=pinned)]
    for thread in threads:
        thread.start()
    threads[1].join(10)
    other.set()
    threads[0].join(10)
    assert seen == {"answer": True, "pinned": {min(before)}, "bystander": before}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("wanted", [{99999}, set(), {-1}, {1 << 70}])
def test_a_refused_pin_is_a_warning(wanted: set[int], caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    with caplog.at_level(logging.WARNING, "ftckpt"):
        assert pin(wanted) is False
    assert caplog.text
    assert os.sched_getaffinity(0) == before
