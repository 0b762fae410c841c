"""Trains Megatron-LM's own pretrain_gpt.py on CPU ranks twice per scene, undisturbed and under ftckpt with ranks
killed, and compares what both log: losses, learning rates, consumed samples, gradient norms, loss scales, norms of
the parameters, validation losses. Everything but times must be equal to the last digit.

Where a checkpoint on storage is newer than memory, Megatron-LM resumes by itself: then the lines must be those of a
run without ftckpt that begins at the same checkpoint.

Where the layout changes, losses and norms may differ by rounding, in the fifth digit of a loss; the difference is
printed, and all else must be equal (but zeros in gradients, which are not compared). In the scene reshape ftckpt
changes the layout between two launches of the same command. In the scene convert Megatron-LM loads what ftckpt
convert wrote, without ftckpt: in the same layout its lines must be those of the undisturbed run to the last digit.
These scenes have no dropout, whose masks follow from a layout and from generators, which ftckpt convert does not
carry over.

Flags that are not listed here join those of the scenes; --ftckpt-name=value goes to the disturbed runs alone.
"""

from __future__ import annotations

import re

from tests.probe.program import Program
from tests.probe.scenes import COMMON, SCENES

PROGRAM = Program(
    name="megatron-lm",
    about=__doc__,
    checkout="a checkout of Megatron-LM, core_v0.16.1",
    runner="ftckpt.megatron",
    common=COMMON,
    scenes=SCENES,
    row=re.compile(r"iteration .*lm loss|validation loss at iteration|number of skipped iterations"),
    times=re.compile(r"^\[[^]]*\] *| elapsed time per iteration[^|]*\|"),
    end="on test set",
    checkpoint="iter_{:07d}",
    newest=("latest_checkpointed_iteration.txt", "{}"),
    data=lambda cache: ["--data-cache-path", str(cache)],
)
