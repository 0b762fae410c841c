# shellcheck shell=bash
# Sourced by frontier.sbatch and a100.sbatch, which set NAME and ROOT and define step: runs the job as steps of one
# allocation. When a step fails the next one starts on the nodes that answer; their /dev/shm keeps the arenas. Nodes
# beyond --nodes are spares. With MIN:MAX the job goes on with fewer where no spare is left.

# shellcheck source=launch/job.sh
source "$ROOT/launch/job.sh"

PYTHON=${FTCKPT_PYTHON:-python3}
WAIT_SECS=${FTCKPT_WAIT_SECS:-60} # longest wait for a node to answer
PAUSE_SECS=${FTCKPT_PAUSE_SECS:-5}
SAVE_SECS=${FTCKPT_SAVE_SECS:-90} # longest time that memory has to come to storage before it is emptied

# options WORD...: reads the command line of the batch script.
options() {
    JOB=${FTCKPT_JOB:-${SLURM_JOB_ID:+slurm-$SLURM_JOB_ID}}
    NODES=${FTCKPT_NODES:-}
    NPROC=${FTCKPT_NPROC:-8}
    STEPS=${FTCKPT_STEPS:-10}
    PORT=${FTCKPT_PORT:-29500}
    RUNNER=${FTCKPT_RUNNER:-ftckpt.megatron}
    DRY_RUN=
    STEP=()
    while [ $# -gt 0 ]; do
        case $1 in
        --job) value "$@" && JOB=$VALUE ;;
        --nodes) value "$@" && NODES=$VALUE ;;
        --nproc) value "$@" && NPROC=$VALUE ;;
        --steps) value "$@" && STEPS=$VALUE ;;
        --port) value "$@" && PORT=$VALUE ;;
        --runner) value "$@" && RUNNER=$VALUE ;;
        --flags) value "$@" && read_flags "$VALUE" ;;
        --dry-run) DRY_RUN=1 ;;
        -h | --help) usage "$0" && exit ;;
        --) shift && break ;;
        -*) fail "unknown option $1 (see --help)" ;;
        *) break ;;
        esac
        case $1 in --dry-run) shift ;; *) shift 2 ;; esac
    done
    whole --nproc "$NPROC" 1
    whole --steps "$STEPS" 1
    whole --port "$PORT" 1024
    checked_module "$RUNNER"
    [ $# -gt 0 ] || fail "no script: sbatch [options of sbatch] $NAME [options] SCRIPT [arguments] (see --help)"
    [ -f "$1" ] || fail "script '$1' does not exist in $PWD"
    PROGRAM=("$1" "${FLAGS[@]}" "${@:2}")
    find_allocation
    find_arena
}

# find_allocation: sets ALLOCATED, and LEAST_NODES and MOST_NODES of a step.
find_allocation() {
    [ -n "${SLURM_JOB_ID:+${SLURM_JOB_NODELIST:-}}" ] ||
        fail "SLURM_JOB_ID or SLURM_JOB_NODELIST is not set: submit this script with sbatch, or call it inside salloc"
    checked_name --job "$JOB"
    mapfile -t ALLOCATED < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    ((${#ALLOCATED[@]})) || fail "scontrol names no node of $SLURM_JOB_NODELIST"
    : "${NODES:=${#ALLOCATED[@]}}"
    [[ $NODES =~ ^[0-9]+(:[0-9]+)?$ ]] || fail "--nodes: '$NODES' is neither a number nor MIN:MAX"
    LEAST_NODES=${NODES%:*}
    MOST_NODES=${NODES#*:}
    whole --nodes "$LEAST_NODES" 1
    whole --nodes "$MOST_NODES" "$LEAST_NODES"
    ((MOST_NODES <= ${#ALLOCATED[@]})) || fail "--nodes: $MOST_NODES nodes are to train, ${#ALLOCATED[@]} are allocated"
}

# find_arena: sets ARENA and PERSISTS, for SMPs and the end. GUARDED holds the process that waits for the SMP of each node.
find_arena() {
    local word
    declare -gA GUARDED=()
    find_storage "${PROGRAM[@]}"
    for word in "${PROGRAM[@]}"; do
        case $word in
        --ftckpt-job | --ftckpt-job=*) fail "name the job with --job: the steps and the cleaning at the end need it too" ;;
        esac
    done
}

# within SECS NODE COMMAND...: runs it there. On this node itself: once the job is requeued Slurm starts no more steps.
within() {
    local there=()
    [ "$2" = "${SLURMD_NODENAME:-}" ] || there=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$2")
    timeout "$1" "${there[@]}" "${@:3}"
}

# on_node NODE COMMAND...: runs it there, within WAIT_SECS.
on_node() {
    within "$WAIT_SECS" "$@"
}

# answering: prints those of the allocated nodes that can run a command now. A node that has just failed is still
# "allocated" to Slurm, so they are asked.
answering() {
    local node answers
    answers=$(
        for node in "${ALLOCATED[@]}"; do
            { on_node "$node" true >/dev/null 2>&1 </dev/null && echo "$node"; } &
        done
        wait
    )
    for node in "${ALLOCATED[@]}"; do
        [[ $'\n'$answers$'\n' != *$'\n'"$node"$'\n'* ]] || echo "$node"
    done
}

# choose: sets TRAINING to at most MOST_NODES of the nodes given, and NODES to their number: those of the last step before spares, and in the allocation's order:
# Slurm numbers the nodes of a step in that order, and task 0 must be on the first.
choose() {
    local node wanted=()
    for node in "${TRAINING[@]}" "$@"; do
        [[ " ${wanted[*]} " == *" $node "* || " $* " != *" $node "* ]] || wanted+=("$node")
    done
    wanted=("${wanted[@]:0:MOST_NODES}")
    TRAINING=()
    for node in "${ALLOCATED[@]}"; do
        [[ " ${wanted[*]} " != *" $node "* ]] || TRAINING+=("$node")
    done
    NODES=${#TRAINING[@]}
}

# guard: an SMP on each node that trains, in a step of its own: with the end of a step Slurm kills all that it started.
# It ends with the job, or is ended by the cleaning, which it does itself where Slurm ends the job at once.
guard() {
    local node
    [ "$RUNNER" != none ] || return 0
    for node in "${TRAINING[@]}"; do
        [ -z "${GUARDED[$node]:-}" ] || ! kill -0 "${GUARDED[$node]}" 2>/dev/null || continue
        srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --cpus-per-task=1 --unbuffered \
            bash "$ROOT/launch/smp_step.sh" "$JOB" "$ARENA" "$PERSISTS" </dev/null &
        GUARDED[$node]=$!
    done
}

# joined WORD...: prints them with commas between.
joined() {
    local IFS=,
    printf '%s' "$*"
}

# run_steps: until a step ends well, at most STEPS times. Step number N is what 'step N' puts into STEP.
run_steps() {
    local number code lost answers
    TRAINING=()
    choose "${ALLOCATED[@]}"
    export FTCKPT_JOB=$JOB
    # One name for all steps: what ended one for good is known in the next.
    FTCKPT_RUN=$JOB.${SLURM_RESTART_COUNT:-0}.$(date +%s).$$
    export FTCKPT_RUN
    for ((number = 1; number <= STEPS; number++)); do
        if ((number > 1)); then
            choose "${answers[@]}"
            ((NODES >= LEAST_NODES)) ||
                give_up "$NODES of $LEAST_NODES nodes are left: allocate spares with sbatch --nodes, and say --nodes $MOST_NODES"
        fi
        step "$number"
        if [ -n "$DRY_RUN" ]; then
            show "${STEP[@]}"
            exit
        fi
        say "step $number of at most $STEPS on $(joined "${TRAINING[@]}")"
        guard
        "${STEP[@]}" &
        SRUN=$!
        code=0
        wait "$SRUN" || code=$?
        SRUN=
        if ((!code)); then
            # Of a job whose last snapshot storage did not take, or one that leaves memory on purpose: it is saved, and
            # stays there.
            ! is_left_on "${TRAINING[0]}" || save "$(time_left)"
            ((!${#GUARDED[@]})) || { kill -TERM "${GUARDED[@]}" && wait "${GUARDED[@]}"; } 2>/dev/null || true
            forget
            return 0
        fi
        say "step $number ended with code $code"
        ((number == STEPS)) || sleep "$PAUSE_SECS"
        mapfile -t answers < <(answering)
        lost=$(printf '%s\n' "${ALLOCATED[@]}" | grep -vxF "$(printf '%s\n' "${answers[@]}")" | paste -sd,) || true
        [ -z "$lost" ] || say "do not answer: $lost"
        if verdict "${answers[@]}"; then
            say "$REASON"
            clean "$(time_left)"
            exit "$CODE"
        fi
        ! preempted || give_way
    done
    give_up "$STEPS steps have failed"
}

# give_up MESSAGE: the allocation ends, and with it the memory that could bring the job back.
give_up() {
    clean "$(time_left)"
    fail "$1"
}

# verdict NODE...: whether a rank has ended the job for good; sets CODE and REASON. Asks two of the nodes given that
# trained: each of them would know.
verdict() {
    local node asked=0 answer
    for node in "$@"; do
        [[ " ${TRAINING[*]} " == *" $node "* ]] || continue
        answer=$(on_node "$node" "$PYTHON" -m ftckpt.cli.main ended </dev/null 2>/dev/null) || true
        if [ -n "$answer" ]; then
            CODE=${answer%% *} REASON=${answer#* }
            return 0
        fi
        ((++asked < 2)) || break
    done
    return 1
}

# on_all SECS NODE... -- COMMAND...: runs it there, on all nodes at once, within SECS. In a subshell, whose wait does not
# take in the steps of the SMPs.
on_all() (
    secs=$1 nodes=()
    shift
    while [ "$1" != -- ]; do nodes+=("$1") && shift; done
    for node in "${nodes[@]}"; do
        within "$secs" "$node" "${@:2}" </dev/null &
    done
    wait
)

# forget: what the nodes know of this run goes.
forget() {
    on_all "$WAIT_SECS" "${TRAINING[@]}" -- "$PYTHON" -m ftckpt.cli.main ended --forget >/dev/null 2>&1
}

# save SECS: what memory has comes to storage within SECS, where the job names some and wants it.
save() {
    [ -n "$PERSISTS" ] || return 0
    save_command "$1"
    on_all "$(($1 + 15))" "${TRAINING[@]}" -- "${SAVE[@]}"
}

# is_left_on NODE: the job names storage, and has memory there.
is_left_on() {
    [ -n "$PERSISTS" ] && on_node "$1" bash -c "compgen -G '$ARENA/ftckpt-$JOB/*/*/' >/dev/null" </dev/null
}

# time_left: prints the seconds that a save may take where Slurm does not end the allocation yet.
time_left() {
    local left=$((${SLURM_JOB_END_TIME:-0} - $(date +%s) - 60))
    echo "$((left > SAVE_SECS ? left : SAVE_SECS))"
}

# clean SECS: removes the arenas from all nodes that answer, once what is in them is saved.
clean() {
    save "$1"
    on_all "$WAIT_SECS" "${ALLOCATED[@]}" -- "$PYTHON" -m ftckpt.cli.main clean "$JOB" --arena "$ARENA" >/dev/null
    forget
}

# give_way: Slurm has told the steps that another job takes the nodes, and this script nothing. The SMPs save what their
# nodes have; a step that starts now would end with the grace.
give_way() {
    say "another job takes the nodes"
    ((!${#GUARDED[@]})) || wait "${GUARDED[@]}" || true
    trap '' TERM USR1
    requeue || clean "$SAVE_SECS"
    exit 143
}

# requeue: the job waits for nodes again, and comes back under its number.
requeue() {
    scontrol requeue "$SLURM_JOB_ID"
}

# stop: Slurm ends the batch script, because of scancel, the time limit, or for another job.
stop() {
    trap '' TERM USR1
    say "told to stop"
    # srun kills what it runs: memory has all that is saved.
    [ -z "${SRUN:-}" ] || { kill -TERM "$SRUN" && wait "$SRUN"; } 2>/dev/null || true
    if [ -n "$PERSISTS" ] || ! comes_back; then clean "$SAVE_SECS"; fi
    ! preempted || requeue || clean "$SAVE_SECS"
    exit 143
}
trap stop TERM USR1
