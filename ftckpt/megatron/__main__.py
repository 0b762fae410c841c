"""The runner: ``torchrun ... -m ftckpt.megatron SCRIPT ARGS... --ftckpt [--ftckpt-interval 1 ...]``."""

from __future__ import annotations

from collections.abc import Sequence

from ftckpt.config import Config
from ftckpt.frameworks import launcher
from ftckpt.job.garbage import imports_that_stay
from ftckpt.megatron import callbacks

_USAGE = "torchrun ... -m ftckpt.megatron SCRIPT ARGS... --ftckpt [--ftckpt-interval N ...]"


def main(argv: Sequence[str]) -> int:
    """Run a training script as ``__main__`` with ftckpt's hooks in place; returns the exit code."""
    return launcher.main(argv, "ftckpt.megatron", _USAGE, _run)


def _run(argv: Sequence[str]) -> int:
    config, arguments = Config.from_flags(argv[1:])
    script = launcher.script_path(argv[0], _USAGE)
    with imports_that_stay():
        # Before torch is used: Megatron and the script find CUDA, or the stand-in, when they are imported.
        launcher.stand_in("megatron")
        launcher.prepare(script, arguments)
        if config.enabled:
            callbacks.switch_on(config)
            from ftckpt.megatron import hooks

            hooks.install()
            patched = hooks.install_in_train_loop()
            if patched:
                launcher.log_once(
                    "patched, so that their own lines act and no run-time hooks: %s", ", ".join(patched)
                )
    return launcher.run(script, callbacks.close)


if __name__ == "__main__":
    launcher.leave(main)
