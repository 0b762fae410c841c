#!/usr/bin/env bash
# The SMP of this node, as a step of its own, which slurm.sh starts: smp_step.sh JOB ARENA [PERSISTS]
#
# Slurm signals this step where it ends the job at once (scancel, requeue, preemption) and starts no more steps, so that
# the batch script reaches no other node; or, where a preemption has a GraceTime, as it begins, and the script not at
# all. So what memory has is saved from here where PERSISTS is not empty, and removed once it is on storage. A job that
# is cancelled and saves nothing leaves no memory; one that is requeued may come back to it.

set -euo pipefail
NAME=smp_step.sh
HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/job.sh
source "$HERE/job.sh"
# shellcheck source=launch/smp_process.sh
source "$HERE/smp_process.sh"

PYTHON=${FTCKPT_PYTHON:-python3}
SAVE_SECS=${FTCKPT_SAVE_SECS:-90}
JOB=$1
ARENA=$2
PERSISTS=${3:-}
CLEAN_SECS=30 # longest wait for ranks to end
NODE=${FTCKPT_NODE:-$SLURMD_NODENAME}
run_smp

# is_saved: what memory has is on storage; ranks that still end are waited for.
is_saved() {
    local deadline=$((SECONDS + SAVE_SECS)) said
    [ -n "$PERSISTS" ] && [ -d "$ARENA/ftckpt-$JOB" ] || return 1
    while ((SECONDS < deadline)); do
        save_command $((deadline - SECONDS))
        if said=$("${SAVE[@]}" </dev/null); then
            printf '%s\n' "$said"
            [[ $said == *" is at "* ]] && return 0 || return 1 # or the job wants none at its end
        fi
        sleep 1
    done
    return 1
}

STATE=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T 2>/dev/null) || STATE=
[ "$STATE" != RUNNING ] || preempted || end_smp # this step alone was told to end, or the steps: the job goes on
if [ -z "$PERSISTS" ]; then
    ! comes_back || end_smp
elif ! is_saved; then
    say "nothing came to storage from here: what memory has stays on this node"
    end_smp
fi
deadline=$((SECONDS + CLEAN_SECS))
until said=$("$PYTHON" -m ftckpt.cli.main clean "$JOB" --arena "$ARENA" 2>&1 >/dev/null) || ((SECONDS >= deadline)); do
    sleep 0.5
done
[ -z "$said" ] || say "$said" # warnings of this SMP, or why memory stays
end_smp
