#!/usr/bin/env bash
# The SMP of this node, as a step of its own, which slurm.sh starts: smp_step.sh JOB ARENA [PERSISTS]
#
# Slurm signals this step where it ends the job at once (scancel, requeue, preemption) and starts no more steps: the batch
# script then reaches no other node. So what memory has is saved from here, where PERSISTS is not empty, and removed.

set -euo pipefail
NAME=smp_step.sh
HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/job.sh
source "$HERE/job.sh"

PYTHON=${FTCKPT_PYTHON:-python3}
SAVE_SECS=${FTCKPT_SAVE_SECS:-90}
JOB=$1
ARENA=$2
PERSISTS=${3:-}
CLEAN_SECS=30 # longest wait for ranks to end
TOLD=
trap 'TOLD=1' TERM

# In a process group of its own: what tells this step to end must not end the SMP, which saves.
set -m
"$PYTHON" -m ftckpt.smp --job "$JOB" --arena "$ARENA" --node "${FTCKPT_NODE:-$SLURMD_NODENAME}" </dev/null &
SMP=$!
set +m
code=0
wait "$SMP" || code=$?
[ -n "$TOLD" ] || exit "$code"

trap '' TERM
save_here || true
deadline=$((SECONDS + CLEAN_SECS))
until "$PYTHON" -m ftckpt.commands.main clean "$JOB" --arena "$ARENA" >/dev/null 2>&1 || ((SECONDS >= deadline)); do
    sleep 0.5
done
kill -TERM "$SMP" 2>/dev/null || true
wait "$SMP" || true
exit 143
