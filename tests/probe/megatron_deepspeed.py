"""Trains Megatron-DeepSpeed's own pretrain_gpt.py on CPU ranks twice per scene, undisturbed and under ftckpt with
ranks killed, and compares what both log: losses, learning rates, gradient norms, consumed samples and tokens, loss
scales, validation losses. Everything but times must be equal, and losses, rates and norms of each iteration to the
last bit.

ftckpt is switched on in DeepSpeed's JSON. Where a checkpoint on storage is newer than memory, the script resumes from
it: then the lines must be those of a run without ftckpt that begins at the same checkpoint.

What the script needs to train without a GPU is in tests/probe/standin/sitecustomize.py; both runs have it.

Flags that are not listed here join those of the scenes; --ftckpt-name=value goes to the disturbed runs alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.probe.lines import after
from tests.probe.program import Program, in_front
from tests.probe.scenes import NO_DROPOUT, RAMP_UP, ROUNDING, STORAGE, Kill, Scene, layout
from tests.support.processes import RunError

_STANDIN = Path(__file__).parent / "standin"
_COMMON = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --clip-grad 1.0 --weight-decay 0.01 --lr 1e-3 --min-lr 1e-4 --seed 1234 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --eval-interval 3 --eval-iters 1 --num-workers 0 "
    "--log-interval 1 --distributed-timeout-minutes 2 --distributed-backend gloo --use-cpu-initialization "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--tokenizer-type NullTokenizer --vocab-size 1000 --data-impl mmap --deepspeed"
)
_ENV = {
    "DS_ACCELERATOR": "cpu",
    # TorchScript's backward rounds differently in the first calls of a process: no restart could be equal.
    "PYTORCH_JIT": "0",
}
_MAKE_DATA = """
import sys
import torch
from megatron.data.indexed_dataset import make_builder
builder = make_builder(sys.argv[1] + ".bin", "mmap", 1000)
generator = torch.Generator().manual_seed(1)
for length in torch.randint(40, 200, (400,), generator=generator).tolist():
    builder.add_item(torch.randint(999, (length,), generator=generator))
    builder.end_document()
builder.finalize(sys.argv[1] + ".idx")
"""
_BF16 = {"bf16": {"enabled": True}}
_NO_PIPELINE = "--no-pipeline-parallel"
_LLAMA = (
    "--swiglu --normalization rmsnorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--use-rotary-position-embeddings --no-query-key-layer-scaling"
)
_OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
_RECOMPUTED = "--checkpoint-activations --deepspeed-activation-checkpointing"


def _scene(what: str, flags: str, stage: int, *, json: Mapping[str, Any] = _BF16, **more: Any) -> Scene:
    """A scene of the script with DeepSpeed's JSON: ``json``, and what all have in common."""
    config = {
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 1000,
        "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}, **json,
    }  # fmt: skip
    precision = "--bf16" if "bf16" in json else ""
    return Scene(what, f"{flags} --zero-stage {stage} {precision}", deepspeed=config, **more)


_SCENES: dict[str, Scene] = {
    "zero1": _scene(
        "TP2 PP2 DP2, ZeRO 1, bf16", layout(tp=2, pp=2), 1, ranks=8, kills=(Kill(3), Kill(7, "all"))
    ),
    "fp32": _scene("PP2 DP2, ZeRO 0, fp32", layout(pp=2), 0, json={}, kills=(Kill(3), Kill(7, "all"))),
    "storage": _scene(
        "TP2 PP2, ZeRO 1, bf16, --save and --load, storage older than memory",
        f"{layout(tp=2, pp=2)} {STORAGE}", 1, kills=(Kill(5), Kill(8, "job")),
    ),
    "storage-newer": _scene(
        "PP2 DP2, ZeRO 1, bf16, --save and --load, storage newer than memory: a snapshot each 4 iterations",
        f"{layout(pp=2)} {STORAGE}", 1, ftckpt="--ftckpt-interval 4",
        kills=(Kill(6, "all", on="checkpoint"),), source="storage",
    ),
    "workers": _scene(
        "PP2 DP2, ZeRO 1, bf16, data loader workers, evaluation each 2 iterations of 2 batches",
        f"{layout(pp=2)} --num-workers 2 --eval-interval 2 --eval-iters 2", 1, kills=(Kill(4), Kill(7)),
    ),
    "recomputed": _scene(
        "TP2 PP2, ZeRO 1, bf16, activation checkpointing",
        f"{layout(tp=2, pp=2)} {_RECOMPUTED}", 1, kills=(Kill(5, "all"),),
    ),
    "zero3": _scene("TP2 DP2, ZeRO 3, bf16, no pipeline", f"{layout(tp=2)} {_NO_PIPELINE}", 3),
    "zero2": _scene(
        "DP4, ZeRO 2, bf16, no pipeline, log interval 3", f"{layout()} {_NO_PIPELINE} --log-interval 3", 2,
        kills=(Kill(5),),
    ),
    "fp16": _scene(
        "PP2 DP2, ZeRO 1, fp16 with overflows while the loss scale is found", f"{layout(pp=2)} --fp16", 1,
        json={"fp16": {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 3, "hysteresis": 1}},
        kills=(Kill(3), Kill(6, "all")),
    ),
    "ramp-up": _scene(
        "PP2 DP2, ZeRO 1, bf16, batch size that grows", layout(pp=2), 1, schedule=RAMP_UP, kills=(Kill(4), Kill(9)),
    ),
    "moe": _scene(
        "DP4, 4 experts in EP2, ZeRO 2, bf16, no pipeline",
        f"{layout()} {_NO_PIPELINE} --num-experts 4 --moe-expert-parallel-size 2 --create-moe-param-group", 2,
    ),
    "llama": _scene(
        "Llama-like (SwiGLU, RMSNorm, untied, rotary, no bias), TP2 DP2, ZeRO 1, bf16, no pipeline",
        f"{layout(tp=2)} {_NO_PIPELINE} {_LLAMA} {NO_DROPOUT}", 1,
    ),
    "offload": _scene(
        "DP2, ZeRO 2, bf16, masters and moments on the host, no pipeline",
        f"{layout()} {_NO_PIPELINE} --cpu-optimizer", 2, ranks=2, json={**_BF16, **_OFFLOAD},
    ),
    "storage-gone": _scene(
        "TP2 PP2, ZeRO 1, bf16, --save and --load, all memory lost",
        f"{layout(tp=2, pp=2)} {STORAGE}", 1, kills=(Kill(8, "job", lose="all"),), source="storage",
    ),
    "reshape": _scene(
        "DP4, ZeRO 2, bf16, no pipeline: goes on with half the ranks, then with all of them again",
        f"{layout()} {_NO_PIPELINE} {NO_DROPOUT}", 2, kills=(Kill(4, "job", ranks=2), Kill(7, "job")),
        source=r"memory \d+ in tp1pp1dp4", rounding=ROUNDING,
    ),
}  # fmt: skip


def _data(cache: Path) -> list[str]:
    return ["--data-path", str(cache / "data"), "--data-cache-path", str(cache)]


def _make_data(checkout: Path, cache: Path) -> None:
    if (cache / "data.idx").is_file():
        return
    cache.mkdir(parents=True, exist_ok=True)
    # As a rank has it: only ranks have the stand-in.
    env = {**os.environ, **_ENV, **in_front(checkout, [_STANDIN]), "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, "-c", _MAKE_DATA, str(cache / "data")]
    made = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RunError(f"no data could be made: {made.stderr.strip().splitlines()[-1:]}")


def _switched_on(folder: Path, scene: Scene, flags: Sequence[str]) -> list[str]:
    """The JSON switches ftckpt on; its other settings are flags."""
    section = {"ftckpt": {"enabled": True}} if "--ftckpt" in flags else {}
    path = folder / "ds.json"
    path.write_text(json.dumps({**scene.deepspeed, **section}, indent=2))
    return ["--deepspeed_config", str(path), *(flag for flag in flags if flag != "--ftckpt")]


PROGRAM = Program(
    name="megatron-deepspeed",
    about=__doc__,
    checkout="a checkout of Megatron-DeepSpeed, 4efb479d",
    runner="ftckpt.deepspeed",
    common=_COMMON,
    scenes=_SCENES,
    row=re.compile(
        r"iteration .*lm loss|validation loss at iteration|number of skipped iterations|bits at iteration"
    ),
    times=re.compile(
        r"^\[[^]]*\] *| (?:elapsed time per iteration|samples per second|tokens per gpu per second|TFLOPs)[^|]*\|"
    ),
    end="draw from test set",
    checkpoint="global_step{}",
    newest=("latest", "global_step{}"),
    data=_data,
    after=after,
    switched_on=_switched_on,
    make_data=_make_data,
    env=_ENV,
    path=(_STANDIN,),
)
