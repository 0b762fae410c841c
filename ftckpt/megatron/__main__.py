"""The runner: ``torchrun ... -m ftckpt.megatron SCRIPT ARGS... --ftckpt [--ftckpt-interval 1 ...]``."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ftckpt.config import Config, add_flags
from ftckpt.errors import ConfigError, FtckptError
from ftckpt.megatron import patched

_USAGE = "torchrun ... -m ftckpt.megatron SCRIPT ARGS... --ftckpt [--ftckpt-interval N ...]"


def main(argv: Sequence[str]) -> int:
    """Run a training script as ``__main__`` with ftckpt's hooks in place; returns the exit code.

    Errors of ftckpt end in one line on stderr and exit code 2; anything else is the script's own.
    """
    if not argv or argv[0] in ("-h", "--help"):
        add_flags(argparse.ArgumentParser(prog="ftckpt.megatron", usage=_USAGE, add_help=False)).print_help()
        return 0 if argv else 2
    try:
        config, arguments = Config.from_flags(argv[1:])
        script = _script(argv[0])
        _stand_in(os.environ.get("FTCKPT_DEVICE", ""))
        sys.path[0] = str(script.parent)
        sys.argv = [str(script), *arguments]
        if config.enabled:
            _install(config)
        return _run(script)
    except FtckptError as error:
        print(f"ftckpt: {error}", file=sys.stderr, flush=True)
        return 2


def _run(script: Path) -> int:
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    patched.close()
    return 0


def _install(config: Config) -> None:
    patched.switch_on(config)
    from ftckpt.megatron import hooks, training_loop

    hooks.install()
    homes = hooks.patched_modules()
    if training_loop.available():
        training_loop.install()
        homes += training_loop.patched_modules()
    if homes and os.environ.get("RANK", "0") == "0":
        log = logging.getLogger("ftckpt")
        log.info("ftckpt: patched, so that their own lines act and no run-time hooks: %s", ", ".join(homes))


def _script(name: str) -> Path:
    path = Path(name)
    if name.startswith("-") or not path.is_file():
        raise ConfigError(f"script {name!r} does not exist; usage: {_USAGE}")
    return path.resolve()


def _stand_in(device: str) -> None:
    """``FTCKPT_DEVICE=cpu`` trains on a machine without a GPU, for tests and trying things out."""
    if device == "cpu":
        importlib.import_module("ftckpt.testing.cpu").install()
    elif device not in ("", "cuda"):
        raise ConfigError(f"FTCKPT_DEVICE: {device!r} is not one of cpu, cuda")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
