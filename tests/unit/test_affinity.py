"""Which cores background threads run on, and that only the calling thread moves."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.capture import affinity
from ftckpt.capture.affinity import Locality, format_cores, locality, numa_node_of, parse_cores, pin, run_on

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


@given(st.text("0123456789-, x", max_size=12) | st.text(max_size=12))
def test_any_text_is_a_list_of_cores_or_an_error(text: str) -> None:
    try:
        found = parse_cores(text)
    except ValueError as error:
        assert str(error)
    else:
        assert found and parse_cores(format_cores(found)) == found


@pytest.mark.parametrize(
    ("text", "found"), [("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("3,1-2,2", {1, 2, 3}), ("007", {7}), ("5-5", {5})]
)
def test_lists(text: str, found: set[int]) -> None:
    assert parse_cores(text) == found


@pytest.mark.parametrize("text", ["3-0", "0-99999999999", "123456", "", "1,", "-1", "0-3-5", "1 2", "1\n", "١"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cores(text)


def test_threads_stay_on_the_allowed_cores_of_the_devices_node(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 9})
    for node, near in ((0, {2, 3, 9}), (1, {4}), (None, None), (2, None), (3, None), (4, None)):
        monkeypatch.setattr(affinity, "numa_node_of", lambda device, node=node: node)
        assert locality(torch.device("cuda", 0)) == Locality(near, node)


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


@pytest.mark.parametrize("nodes", [1, 4])
def test_where_there_is_one_numa_node_nothing_is_near(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    monkeypatch.setattr(affinity, "numa_node_of", lambda device: 0)
    for node in range(nodes, 4):
        shutil.rmtree(sysfs / f"devices/system/node/node{node}")
    near = locality(torch.device("cuda", 0))
    allowed = {0, 1, 2, 3, 8, 9, 10, 11} & os.sched_getaffinity(0)
    assert near == (Locality() if nodes == 1 else Locality(allowed, 0))


def test_what_is_run_on_cores_says_and_raises_what_it_does() -> None:
    own = os.sched_getaffinity(0)
    core = max(own)
    assert run_on({core}, lambda: os.sched_getaffinity(0)) == {core}
    assert run_on(None, threading.get_ident) == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        run_on({core}, lambda: 1 // 0)
    assert os.sched_getaffinity(0) == own


def test_an_unknown_numa_node_is_no_error(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert numa_node_of(torch.device("cpu")) is None
    if not torch.cuda.is_available():
        assert numa_node_of(torch.device("cuda", 0)) is None
    fake_properties(monkeypatch, pci_bus_id=1)  # older versions tell no domain
    assert numa_node_of(torch.device("cuda", 0)) is None
    fake_properties(monkeypatch, pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    assert numa_node_of(torch.device("cuda", 0)) is None  # a container that hides the bus


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device")
def test_the_numa_node_of_a_real_device_exists_or_is_unknown() -> None:
    node = numa_node_of(torch.device("cuda", 0))
    assert node is None or Path(f"/sys/devices/system/node/node{node}").is_dir()


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


def test_no_wish_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    assert pin(None) is True
