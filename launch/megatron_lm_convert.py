"""``ftckpt convert`` between two jobs of check_megatron_lm.py: from arenas, and from Megatron-LM's own checkpoint."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launch.demo_frameworks import ROOT
from launch.demo_run import ARENA
from launch.megatron_lm_run import CheckError, Run

Tell = Callable[[str], None]
_SECS = 300.0


def converted(job: str, reference: Run, folder: Path, tell: Tell) -> Iterator[tuple[str, Path]]:
    """What Megatron-LM shall load: what it is, and the directory for ``--load``.

    The newest snapshot of ``job``, and the oldest checkpoint of ``reference``, that one by way of the universal form.

    Raises:
        CheckError: a conversion failed.
    """
    arenas = ARENA / f"ftckpt-{job}"
    _convert(arenas, folder / "snapshot", "megatron-dist", tell)
    yield "snapshot", folder / "snapshot"
    saved = sorted(path for path in reference.storage.glob("iter_*") if path.is_dir())
    if not saved:
        raise CheckError(f"{reference.storage} has no checkpoint")
    _convert(saved[0], folder / "universal", "universal", tell)
    _convert(folder / "universal", folder / "checkpoint", "megatron-dist", tell)
    yield "checkpoint", folder / "checkpoint"


def _convert(source: Path, destination: Path, to: str, tell: Tell) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    command = [sys.executable, "-m", "ftckpt.cli", "convert", str(source), str(destination), "--to", to, "--verify"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_SECS, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise CheckError(f"ftckpt convert --to {to}: exit code {done.returncode}: {' '.join(last)}")
    origin = done.stdout.partition("\n")[0].removeprefix("source").strip()
    tell(f"  {origin}, converted to {to}: {time.monotonic() - begin:.0f} s")
