"""What a node trains with: hardware and versions, without which no number of a report means anything."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = {"ftckpt": "ftckpt", "torch": "torch", "megatron.core": "megatron-core", "deepspeed": "deepspeed"}
"""Distributions by the module that this process has loaded if it uses them."""


def conditions() -> dict[str, Any]:
    """Fields of the event ``conditions``. Never raises: what cannot be learnt is named so."""
    versions = {"python": platform.python_version()}
    for module, name in _PACKAGES.items():
        if module in sys.modules:
            versions[name] = _version(module, name)
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": _device(),
        "versions": versions,
    }


def _version(module: str, name: str) -> str:
    # Of the module where it says so: a look into the package takes milliseconds, and all ranks wait for this one.
    if isinstance(told := getattr(sys.modules[module], "__version__", None), str):
        return told
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _device() -> str:
    # The stand-in for CUDA answers as a device would, and is none.
    if os.environ.get("FTCKPT_DEVICE") or not torch.cuda.is_available():
        return "cpu"
    with suppress(RuntimeError, AssertionError):
        return torch.cuda.get_device_name()
    return "unknown"
