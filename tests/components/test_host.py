"""The host of a rank: its driver and the cores near its device."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.capture import affinity, driver
from ftckpt.capture.affinity import format_cores, near_cores, numa_node_of, parse_cores, pin
from tests.support.pool import run_ranks

# --- which of several runtimes of one process is asked ---


RUNTIME = "int {function}(int *mode) {{ return {version}; }}"
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
needs_no_other = pytest.mark.skipif(
    bool(torch.version.cuda or torch.version.hip), reason="torch has a runtime of its own here, device or not"
)


def library(path: Path, source: str, *linked: Path) -> Path:
    """A shared library whose name for other libraries is its file's."""
    code = path.with_suffix(".c")
    code.write_text(source)
    flags = ["-shared", "-fPIC", "-nostdlib"]
    to_linker = ["-Wl,--no-as-needed", f"-Wl,-soname,{path.name}", f"-Wl,-rpath,{path.parent}"]
    subprocess.run(["cc", *flags, *to_linker, "-o", path, code, *linked], check=True)
    return path


def ask(rank: int, size: int, kind: str, loaded: Sequence[Path]) -> int | None:
    """The answer of the runtime in a process that has loaded these libraries, in this order."""
    setattr(torch.version, kind, "1")
    for path in loaded:
        ctypes.CDLL(str(path))
    exchange = driver.exchange_capture_mode()
    driver.work_beside_captures()
    return exchange and exchange(None)


def answer(kind: str, *loaded: Path) -> int | None:
    return cast("int | None", run_ranks(ask, 1, kind, loaded, stand_in=False)[0].value)


@needs_compiler
@pytest.mark.parametrize("kind", ["hip", "cuda"])
@needs_no_other
def test_of_two_runtimes_the_one_of_torch_is_asked(tmp_path: Path, kind: str) -> None:
    """Another library of the process may have loaded a newer one, which does not know torch's threads."""
    function = f"{kind}ThreadExchangeStreamCaptureMode"
    stem = {"hip": "libamdhip64.so", "cuda": "libcudart.so"}[kind]
    newer, older = (
        library(tmp_path / f"{stem}.{version}", RUNTIME.format(function=function, version=version))
        for version in (7, 6)
    )
    of_torch = library(tmp_path / f"libc10_{kind}.so", "int c10(void) { return 0; }", older)
    assert answer(kind, newer, of_torch) == 6
    assert answer(kind, of_torch, newer) == 6
    assert answer(kind, newer) is None, "one that torch does not use was asked"


@needs_compiler
@needs_no_other
def test_a_runtime_within_torch_leaves_the_driver(tmp_path: Path) -> None:
    source = RUNTIME.format(function="cuThreadExchangeStreamCaptureMode", version=12)
    driver_library = library(tmp_path / "libcuda.so.1", source)
    of_torch = library(tmp_path / "libc10_cuda.so", "int c10(void) { return 0; }")
    assert answer("cuda", of_torch, driver_library) == 12


STREAMS = """
int {function}(void **stream, unsigned flags) {{ *stream = (void *)(0x100L * flags + {number}); return {code}; }}
"""


def stream_of(rank: int, size: int, kind: str, loaded: Sequence[Path]) -> list[Any]:
    """The streams of two copiers of one device."""
    setattr(torch.version, kind, "1")
    for path in loaded:
        ctypes.CDLL(str(path))
    cuda = cast("Any", torch.cuda)
    cuda.device, cuda.ExternalStream = nullcontext, lambda pointer, _device: pointer
    cuda.Stream = lambda _device: "one of 32"
    return [driver.separate_stream(torch.device("cuda", 0)) for _ in range(2)]


@needs_compiler
@pytest.mark.parametrize("kind", ["hip", "cuda"])
@needs_no_other
def test_copies_have_a_stream_that_nobody_else_is_given(tmp_path: Path, kind: str) -> None:
    def streams(code: int) -> object:
        folder = tmp_path / str(code)
        folder.mkdir()
        source = STREAMS.format(function=f"{kind}StreamCreateWithFlags", number=7, code=code)
        of_torch = library(folder / f"libc10_{kind}.so", source)
        return run_ranks(stream_of, 1, kind, [of_torch], stand_in=False)[0].value

    assert streams(0) == [0x107, 0x107], "made once, and not to wait for the default stream"
    assert streams(2) == ["one of 32"] * 2, "the runtime refuses"


# --- which cores background threads run on, and that only the calling thread moves ---


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


@pytest.mark.parametrize("wanted", [{99999}, set(), {-1}, {1 << 70}])
def test_a_refused_pin_is_a_warning(wanted: set[int], caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    with caplog.at_level(logging.WARNING, "ftckpt"):
        assert pin(wanted) is False
    assert caplog.text
    assert os.sched_getaffinity(0) == before
