"""What the runners of all frameworks have in common: they run a training script as ``__main__``."""

from __future__ import annotations

import logging
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ftckpt.errors import ConfigError, FtckptError


def guarded(body: Callable[[], int]) -> int:
    """Run ``body`` and return its exit code; an error of ftckpt ends in one line on stderr and code 2."""
    try:
        return body()
    except FtckptError as error:
        print(f"ftckpt: {error}", file=sys.stderr, flush=True)
        return 2


def script_path(name: str, usage: str) -> Path:
    """The script that is to run.

    Raises:
        ConfigError: there is none of that name.
    """
    path = Path(name)
    if name.startswith("-") or not path.is_file():
        raise ConfigError(f"script {name!r} does not exist; usage: {usage}")
    return path.resolve()


def prepare(script: Path, arguments: Sequence[str]) -> None:
    """Make ``sys.argv`` and the place of imports those of a script that was started by itself."""
    sys.path[0] = str(script.parent)
    sys.argv = [str(script), *arguments]


def run(script: Path, ended_well: Callable[[], None]) -> int:
    """Run ``script`` as ``__main__``, then call ``ended_well``; what the script raises goes on to the caller."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    ended_well()
    return 0


def log_to_stderr() -> logging.Logger:
    """Show what ftckpt tells; a second call adds nothing."""
    log = logging.getLogger("ftckpt")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    return log


def check_device(device: str) -> bool:
    """Whether ``FTCKPT_DEVICE`` asks for the stand-in that trains on a machine without a GPU.

    Raises:
        ConfigError: it is neither empty nor one of ``cpu``, ``cuda``.
    """
    if device not in ("", "cuda", "cpu"):
        raise ConfigError(f"FTCKPT_DEVICE: {device!r} is not one of cpu, cuda")
    return device == "cpu"
