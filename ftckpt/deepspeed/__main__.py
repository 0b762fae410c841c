"""The runner: ``torchrun ... -m ftckpt.deepspeed SCRIPT ARGS...``, or ``deepspeed --module ftckpt.deepspeed ...``.

The section ``"ftckpt"`` of DeepSpeed's JSON switches ftckpt on; ``--ftckpt*`` flags may do so too, and add to it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import ftckpt.deepspeed
from ftckpt.config import add_flags
from ftckpt.deepspeed import initialize, section
from ftckpt.elastic import runner

_USAGE = (
    'torchrun ... -m ftckpt.deepspeed SCRIPT ARGS... [--ftckpt ...]  (or "ftckpt": {"enabled": true} in the JSON)'
)


def main(argv: Sequence[str]) -> int:
    """Run a training script as ``__main__`` with ``deepspeed.initialize`` wrapped; returns the exit code.

    Errors of ftckpt end in one line on stderr and exit code 2; anything else is the script's own.
    """
    if not argv or argv[0] in ("-h", "--help"):
        add_flags(argparse.ArgumentParser(prog="ftckpt.deepspeed", usage=_USAGE, add_help=False)).print_help()
        return 0 if argv else 2
    return runner.guarded(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    # DeepSpeed's launcher puts this before all arguments; it is meant for the script.
    first = [argv[0]] if argv[0].startswith(("--local_rank", "--local-rank")) else []
    words = argv[len(first) :]
    settings, arguments = section.from_flags(words[1:])
    section.configure(settings)
    script = runner.script_path(words[0] if words else "", _USAGE)
    if runner.check_device(os.environ.get("FTCKPT_DEVICE", "")):
        importlib.import_module("ftckpt.testing.cpu_deepspeed").install()
    runner.prepare(script, [*first, *arguments])
    _isolate()
    initialize.leave_the_end_to_the_runner()
    return runner.run(script, ftckpt.deepspeed.close)


def _isolate() -> None:
    from ftckpt.elastic.rendezvous import isolate_attempts

    log = runner.log_to_stderr()
    rendezvous = isolate_attempts()
    if os.environ.get("RANK", "0") == "0":
        log.info("ftckpt: rendezvous: %s", rendezvous)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
