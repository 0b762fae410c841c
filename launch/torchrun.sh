#!/usr/bin/env bash
# Starts a job under 'ftckpt run', which is torchrun with fast restarts. Call it on each node of the job; it ends when the
# job does.
#
#   bash launch/torchrun.sh [options] SCRIPT [arguments of the script]
#
#   --job NAME               name of the job, the same on all nodes and at the next start: it is how a restart finds its
#                            snapshots (FTCKPT_JOB; default: slurm-$SLURM_JOB_ID)
#   --nodes N | MIN:MAX      nodes of the job (FTCKPT_NODES; default: 1)
#   --endpoint HOST[:PORT]   where the nodes meet; needed with more than one (FTCKPT_ENDPOINT; default port: 29400)
#   --node-rank N            0: this node is HOST, another number: it is not (FTCKPT_NODE_RANK; default: HOST is the node
#                            of that name, or the one that has this name or address)
#   --nproc N                processes on this node (FTCKPT_NPROC; default: one for each GPU)
#   --restarts N             restarts before it gives up (FTCKPT_RESTARTS; default: 20)
#   --rdzv-conf K=V,...      more settings of the rendezvous (FTCKPT_RDZV_CONF)
#   --cores "LIST LIST ..."  the cores of each process, such as "0-7 8-15" (FTCKPT_CORES; default: not bound); restarts
#                            import everything again
#   --runner MODULE          ftckpt.megatron (default), ftckpt.deepspeed, another module that takes a script, or none to
#                            run the script itself (FTCKPT_RUNNER)
#   --flags FILE             put the flags of FILE before the arguments of the script; can be given again
#   --torchrun-arg WORD      one more word for the launcher, such as --local-addr=ADDRESS; can be given again
#   --dry-run                print what would run, and do not run it
#
# FTCKPT_LAUNCHER=torch.distributed.run takes torchrun in its place. FTCKPT_PYTHON names the interpreter (default: python3).
# An option wins over its variable.
#
# With --ftckpt-persist: on SIGTERM, SIGINT or SIGUSR1, and when the restarts are used up, the newest committed snapshot goes to
# storage, within FTCKPT_SAVE_SECS (90; 0: somebody else saves, as the SMP's container of a pod does); the last line says
# what came there. The ranks have FTCKPT_GRACE_SECS (40) before
# that to end: the launcher itself waits 30 s for one that does not. A second SIGINT leaves at once.

set -euo pipefail
NAME=torchrun.sh
HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/job.sh
source "$HERE/job.sh"

PYTHON=${FTCKPT_PYTHON:-python3}
JOB=${FTCKPT_JOB:-${SLURM_JOB_ID:+slurm-$SLURM_JOB_ID}}
NODES=${FTCKPT_NODES:-1}
ENDPOINT=${FTCKPT_ENDPOINT:-}
NODE_RANK=${FTCKPT_NODE_RANK:-}
NPROC=${FTCKPT_NPROC:-gpu}
RESTARTS=${FTCKPT_RESTARTS:-20}
RDZV_CONF=${FTCKPT_RDZV_CONF:-}
CORES=${FTCKPT_CORES:-}
RUNNER=${FTCKPT_RUNNER:-ftckpt.megatron}
read -ra LAUNCHER <<<"${FTCKPT_LAUNCHER:-ftckpt run}" # a module, and words of its own
SAVE_SECS=${FTCKPT_SAVE_SECS:-90}
GRACE_SECS=${FTCKPT_GRACE_SECS:-40}
EXTRA=()
DRY_RUN=

while [ $# -gt 0 ]; do
    case $1 in
    --job) value "$@" && JOB=$VALUE ;;
    --nodes) value "$@" && NODES=$VALUE ;;
    --endpoint) value "$@" && ENDPOINT=$VALUE ;;
    --node-rank) value "$@" && NODE_RANK=$VALUE ;;
    --nproc) value "$@" && NPROC=$VALUE ;;
    --restarts) value "$@" && RESTARTS=$VALUE ;;
    --rdzv-conf) value "$@" && RDZV_CONF=$VALUE ;;
    --cores) value "$@" && CORES=$VALUE ;;
    --runner) value "$@" && RUNNER=$VALUE ;;
    --flags) value "$@" && read_flags "$VALUE" ;;
    --torchrun-arg) value "$@" && EXTRA+=("$VALUE") ;;
    --dry-run) DRY_RUN=1 ;;
    -h | --help) usage "$0" && exit ;;
    --) shift && break ;;
    -*) fail "unknown option $1 (see --help)" ;;
    *) break ;;
    esac
    case $1 in --dry-run) shift ;; *) shift 2 ;; esac
done

[ -n "$JOB" ] || fail "the job has no name: give --job NAME, the same on all nodes and at the next start"
checked_name --job "$JOB"
[[ $NODES =~ ^[0-9]+(:[0-9]+)?$ ]] || fail "--nodes: '$NODES' is neither a number nor MIN:MAX"
whole --nodes "${NODES%:*}" 1
whole --nodes "${NODES#*:}" "${NODES%:*}"
[ "$NPROC" = gpu ] || whole --nproc "$NPROC" 1
whole --restarts "$RESTARTS" 0
whole FTCKPT_SAVE_SECS "$SAVE_SECS" 0
whole FTCKPT_GRACE_SECS "$GRACE_SECS" 1
checked_module "$RUNNER"
[ $# -gt 0 ] || fail "no script: $0 [options] SCRIPT [arguments] (see --help)"
[ -f "$1" ] || fail "script '$1' does not exist"
SCRIPT=$1
shift

MAX_NODES=${NODES#*:}
[ -z "$ENDPOINT" ] || [[ $ENDPOINT == *:* ]] || ENDPOINT+=:29400
CONF="join_timeout=600"
if ((MAX_NODES == 1)); then
    : "${ENDPOINT:=localhost:0}" # any free port
else
    [ -n "$ENDPOINT" ] || fail "$MAX_NODES nodes need a place to meet: --endpoint HOST[:PORT], the same on all nodes"
    # torchrun asks this machine's resolver whether it is HOST, which fails where HOST is an alias or an address of
    # another network. Slurm knows its nodes by name.
    if [ "${SLURMD_NODENAME:-}" = "${ENDPOINT%:*}" ]; then
        : "${NODE_RANK:=0}"
    # Not grep -q, which ends at the first match: scontrol would die of what it writes on.
    elif [ -n "${SLURM_STEP_NODELIST:-}" ] &&
        scontrol show hostnames "$SLURM_STEP_NODELIST" 2>/dev/null | grep -xF "${ENDPOINT%:*}" >/dev/null; then
        : "${NODE_RANK:=1}"
    fi
    if [ -n "$NODE_RANK" ]; then
        whole --node-rank "$NODE_RANK" 0
        CONF+=",is_host=$((NODE_RANK == 0))"
    fi
    # How long the others wait for node 0 to be there.
    CONF+=",read_timeout=120"
fi
CONF+=${RDZV_CONF:+,$RDZV_CONF}

# torchrun's attempts share a store unless it is told: restarted workers read there the addresses of dead ones.
SETTINGS=("FTCKPT_JOB=$JOB" TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
# Megatron demands it for tensor parallelism, where kernels and communication are to start in the order of the program.
[ "$RUNNER" != ftckpt.megatron ] || SETTINGS+=("CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}")

PROGRAM=("$SCRIPT" "${FLAGS[@]}" "$@")
find_storage "${PROGRAM[@]}"
[ -z "$PERSISTS" ] || [[ " ${PROGRAM[*]}" != *" --ftckpt-job"* ]] ||
    fail "name the job with --job: the save at the end needs it too"
((SAVE_SECS)) || PERSISTS=
case ${LAUNCHER[0]}$CORES:$RUNNER in
*:none | ftckpt:ftckpt.*) ;; # ftckpt run needs no runner, but where a shell binds processes to cores
*) PROGRAM=(-m "$RUNNER" "${PROGRAM[@]}") ;;
esac
if [ -n "$CORES" ]; then
    read -ra LISTS <<<"$CORES"
    [ "$NPROC" = gpu ] || ((${#LISTS[@]} == NPROC)) || fail "--cores: ${#LISTS[@]} lists for $NPROC processes"
    # torchrun binds no process to cores.
    SETTINGS+=("FTCKPT_CORES=$CORES")
    # shellcheck disable=SC2016 # expanded in each process
    BIND='read -ra lists <<<"$FTCKPT_CORES"; exec taskset --cpu-list "${lists[$LOCAL_RANK]:?--cores has no list for this process}" "$@"'
    PROGRAM=(--no-python bash -c "$BIND" bind "$PYTHON" -u "${PROGRAM[@]}")
fi

COMMAND=(
    "$PYTHON" -m "${LAUNCHER[@]}" --nnodes "$NODES" --nproc-per-node "$NPROC" --max-restarts "$RESTARTS"
    --rdzv-backend c10d --rdzv-id "$JOB" --rdzv-endpoint "$ENDPOINT"
    --rdzv-conf "$CONF" "${EXTRA[@]}" "${PROGRAM[@]}"
)
if [ -n "$DRY_RUN" ]; then
    show env "${SETTINGS[@]}" "${COMMAND[@]}"
    exit
fi
# Said, not refused: devices may have other names than these.
[ "$NPROC" != gpu ] || compgen -G "/dev/nvidia[0-9]*" >/dev/null || [ -e /dev/kfd ] || [ -e /dev/dxg ] ||
    say "no GPU is seen here: give --nproc N, the number of processes" >&2
[ -n "$PERSISTS" ] || exec env "${SETTINGS[@]}" "${COMMAND[@]}"

# shellcheck disable=SC2317,SC2329 # called by the trap
end_agent() {
    local agent=${!:-} deadline=$((SECONDS + GRACE_SECS)) # of the last command in the background; none yet: empty
    kill -TERM "$agent" 2>/dev/null || true
    while kill -0 "$agent" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2; done
    kill -KILL "$agent" 2>/dev/null || true
}
trap 'stop_job end_agent save_here' TERM INT USR1 HUP

# In a process group of its own: a terminal interrupts this script, and that ends torchrun.
set -m
env "${SETTINGS[@]}" "${COMMAND[@]}" </dev/null &
set +m
code=0
wait "$!" || code=$?
save_here # the launcher has given up, or storage did not take the last snapshot; and a container ends with this
exit "$code"
