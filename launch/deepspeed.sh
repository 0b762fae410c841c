#!/usr/bin/env bash
# Starts a job through DeepSpeed's launcher, with ftckpt's runner, and starts it again when it fails. Call it on one node.
#
#   bash launch/deepspeed.sh [options] SCRIPT [arguments of the script]
#
#   --job NAME            name of the job, the same at the next start: it is how a restart finds its snapshots (FTCKPT_JOB)
#   --hostfile FILE       the nodes, a line 'HOST slots=N' for each (FTCKPT_HOSTFILE; default: this node alone)
#   --nodes N             take the first N of the nodes (FTCKPT_NODES)
#   --nproc N             processes on each node (FTCKPT_NPROC; default: all slots, or one for each GPU)
#   --port N              port of rank 0 in the first start, the next one in the next (FTCKPT_PORT; default: 29500)
#   --restarts N          restarts before it gives up (FTCKPT_RESTARTS; default: 20)
#   --runner MODULE       ftckpt.deepspeed (default), another module that takes a script, or none to run the script itself
#                         (FTCKPT_RUNNER)
#   --flags FILE          put the flags of FILE before the arguments of the script; can be given again
#   --deepspeed-arg WORD  one more word for the launcher, such as --master_addr=ADDRESS; can be given again
#   --dry-run             print what would run, and do not run it
#
# The launcher (deepspeed 0.19.8) restarts nothing by itself. When a rank dies it ends the others of that node; on other
# nodes they end when they notice, which over NCCL takes up to the timeout of the process group, and only then can the
# next start begin. launch/torchrun.sh and launch/a100.sbatch are quicker there, and take --runner ftckpt.deepspeed too.
#
# Where the job names storage: on SIGTERM, SIGINT or SIGUSR1, and when the restarts are used up, the newest committed snapshot
# goes there, within FTCKPT_SAVE_SECS (90); the last line of each node says what came there. The processes have
# FTCKPT_GRACE_SECS (60) before that to end. A second SIGINT leaves at once. With a hostfile the launcher starts that on all
# its nodes, but not with --deepspeed-arg --include or --exclude.

set -euo pipefail
NAME=deepspeed.sh
HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/job.sh
source "$HERE/job.sh"

PYTHON=${FTCKPT_PYTHON:-python3}
JOB=${FTCKPT_JOB:-${SLURM_JOB_ID:+slurm-$SLURM_JOB_ID}}
HOSTFILE=${FTCKPT_HOSTFILE:-}
NODES=${FTCKPT_NODES:-}
NPROC=${FTCKPT_NPROC:-}
PORT=${FTCKPT_PORT:-29500}
RESTARTS=${FTCKPT_RESTARTS:-20}
RUNNER=${FTCKPT_RUNNER:-ftckpt.deepspeed}
PAUSE_SECS=${FTCKPT_PAUSE_SECS:-1}
SAVE_SECS=${FTCKPT_SAVE_SECS:-90}
GRACE_SECS=${FTCKPT_GRACE_SECS:-60} # longest wait for what a start has left behind
EXTRA=()
DRY_RUN=

while [ $# -gt 0 ]; do
    case $1 in
    --job) value "$@" && JOB=$VALUE ;;
    --hostfile) value "$@" && HOSTFILE=$VALUE ;;
    --nodes) value "$@" && NODES=$VALUE ;;
    --nproc) value "$@" && NPROC=$VALUE ;;
    --port) value "$@" && PORT=$VALUE ;;
    --restarts) value "$@" && RESTARTS=$VALUE ;;
    --runner) value "$@" && RUNNER=$VALUE ;;
    --flags) value "$@" && read_flags "$VALUE" ;;
    --deepspeed-arg) value "$@" && EXTRA+=("$VALUE") ;;
    --dry-run) DRY_RUN=1 ;;
    -h | --help) usage "$0" && exit ;;
    --) shift && break ;;
    -*) fail "unknown option $1 (see --help)" ;;
    *) break ;;
    esac
    case $1 in --dry-run) shift ;; *) shift 2 ;; esac
done

[ -n "$JOB" ] || fail "the job has no name: give --job NAME, the same at the next start"
checked_name --job "$JOB"
[ -z "$HOSTFILE" ] || [ -r "$HOSTFILE" ] || fail "--hostfile: $HOSTFILE is not a file that can be read"
[ -z "$NODES" ] || whole --nodes "$NODES" 1
[ -z "$NPROC" ] || whole --nproc "$NPROC" 1
[ -n "$HOSTFILE" ] || ((${NODES:-1} == 1)) || fail "--nodes: $NODES nodes need a --hostfile"
whole --port "$PORT" 1024
whole --restarts "$RESTARTS" 0
whole FTCKPT_SAVE_SECS "$SAVE_SECS" 1
whole FTCKPT_GRACE_SECS "$GRACE_SECS" 1
checked_module "$RUNNER"
[ $# -gt 0 ] || fail "no script: $0 [options] SCRIPT [arguments] (see --help)"
[ -f "$1" ] || fail "script '$1' does not exist"

PROGRAM=("$1" "${FLAGS[@]}" "${@:2}")
find_storage "${PROGRAM[@]}"
[ -z "$PERSISTS" ] || [[ " ${PROGRAM[*]}" != *" --ftckpt-job"* ]] ||
    fail "name the job with --job: the save at the end needs it too"
# The launcher puts --local_rank before the script, where ftckpt.deepspeed looks for it, and others do not.
case $RUNNER in
none) ;;
ftckpt.deepspeed) PROGRAM=(--module "$RUNNER" "${PROGRAM[@]}") ;;
*) PROGRAM=(--module --no_local_rank "$RUNNER" "${PROGRAM[@]}") ;;
esac
# An explicit hostfile that does not exist keeps the launcher from taking /job/hostfile.
COMMAND=(deepspeed --hostfile "${HOSTFILE:-/dev/null/none}")
[ -z "$NODES" ] || COMMAND+=(--num_nodes "$NODES")
ONCE=("${COMMAND[@]}" --num_gpus 1 "${EXTRA[@]}")
[ -z "$NPROC" ] || COMMAND+=(--num_gpus "$NPROC")
COMMAND+=("${EXTRA[@]}")
export FTCKPT_JOB=$JOB
# One name for all starts: what ended one for good is known in the next.
FTCKPT_RUN=$JOB.$(date +%s).$$ # process ids of containers begin at 1 each time
export FTCKPT_RUN

if [ -n "$DRY_RUN" ]; then
    show env FTCKPT_JOB="$JOB" "${COMMAND[@]}" --master_port "$PORT" "${PROGRAM[@]}"
    exit
fi
# No start of many would find it.
command -v deepspeed >/dev/null || fail "there is no command deepspeed: pip install 'ftckpt[deepspeed]', or mend PATH"

HANDED_ON=
# shellcheck disable=SC2317,SC2329 # called by the trap
tidy() {
    [ -z "$HANDED_ON" ] || rm -f "$HANDED_ON"
    "$PYTHON" -m ftckpt.cli.main ended --forget >/dev/null 2>&1 || true
}
trap tidy EXIT

# The launcher hands few variables on to other nodes; the others it reads from the files of this name in the home and
# the working directory, or from one file named by its path.
if [ -n "$HOSTFILE" ]; then
    HANDED_ON=$(mktemp)
    for file in "$HOME/${DS_ENV_FILE:-.deepspeed_env}" "./${DS_ENV_FILE:-.deepspeed_env}" "${DS_ENV_FILE:-}"; do
        [ ! -f "$file" ] || grep -F "=" "$file" >>"$HANDED_ON" || true
    done
    printf '%s\n' "FTCKPT_JOB=$JOB" "FTCKPT_RUN=$FTCKPT_RUN" >>"$HANDED_ON"
    export DS_ENV_FILE=$HANDED_ON
fi

# alive: whether the last start has left processes, which are all in its process group.
alive() {
    kill -0 -- "-$GROUP" 2>/dev/null
}

# end_group: ends what the last start has left, first with SIGTERM.
end_group() {
    local deadline=$((SECONDS + GRACE_SECS))
    [ -n "${GROUP:-}" ] || return 0
    kill -TERM -- "-$GROUP" 2>/dev/null || true
    while alive && ((SECONDS < deadline)); do sleep 0.2; done
    kill -KILL -- "-$GROUP" 2>/dev/null || true
}

# save: what memory has comes to storage, of all nodes of the job.
save() {
    if [ -z "$HOSTFILE" ]; then
        save_here
    elif [ -n "$PERSISTS" ]; then
        if [[ " ${EXTRA[*]}" == *" --include"* || " ${EXTRA[*]}" == *" --exclude"* ]]; then
            say "nothing is saved with --include or --exclude: run 'ftckpt save $JOB' on each node"
            return 0
        fi
        save_command "$SAVE_SECS"
        # The launcher knows how to come to the nodes: one process on each.
        SAVE=("${ONCE[@]}" --master_port $((PORT + RESTARTS + 1)) --module --no_local_rank "${SAVE[@]:2}")
        save_memory
    fi
}
trap 'stop_job end_group save' TERM INT USR1 HUP

for ((start = 0; start <= RESTARTS; start++)); do
    ((start == 0)) || sleep "$PAUSE_SECS"
    # With a process group of its own: the launcher does not hand SIGTERM down to its processes.
    set -m
    "${COMMAND[@]}" --master_port $((PORT + start)) "${PROGRAM[@]}" </dev/null &
    GROUP=$!
    set +m
    code=0
    wait "$GROUP" || code=$?
    # The launcher also ends with 0 when its helper was killed by a signal, and leaves the ranks running.
    if ((code == 0)) && alive; then
        say "the launcher has left its processes behind"
        code=1
    fi
    if ((!code)); then
        ! is_left || save # by a job whose last snapshot storage did not take
        exit 0
    fi
    end_group
    # Whether a rank has ended the job for good.
    answer=$("$PYTHON" -m ftckpt.cli.main ended 2>/dev/null) || true
    if [ -n "$answer" ]; then
        say "${answer#* }"
        ((!${answer%% *})) || save
        exit "${answer%% *}"
    fi
    say "start $((start + 1)) of at most $((RESTARTS + 1)) ended with code $code"
done
save
fail "given up: $((RESTARTS + 1)) starts have failed"
