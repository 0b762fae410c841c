"""The stand-in with which DeepSpeed trains on CPUs over gloo, in every precision, without compiling anything.

Its CPU accelerator trains as it is. What is stood in: the claim that this CPU knows no fp16 (torch computes in it,
slowly), and an operator for collectives in shared memory that would be compiled for minutes at first use.
"""

from __future__ import annotations

import os
import warnings

_PRECISIONS = ("float", "half", "bfloat16")


def install() -> None:
    """Prepare this process; before ``deepspeed.init_distributed``. A second call does nothing more."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", r"c10d::\w+: an autograd kernel was not registered", UserWarning)
    import deepspeed.ops
    import torch
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    CPU_Accelerator.is_fp16_supported = lambda self: True
    CPU_Accelerator.supported_dtypes = lambda self: [getattr(torch, name) for name in _PRECISIONS]
