"""Fresh Python interpreters, in which ftckpt is that of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.repository import ROOT


def run_python(code: str, *arguments: object, secs: float = 60.0, **env: str) -> subprocess.CompletedProcess[str]:
    """One that has run ``code`` to its end, with more variables in its environment."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, env={**os.environ, **env},
        capture_output=True, text=True, timeout=secs, check=False,
    )  # fmt: skip


def python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """One that runs ``code`` and has said its first line, which is ``up``."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, **options)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


@contextmanager
def running(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """As ``python``; it is killed at the end of the block."""
    process = python(code, *arguments)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)
