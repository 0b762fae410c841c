"""The device once more, with the other setting of CUDA_DEVICE_MAX_CONNECTIONS, on ROCm of GPU_MAX_HW_QUEUES: of how
many queues a driver makes use.

With one queue (Megatron's setting for tensor parallelism) work starts in the order of the launches, and a copy may
wait behind a kernel of another stream; with several it may overtake. A driver reads it once, where a process first
uses the device: hence a process of its own.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ftckpt.commands.check_thorough import Thorough
from ftckpt.commands.device_bench import FLIGHT_SECS, meet
from ftckpt.commands.findings import FAILED, SKIPPED, Finding
from ftckpt.errors import in_words

QUEUES = "GPU_MAX_HW_QUEUES" if torch.version.hip else "CUDA_DEVICE_MAX_CONNECTIONS"
_KNOWN = ("device", "NUMA", "collectives beside copies")
"""What says nothing anew: which device it is and where, and what one process alone cannot do."""
_AREA, _NAME = "device", "other queues"
_BUSY = "busy or unavailable"
"""What a driver says of a device that has been given to one process alone."""
_RANK_SETTINGS = frozenset(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
_LONGEST_SECS = 10 * FLIGHT_SECS


def look_with_other_queues(arena: Path, nbytes: int, thorough: Thorough) -> Iterator[Finding]:
    """What ``ftckpt check`` finds of the device with the other setting, named by it. Ranks that look together meet
    behind it."""
    setting, environ = other_setting(os.environ)
    print(f"        {_AREA}: all of it once more, {setting}", flush=True)
    options = ["--only", "device", "--one-setting", "--arena", str(arena), "--size", f"{nbytes}B"]
    if thorough.secs:
        options += ["--thorough", str(thorough.secs)]
    if thorough.seed is not None:
        options += ["--seed", str(thorough.seed)]
    # The other process needs as much of the device as this one has had.
    gc.collect()
    torch.cuda.empty_cache()
    try:
        found = _found_by(options, environ, _LONGEST_SECS + thorough.secs)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        found = [Finding(_AREA, _NAME, FAILED, in_words(error), f"set {setting} and check again")]
    meet(thorough.secs)
    if any(one.state == FAILED and _BUSY in one.text for one in found):
        text = f"the device takes one process at a time: run 'ftckpt check --only device --one-setting', {setting}"
        yield Finding(_AREA, f"{_NAME} ({setting})", SKIPPED, text)
        return
    for one in found:
        if one.name not in _KNOWN or one.state == FAILED:
            yield Finding(_AREA, f"{one.name} ({setting})", one.state, one.text, one.remedy, one.figures)


def other_setting(environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """In words, and as the environment of a process that is alone on this rank's device: one queue, or where that is
    set as many as the driver takes."""
    alone = {name: value for name, value in environ.items() if name not in _RANK_SETTINGS and name != QUEUES}
    if environ.get(QUEUES) == "1":
        return f"without {QUEUES}", alone
    return f"{QUEUES}=1", {**alone, QUEUES: "1"}


def _found_by(options: Sequence[str], environ: Mapping[str, str], timeout_secs: float) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "found.json")
        command = [sys.executable, "-m", "ftckpt.commands.main", "check", *options, "--json", str(told)]
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_secs,
            check=False,
        )  # fmt: skip
        if not told.exists():
            lines = done.stderr.strip().splitlines() or ["it says nothing"]
            told_last = next((line for line in lines if _BUSY in line), lines[-1])  # torch adds hints behind it
            raise ValueError(f"ftckpt check ended with status {done.returncode}: {told_last}")
        (rows,) = json.loads(told.read_text())["ranks"].values()
    return [Finding(**row) for row in rows]
