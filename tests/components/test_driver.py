"""Which of several runtimes of one process is asked: the one that torch is linked to."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ftckpt.capture import driver
from tests.support.pool import run_ranks

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
