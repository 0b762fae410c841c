#!/usr/bin/env bash
# Trains with Megatron-LM's own pretrain_gpt.py on eight CPU ranks (TP2 x PP2 x DP2) twice: undisturbed, and under ftckpt
# with one rank killed. Succeeds if both logs show the same losses, learning rates, gradient norms and consumed samples.
#
#   bash launch/check_megatron_lm.sh DIR [pretrain_gpt.py flags...]
#
# DIR is a checkout of Megatron-LM at core_v0.16.1. KILL_AFTER (default 5): snapshots of rank 5 before it is killed.

set -euo pipefail
NAME=check
# shellcheck source=launch/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

[ -f "${1:-}/pretrain_gpt.py" ] || fail "usage: $0 DIR [flags]; DIR holds a checkout of Megatron-LM"
MEGATRON=$(cd "$1" && pwd)
shift
prepare "$ALL_EXTRAS"
pip_install six regex pybind11
# The wheel has the data set helpers built.
cp -n "$("$PYTHON" -c 'import megatron.core as m; print(m.__path__[0])')"/datasets/helpers_cpp*.so \
    "$MEGATRON/megatron/core/datasets/"

# Megatron-LM asks make, and make asks python3-config, whether they fit; its checkout pins another Python for pyenv.
PYENV_VERSION=$("$PYTHON" -c 'import platform; print(platform.python_version())')
export PYENV_VERSION

WORK=$(mktemp -d)
JOB=check-$$
trap 'rm -rf "$WORK"; "$VENV/bin/ftckpt" clean "$JOB" >/dev/null 2>&1 || true' EXIT

train() {
    FTCKPT_DEVICE=cpu OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo TORCHDYNAMO_DISABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=1 \
        PYTHONWARNINGS=ignore PYTHONPATH="$ROOT:$MEGATRON" \
        "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 8 --max-restarts 3 --monitor-interval 0.1 \
        -m ftckpt.megatron "$MEGATRON/pretrain_gpt.py" \
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer \
        --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 \
        --micro-batch-size 2 --global-batch-size 16 --train-iters 10 --lr 1e-3 --min-lr 1e-4 \
        --lr-warmup-iters 2 --lr-decay-iters 100 --clip-grad 1.0 --weight-decay 0.01 --bf16 --seed 1234 \
        --hidden-dropout 0.1 --attention-dropout 0.1 --eval-interval 3 --eval-iters 1 --log-interval 1 \
        --distributed-timeout-minutes 2 --distributed-backend gloo --transformer-impl local \
        --use-cpu-initialization --no-gradient-accumulation-fusion --no-persist-layer-norm \
        --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --mock-data \
        --tokenizer-type NullTokenizer --vocab-size 1000 --data-cache-path "$WORK/cache" "$@"
}

# rows LOG: iteration, losses, learning rate, gradient norm, consumed samples; not the time they took, nor
# what another process wrote into the same line.
rows() {
    grep -E 'iteration .*lm loss|validation loss' "$1" | sed -E 's/^ *\[[^]]*\] *//; s/elapsed[^|]*\|//; s/(nan iterations: +[0-9]+ \||PPL: [^|]*\|).*/\1/'
}

say "training undisturbed"
train "$@" >"$WORK/reference.log" 2>&1 || { grep -m 3 Error "$WORK/reference.log"; tail -n 20 "$WORK/reference.log"; fail "the undisturbed run failed"; }
say "training under ftckpt"
train "$@" --ftckpt --ftckpt-job "$JOB" --ftckpt-events "$WORK/events" >"$WORK/faulted.log" 2>&1 &
TRAINING=$!
for _ in $(seq 3000); do
    sleep 0.05
    kill -0 "$TRAINING" 2>/dev/null || break
    [ "$(grep -c '"snapshot"' "$WORK/events/rank5.jsonl" 2>/dev/null || true)" -ge "${KILL_AFTER:-5}" ] 2>/dev/null || continue
    victim=$(tail -n 1 "$WORK/events/rank5.jsonl" | sed -E 's/.*"pid": ([0-9]+).*/\1/')
    kill -9 "$victim"
    say "killed rank 5, process $victim"
    break
done
[ -n "${victim:-}" ] || fail "no rank was killed: the run was too short"
wait "$TRAINING" || { tail -n 20 "$WORK/faulted.log"; fail "the job did not come back"; }
grep -o 'iteration [0-9]* from memory.*' "$WORK/faulted.log" | tail -n 1
rows "$WORK/reference.log" >"$WORK/reference.rows"
# An iteration that was trained again has two rows, which must be equal.
rows "$WORK/faulted.log" | awk '!seen[$0]++' >"$WORK/faulted.rows"
diff "$WORK/reference.rows" "$WORK/faulted.rows" || fail "the logs differ"
say "identical: $(wc -l <"$WORK/reference.rows") log lines"
