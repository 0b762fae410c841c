#!/usr/bin/env bash
# Trains with a checkout of Megatron-LM, patched and not, on four CPU ranks (TP2 x PP2): undisturbed; patched, with
# ftckpt off; patched, with ftckpt on and one rank killed; the same under the runner; and unpatched under the runner.
# Succeeds if all logs show the same losses, learning rates, gradient norms and consumed samples.
#
#   bash tests/probe/run.sh patches DIR [pretrain_gpt.py flags...]
#
# DIR is a checkout at a release that has a patch (patches/apply.sh --list); it is copied and left as it is. Releases
# from 0.17 on need Python 3.12: name an environment of its own with FTCKPT_VENV, and the interpreter that makes it
# with FTCKPT_PYTHON. KILL_AFTER (default 5): snapshots of rank 1 before it is killed.

set -euo pipefail
NAME=probe
# shellcheck source=launch/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../launch/environment.sh"

case "${1:-}" in
-h | --help)
    sed -n "2,/^$/s/^# \{0,1\}//p" "${BASH_SOURCE[0]}"
    exit
    ;;
*) [ -f "${1:-}/pretrain_gpt.py" ] || fail "$1: no checkout of Megatron-LM" ;;
esac
prepare megatron
pip_install six regex pybind11 omegaconf 2>/dev/null || fail "pip could not install what Megatron-LM imports"

WORK=$(mktemp -d)
JOB=check-$$
trap 'rm -rf "$WORK"; "$VENV/bin/ftckpt" clean "$JOB" >/dev/null 2>&1 || true' EXIT
TREE=$WORK/megatron-lm
mkdir "$TREE" "$WORK/original" "$WORK/stand-in"
cp -r "$1"/megatron "$1"/*.py "$TREE"
cp -r "$TREE"/. "$WORK/original"
shift

# Patched scripts run without the runner, which would put the CPU stand-in into their processes.
cat >"$WORK/stand-in/sitecustomize.py" <<'END'
import os

if "LOCAL_RANK" in os.environ:
    from tests.support import standin

    standin.install()
END

# Megatron-LM builds its data set helpers with make, which asks python3 and python3-config; pyenv goes by this.
PYENV_VERSION=$("$PYTHON" -c 'import platform; print(platform.python_version())')
export PYENV_VERSION PATH="$VENV/bin:$PATH"
# Git in the tree's surroundings is none of its business: megatron-core would put that commit into its version.
export NO_VCS_VERSION=1

# train LOG flags...: the script as it is, or as the runner runs it where RUNNER=yes.
train() {
    local log=$1 site=$WORK/stand-in script=("$TREE/pretrain_gpt.py") device=
    shift
    if [ "${RUNNER:-}" = yes ]; then
        site=$TREE device=tests.support.standin:cpu script=(-m ftckpt.megatron "$TREE/pretrain_gpt.py")
    fi
    FTCKPT_DEVICE=$device OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo TORCHDYNAMO_DISABLE=1 \
        CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONWARNINGS=ignore PYTHONPATH="$site:$ROOT" \
        "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4 --max-restarts 2 --monitor-interval 0.1 \
        "${script[@]}" \
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer \
        --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 \
        --micro-batch-size 2 --global-batch-size 8 --train-iters 14 --lr 1e-3 --min-lr 1e-4 \
        --lr-warmup-iters 2 --lr-decay-iters 100 --clip-grad 1.0 --weight-decay 0.01 --bf16 --seed 1234 \
        --hidden-dropout 0.1 --attention-dropout 0.1 --eval-interval 5 --eval-iters 1 --log-interval 3 \
        --distributed-timeout-minutes 2 --distributed-backend gloo --transformer-impl local \
        --use-cpu-initialization --no-gradient-accumulation-fusion --no-persist-layer-norm \
        --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --mock-data \
        --tokenizer-type NullTokenizer --vocab-size 1000 --data-cache-path "$WORK/cache" \
        "${FLAGS[@]}" "$@" >"$log.log" 2>&1
}
FLAGS=("$@")

# rows LOG: iteration, losses, learning rate, gradient norm, consumed samples; not the time they took, nor
# what another process wrote into the same line. An iteration that was trained again has two rows, which must be equal.
rows() {
    grep -E 'iteration .*lm loss|validation loss' "$1.log" |
        sed -E 's/.*(iteration +[0-9]+\/|validation loss)/\1/; s/elapsed[^|]*\|//; s/(nan iterations: +[0-9]+ \||PPL: [^|]*\|).*/\1/' |
        awk '!seen[$0]++'
}

# same LOG: fails unless it shows the rows of the undisturbed run.
same() {
    rows "$1" >"$1.rows"
    diff "$WORK/reference.rows" "$1.rows" || fail "the logs differ"
    say "identical: $(wc -l <"$1.rows") log lines"
}

broken() {
    grep -m 3 -E 'Error|^ftckpt:' "$1.log" || true
    tail -n 20 "$1.log"
    fail "$2"
}

# faulted LOG: trains with ftckpt on and kills rank 1; what it ends with must be the reference's.
faulted() {
    local log=$1 events=$1.events training victim=
    train "$log" --ftckpt --ftckpt-job "$JOB" --ftckpt-events "$events" &
    training=$!
    for _ in $(seq 3000); do
        sleep 0.05
        kill -0 "$training" 2>/dev/null || break
        [ "$(grep -c '"snapshot"' "$events/rank1.jsonl" 2>/dev/null || true)" -ge "${KILL_AFTER:-5}" ] 2>/dev/null ||
            continue
        victim=$(tail -n 1 "$events/rank1.jsonl" | sed -E 's/.*"pid": ([0-9]+).*/\1/')
        kill -9 "$victim"
        break
    done
    wait "$training" || broken "$log" "the job did not come back"
    [ -n "$victim" ] || fail "no rank was killed: the run was too short"
    say "killed rank 1, process $victim; $(grep -o 'iteration [0-9]* from memory.*' "$log.log" | tail -n 1)"
    grep -q '"restored".*"iteration": [0-9]' "$events/rank1.jsonl" || fail "nothing was restored"
    grep -q '"planned"' "$events/rank1.jsonl" || fail "no windows were measured: the schedule was not listened to"
    grep -q '"fence"' "$events/rank1.jsonl" || fail "no step was fenced"
    [ ! -e "/dev/shm/ftckpt-$JOB" ] || fail "the job ended well and its arenas are still there"
    same "$log"
}

say "Python $PYENV_VERSION, torch $("$PYTHON" -c 'import torch; print(torch.__version__)')"
say "training undisturbed"
train "$WORK/reference" || broken "$WORK/reference" "the undisturbed run failed"
rows "$WORK/reference" >"$WORK/reference.rows"

say "unpatched, under the runner"
RUNNER=yes faulted "$WORK/hooked"

"$ROOT/patches/apply.sh" "$TREE"
say "patched, ftckpt off"
train "$WORK/off" || broken "$WORK/off" "the patched tree fails with ftckpt off"
same "$WORK/off"
say "patched, ftckpt on"
faulted "$WORK/patched"
say "patched, under the runner"
RUNNER=yes faulted "$WORK/both"
grep -q 'own lines act.*megatron.core.pipeline_parallel.schedules.*megatron.training.training' "$WORK/both.log" ||
    fail "the runner did not say that the tree is patched"

"$ROOT/patches/apply.sh" "$TREE" --reverse
diff -r --exclude='__pycache__' --exclude='helpers_cpp*' "$WORK/original" "$TREE" || fail "--reverse left something"
say "ok: $(sed -nE 's/^(MAJOR|MINOR|PATCH) = //p' "$TREE/megatron/core/package_info.py" | paste -sd .)"
