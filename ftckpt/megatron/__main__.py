"""The runner: ``torchrun ... -m ftckpt.megatron SCRIPT ARGS... --ftckpt [--ftckpt-interval 1 ...]``."""

from functools import partial

from ftckpt.frameworks import launcher
from ftckpt.runner.worker import main

if __name__ == "__main__":
    launcher.leave(partial(main, framework="megatron"))
