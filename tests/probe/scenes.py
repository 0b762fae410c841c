"""The scenes of the probe of Megatron-LM: configurations of pretrain_gpt.py, and what happens to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COMMON = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --clip-grad 1.0 --weight-decay 0.01 --lr 1e-3 --min-lr 1e-4 --seed 1234 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --eval-interval 3 --eval-iters 1 --num-workers 0 "
    "--log-interval 1 --log-params-norm --log-num-zeros-in-grad --distributed-timeout-minutes 2 "
    "--distributed-backend gloo --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--no-bias-swiglu-fusion --no-rope-fusion --mock-data --tokenizer-type NullTokenizer --vocab-size 1000"
)
"""Tiny, without fused kernels; evaluation at iterations 3, 6, 9 and at the end."""

ITERATIONS = "--train-iters 9 --lr-warmup-iters 5 --lr-decay-iters 100 --global-batch-size 16"
RAMP_UP = (
    "--train-samples 128 --lr-warmup-samples 70 --lr-decay-samples 1000 --global-batch-size 16 "
    "--rampup-batch-size 4 4 48"
)

BF16 = "--bf16"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
"""For changes of the layout: dropout masks belong to one layout."""
SHARDED = "--use-distributed-optimizer"
LLAMA = (
    "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --disable-bias-linear "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear"
AUX_LOSS = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
EXPERT_BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"

SAVED = "--save {storage} --save-interval 5 --dist-ckpt-optim-fully-reshardable"
STORAGE = "--save {storage} --load {storage} --save-interval 3"


@dataclass(frozen=True)
class Kill:
    """SIGKILL as soon as the last rank begins a snapshot of iteration ``after`` or a later one, or, ``on`` a
    ``checkpoint``, as soon as storage has one of that iteration.

    ``who``: ``one`` (the last rank), ``all`` ranks, or the ``job``, its agent included; a job is then started again,
    on ``ranks`` if not on as many as the scene has, unless ``again`` is False. ``lose``, for a job: in between
    ``one`` arena or ``two`` are deleted, or ``all`` that the job has in memory, as by a reboot.
    """

    after: int
    who: str = "one"
    lose: str = ""
    on: str = "snapshot"
    ranks: int = 0
    again: bool = True


@dataclass(frozen=True)
class Load:
    """pretrain_gpt.py without ftckpt begins at what ``ftckpt convert`` wrote; ``flags`` join those of the scene.

    ``rounding``: see Scene.
    """

    what: str
    flags: str = ""
    ranks: int = 4
    rounding: float = 0.0


@dataclass(frozen=True)
class Scene:
    """``ftckpt`` are flags of the disturbed run alone. ``source``: a pattern of what it is to be restored from last.

    ``rounding``: by how much losses may differ, as a part of their size. ``loads``: the disturbed run is
    not started again; its snapshot is converted and loaded so, and so is what the undisturbed run saved.
    ``deepspeed``: DeepSpeed's JSON, for a program that has one.
    """

    what: str
    flags: str
    ranks: int = 4
    kills: tuple[Kill, ...] = (Kill(4),)
    ftckpt: str = ""
    schedule: str = ITERATIONS
    source: str = "memory"
    rounding: float = 0.0
    loads: tuple[Load, ...] = ()
    deepspeed: Mapping[str, Any] = field(default_factory=dict)


def layout(tp: int = 1, pp: int = 1, ep: int = 1, virtual: int = 1) -> str:
    """Megatron's flags for a layout; ``virtual``: model chunks per stage of the 4 layers."""
    flags = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    if ep > 1:
        flags += f" --expert-model-parallel-size {ep}"
    if virtual > 1:
        flags += f" --num-layers-per-virtual-pipeline-stage {4 // pp // virtual}"
    return flags


ROUNDING = 2e-4

SCENES: dict[str, Scene] = {
    "gpt": Scene(
        "GPT, TP2 PP2 DP2, distributed optimizer, bf16, dropout, data loader workers",
        f"{layout(tp=2, pp=2)} {SHARDED} {BF16} --num-workers 2",
        ranks=8,
        kills=(Kill(3), Kill(7, "all")),
    ),
    "llama": Scene(
        "Llama-like (SwiGLU, RMSNorm, GQA, untied, rotary, no bias), TP2 SP DP2, distributed optimizer, bf16",
        f"{layout(tp=2)} {SHARDED} {BF16} {LLAMA} --sequence-parallel",
    ),
    "llama-pp": Scene(
        "Llama-like, TP2 PP2, bf16, full recomputation, log interval 3",
        f"{layout(tp=2, pp=2)} {BF16} {LLAMA} --log-interval 3 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        kills=(Kill(5, "all"),),
    ),
    "interleaved": Scene(
        "GPT, PP2 VPP2 DP2, distributed optimizer, gradients and gathers overlapped, bf16",
        f"{layout(pp=2, virtual=2)} {SHARDED} {BF16} --overlap-grad-reduce --overlap-param-gather",
    ),
    "fp32": Scene("GPT, DP2, SGD, fp32", f"{layout()} --optimizer sgd", ranks=2),
    "fp16": Scene(
        "GPT, TP2 DP2, distributed optimizer, fp16 with overflows while the loss scale is found",
        f"{layout(tp=2)} {SHARDED} --fp16 --initial-loss-scale 4194304 --loss-scale-window 3 --hysteresis 2",
        kills=(Kill(3), Kill(6, "all")),
    ),
    "fp16-pp": Scene(
        "GPT, TP2 PP2, fp16 with overflows",
        f"{layout(tp=2, pp=2)} --fp16 --initial-loss-scale 4194304 --loss-scale-window 3 --hysteresis 2",
    ),
    "moe": Scene(
        "MoE, EP2 DP4, auxiliary and z losses, distributed optimizer, bf16",
        f"{layout(ep=2)} {SHARDED} {BF16} {EXPERTS} {AUX_LOSS}",
    ),
    "moe-bias": Scene(
        "MoE, PP2 EP2, router with expert bias, bf16",
        f"{layout(pp=2, ep=2)} {BF16} {EXPERTS} {EXPERT_BIAS}",
        kills=(Kill(5, "all"),),
    ),
    "moe-tp": Scene(
        "MoE, TP2 SP EP2 DP2, distributed optimizer, bf16",
        f"{layout(tp=2, ep=2)} {SHARDED} {BF16} {EXPERTS} {AUX_LOSS} --sequence-parallel",
    ),
    "instances": Scene(
        "GPT, DP4, distributed optimizer in two instances, bf16",
        f"{layout()} {SHARDED} {BF16} --num-distributed-optimizer-instances 2",
    ),
    "mtp": Scene(
        "GPT with multi-token prediction, DP2, distributed optimizer, bf16",
        f"{layout()} {SHARDED} {BF16} --mtp-num-layers 1 --position-embedding-type rope",
        ranks=2,
    ),
    "ramp-up": Scene(
        "GPT, TP2 DP2, batch size that grows, cosine decay by samples, bf16",
        f"{layout(tp=2)} {SHARDED} {BF16} --lr-decay-style cosine --start-weight-decay 0.01 --end-weight-decay 0.1 "
        "--weight-decay-incr-style linear",
        schedule=RAMP_UP,
    ),
    "storage": Scene(
        "--save and --load, storage older than memory",
        f"{layout(pp=2)} {SHARDED} {BF16} {STORAGE}",
        kills=(Kill(5), Kill(8, "job")),
    ),
    "storage-async": Scene(
        "--save and --load, --async-save, storage older than memory",
        f"{layout(pp=2)} {SHARDED} {BF16} {STORAGE} --async-save",
        kills=(Kill(4), Kill(8, "all")),
    ),
    "storage-newer": Scene(
        "--save and --load, storage newer than memory: a snapshot each 4 iterations",
        f"{layout(pp=2)} {SHARDED} {BF16} {STORAGE}",
        ftckpt="--ftckpt-interval 4",
        kills=(Kill(6, "all", on="checkpoint"),),
        source="storage",
    ),
    "storage-gone": Scene(
        "--save and --load, all memory lost",
        f"{layout(pp=2)} {SHARDED} {BF16} {STORAGE}",
        kills=(Kill(8, "job", lose="all"),),
        source="storage",
    ),
    "storage-lost": Scene(
        "--save and --load, two arenas lost",
        f"{layout(pp=2)} {SHARDED} {BF16} {STORAGE}",
        kills=(Kill(8, "job", lose="two"),),
        source="storage",
    ),
    "storage-rebuilt": Scene(
        "--save and --load, one arena lost and rebuilt from parity, storage older than memory",
        f"{layout(pp=2)} {SHARDED} {BF16} {STORAGE}",
        kills=(Kill(6, "job", lose="one"),),
        source="node_parity",
    ),
    "reshape": Scene(
        "GPT, TP2 PP2, distributed optimizer, bf16, --ftckpt-layouts: TP2 on half the ranks, then all of them again",
        f"{layout(tp=2, pp=2)} {SHARDED} {BF16} {NO_DROPOUT}",
        kills=(Kill(4, "job", ranks=2), Kill(7, "job")),
        ftckpt="--ftckpt-layouts tp2pp2,tp2pp1",
        source=r"memory \d+ in tp2pp2dp1",
        rounding=ROUNDING,
    ),
    "convert": Scene(
        "GPT, TP2 PP2, distributed optimizer, bf16: a snapshot and a checkpoint converted, loaded without ftckpt",
        f"{layout(tp=2, pp=2)} {SHARDED} {BF16} {NO_DROPOUT}",
        kills=(Kill(5, "job", again=False),),
        loads=(
            Load("tp2pp2dp1"),
            Load("tp1pp1dp2", layout(), ranks=2, rounding=ROUNDING),
            Load("tp1pp2dp1", layout(pp=2), ranks=2, rounding=ROUNDING),
        ),
    ),
    "convert-plain": Scene(
        "Llama-like, TP2, without distributed optimizer, bf16: converted, loaded with it as well",
        f"{layout(tp=2)} {BF16} {LLAMA}",
        ranks=2,
        kills=(Kill(5, "job", again=False),),
        loads=(
            Load("tp2pp1dp1", ranks=2),
            Load("tp1pp2dp1", f"{layout(pp=2)} {SHARDED}", ranks=2, rounding=ROUNDING),
        ),
    ),
    "convert-moe": Scene(
        # Megatron-LM itself does not load EP2 as EP1: there experts have no optimizer of their own.
        "MoE, EP2 DP2, router with expert bias, distributed optimizer, bf16: converted",
        f"{layout(ep=2)} {SHARDED} {BF16} {EXPERTS} {EXPERT_BIAS} {NO_DROPOUT}",
        ranks=2,
        kills=(Kill(5, "job", again=False),),
        loads=(Load("tp1pp1dp2", ranks=2), Load("tp1pp2dp2", layout(pp=2), rounding=ROUNDING)),
    ),
}
