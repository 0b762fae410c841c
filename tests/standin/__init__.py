"""The CPU stand-in for CUDA: unmodified Megatron trains on a machine without a GPU, over gloo.

For tests, benchmarks and the demo: FTCKPT_DEVICE=tests.standin:cpu. What is stood in, and why:

* `torch.cuda` (cuda.py): Megatron refuses to start without it, and waits on its streams.
* tensor factories and `Tensor` methods (cuda.py): `device="cuda"` is written out everywhere.
* `torch.distributed` (distributed.py): "nccl" becomes gloo, and gloo learns what only NCCL does.
* details of Megatron's modules (megatron.py), fixed when those modules are imported.
* `multiprocessing`: processes that are spawned get the stand-in too, before they import anything else. Megatron's
  checkpoint writers spawn: such a child starts a new interpreter and imports the training script again, which fails
  without CUDA. Forked children have the stand-in from their parent.
* the compiler: 0.16.1 compiles its fused functions at first use, minutes on a small machine; eager
  execution gives the same bits in every run.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.standin.cuda import install_cuda, install_tensor
from tests.standin.distributed import install_distributed
from tests.standin.megatron import install_megatron

_ROOT = str(Path(__file__).resolve().parents[2])
# As `-c` starts the child, its sys.path need not hold this package yet: the parent's is passed on later.
_PROLOGUE = (
    f"import sys; sys.path.append({_ROOT!r}); from tests import standin; standin.install(); "
    "standin.end_with({parent}); "
)
_POLL_SECS = 0.5
_installed = False


def cpu(framework: str) -> None:
    """Prepare this process to train with ``framework``; what the runners call by FTCKPT_DEVICE."""
    if framework == "deepspeed":
        from tests.standin import deepspeed

        deepspeed.install()
    else:
        install()
        # As many ranks as cores, or more: threads of each would get in each other's way.
        torch.set_num_threads(1)


def install() -> None:
    """Replaces CUDA in this process, once; before or after megatron.core has been imported."""
    global _installed
    if _installed:
        return
    _installed = True
    _disable_compiler()
    install_cuda()
    install_tensor()
    install_distributed()
    install_megatron()
    multiprocessing.spawn.get_command_line = _with_prologue(multiprocessing.spawn.get_command_line)
    # 0.16.1 calls collectives by their older names.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def _disable_compiler() -> None:
    # Imported here because it indexes torch's functions, which must still be the real ones;
    # the first optimizer would import it anyway.
    import torch._dynamo.config

    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    torch._dynamo.config.disable = True

    def compile_(model: Any = None, **_kwargs: Any) -> Any:
        return model if model is not None else (lambda function: function)

    torch.compile = compile_


def end_with(parent: int) -> None:
    """End this process once its parent has ended, which may be killed, or leave without cleaning up."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECS)
        os._exit(1)

    threading.Thread(target=watch, name="ends-with-parent", daemon=True).start()


def _with_prologue(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(original)
    def get_command_line(**kwargs: object) -> list[str]:
        line = original(**kwargs)
        if "-c" in line:  # not in a frozen program
            program = line.index("-c") + 1
            line[program] = _PROLOGUE.format(parent=os.getpid()) + line[program]
        return line

    return get_command_line
