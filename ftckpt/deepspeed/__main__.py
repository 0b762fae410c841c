"""The runner: ``torchrun ... -m ftckpt.deepspeed SCRIPT ARGS...``, or ``deepspeed --module ftckpt.deepspeed ...``.

The section ``"ftckpt"`` of DeepSpeed's JSON switches ftckpt on; ``--ftckpt*`` flags may do so too, and add to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import ftckpt.deepspeed
from ftckpt.deepspeed import active_engine, section
from ftckpt.frameworks import doors, launcher
from ftckpt.job.garbage import imports_that_stay

_USAGE = (
    'torchrun ... -m ftckpt.deepspeed SCRIPT ARGS... [--ftckpt ...]  (or "ftckpt": {"enabled": true} in the JSON)'
)


def main(argv: Sequence[str]) -> int:
    """Run a training script as ``__main__`` with ``deepspeed.initialize`` wrapped; returns the exit code."""
    return launcher.main(argv, "ftckpt.deepspeed", _USAGE, _run, lambda words: section.foreseen(words).job)


def _run(argv: Sequence[str]) -> int:
    # DeepSpeed's launcher puts this before all arguments; it is meant for the script.
    first = [argv[0]] if argv[0].startswith(("--local_rank", "--local-rank")) else []
    words = argv[len(first) :]
    settings, arguments = section.from_flags(words[1:])
    section.configure(settings)
    script = launcher.script_path(words[0] if words else "", _USAGE)
    with imports_that_stay():
        launcher.stand_in("deepspeed")
        launcher.prepare(script, [*first, *arguments])
        config = section.foreseen(arguments)
        doors.prepare_storage(config)
        launcher.isolate()  # whether ftckpt is on is in a JSON that nobody has read yet
    # An engine is destroyed after an error too; how the script ends is known here alone.
    active_engine.leave_the_end_to_the_runner()
    return launcher.run(script, ftckpt.deepspeed.close)


if __name__ == "__main__":
    launcher.leave(main)
