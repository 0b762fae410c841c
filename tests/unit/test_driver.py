"""Which of several runtimes of one process is asked: the one that torch is linked to."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import cast

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
    flags = [
        "-shared",
        "-fPIC",
        "-nostdlib",
        "-Wl,--no-as-needed",
        f"-Wl,-soname,{path.name}",
        f"-Wl,-rpath,{path.parent}",
    ]
    subprocess.run(["cc", *flags, "-o", path, code, *linked], check=True)
    return path


def ask(rank: int, size: int, kind: str, loaded: Sequence[Path]) -> int | None:
    """What the runtime answers that is asked in a process that has loaded these libraries, in this order."""
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
    """Another library of the process may have brought a newer one, in which torch's threads are not known."""
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


def test_what_is_not_loaded_stays_so() -> None:
    with pytest.raises(OSError, match="no library libftckpt-none"):
        driver.loaded("libftckpt-none")
    assert driver.loaded("libc.so") is not None
