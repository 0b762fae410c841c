"""The runner: ``torchrun ... -m ftckpt.deepspeed SCRIPT ARGS...``, or ``deepspeed --module ftckpt.deepspeed ...``."""

from functools import partial

from ftckpt.frameworks import launcher
from ftckpt.runner.worker import main

if __name__ == "__main__":
    launcher.leave(partial(main, framework="deepspeed"))
