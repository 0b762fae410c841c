"""The runner: ``torchrun ... -m ftckpt.megatron SCRIPT ARGS... --ftckpt [--ftckpt-interval 1 ...]``."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from ftckpt.config import Config, add_flags
from ftckpt.elastic import runner
from ftckpt.megatron import patched

_USAGE = "torchrun ... -m ftckpt.megatron SCRIPT ARGS... --ftckpt [--ftckpt-interval N ...]"


def main(argv: Sequence[str]) -> int:
    """Run a training script as ``__main__`` with ftckpt's hooks in place; returns the exit code.

    Errors of ftckpt end in one line on stderr and exit code 2; anything else is the script's own.
    """
    if not argv or argv[0] in ("-h", "--help"):
        add_flags(argparse.ArgumentParser(prog="ftckpt.megatron", usage=_USAGE, add_help=False)).print_help()
        return 0 if argv else 2
    return runner.guarded(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    config, arguments = Config.from_flags(argv[1:])
    script = runner.script_path(argv[0], _USAGE)
    if runner.check_device(os.environ.get("FTCKPT_DEVICE", "")):
        importlib.import_module("ftckpt.testing.cpu").install()
    runner.prepare(script, arguments)
    if config.enabled:
        _install(config)
    return runner.run(script, patched.close)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
