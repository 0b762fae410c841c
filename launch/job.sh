# shellcheck shell=bash
# Sourced by torchrun.sh, deepspeed.sh and slurm.sh, which set NAME: messages, flag files, checks of options, printing
# commands, and what is saved at the end. Needs bash 4.4.

say() {
    printf '%s: %s\n' "$NAME" "$*"
}

fail() {
    printf '%s: %s\n' "$NAME" "$*" >&2
    exit 2
}

# usage SCRIPT: prints the comment at its head.
usage() {
    sed -n '2,/^$/{/^#SBATCH/d; s/^# \{0,1\}//p}' "$1"
}

# value OPTION [VALUE]: sets VALUE, which must be there.
value() {
    [ $# -ge 2 ] || fail "$1 needs a value (see --help)"
    # shellcheck disable=SC2034 # read by who called
    VALUE=$2
}

# whole NAME TEXT LEAST: TEXT must be a whole number of at least LEAST.
whole() {
    if ! [[ $2 =~ ^[0-9]{1,9}$ ]] || ((10#$2 < $3)); then
        fail "$1: '$2' is not a whole number of at least $3"
    fi
}

# checked_name WHAT NAME: a name that ftckpt takes as well (it becomes part of file names).
checked_name() {
    [[ $2 =~ ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$ ]] || fail "$1: '$2' is not a name; use 1 to 64 of A-Z a-z 0-9 . _ -"
}

# checked_module NAME: what 'python -m' takes, or none.
checked_module() {
    [[ $1 =~ ^[A-Za-z_][A-Za-z0-9_.]*$ ]] || fail "--runner: '$1' is not a module; use ftckpt.megatron, ftckpt.deepspeed or none"
}

# preempted: whether Slurm takes the nodes of this job for another one, and GraceTime runs.
preempted() {
    [[ $(scontrol show job "$SLURM_JOB_ID" 2>/dev/null) =~ PreemptTime=[0-9] ]]
}

# comes_back: whether Slurm starts this job again once it has ended. While a job that was requeued ends its state is that
# of any other; its restarts are counted at once.
comes_back() {
    ! preempted || return 0
    [[ $(scontrol show job "$SLURM_JOB_ID" 2>/dev/null) =~ Restarts=([0-9]+) ]] &&
        ((BASH_REMATCH[1] > ${SLURM_RESTART_COUNT:-0}))
}

# read_flags FILE: adds the words of a flag file to FLAGS. Lines that start with # are comments. Words are divided
# at blanks; a value with blanks is written in quotes. Nothing is expanded: a $ or a * stays what it is.
FLAGS=()
read_flags() {
    local text words
    [ -r "$1" ] || fail "--flags: $1 is not a file that can be read"
    text=$(sed '/^[[:space:]]*#/d; s/\r$//' "$1")
    text=$(printf '%s\n' "$text" | xargs -r printf '%s\n') || fail "--flags: $1 has a quote that is not closed"
    [ -z "$text" ] && return
    mapfile -t words <<<"$text"
    FLAGS+=("${words[@]}")
}

# show WORD...: prints a command such that a shell would read the same words.
show() {
    local line
    printf -v line '%q ' "$@"
    printf '%s\n' "${line% }"
}

# find_storage WORD...: sets ARENA to the flag --ftckpt-arena, and PERSISTS where the words name storage, as DeepSpeed's
# JSON may. Reads RUNNER.
# shellcheck disable=SC2034 # read by who called
find_storage() {
    ARENA=/dev/shm
    PERSISTS=
    [ "$RUNNER" != ftckpt.deepspeed ] || PERSISTS=1
    while [ $# -gt 0 ]; do
        case $1 in
        --ftckpt-arena=*) ARENA=${1#*=} ;;
        --ftckpt-arena) ARENA=${2:-$ARENA} ;;
        --ftckpt-persist | --ftckpt-persist=*) PERSISTS=1 ;;
        esac
        shift
    done
}

# save_command SECS: sets SAVE to what brings this node's memory to storage within SECS, where the job wants that.
save_command() {
    # shellcheck disable=SC2034 # read by who called
    SAVE=("$PYTHON" -m ftckpt.cli.main save "$JOB" --at-end --arena "$ARENA" --timeout "$1")
}

# save_memory: brings what memory has to storage with SAVE, within SAVE_SECS.
save_memory() {
    local code=0
    timeout "$((SAVE_SECS + 15))" "${SAVE[@]}" </dev/null || code=$?
    ((code != 124)) || say "the save did not come to an end within $SAVE_SECS s"
}

# is_left: the job names storage, and has memory on this node: a rank has got so far, and storage has not taken all.
is_left() {
    [ -n "$PERSISTS" ] && compgen -G "$ARENA/ftckpt-$JOB/*/*/" >/dev/null
}

# save_here: brings what memory this node has to storage.
save_here() {
    is_left || return 0
    save_command "$SAVE_SECS"
    save_memory
}

# stop_job END SAVE: called by traps. The container or the allocation ends, and with it the memory; who ends it may tell
# this process alone, as a kubelet does. END ends the processes of the job, SAVE saves what they leave.
stop_job() {
    trap '' TERM USR1 HUP
    trap 'exit 130' INT
    say "told to stop"
    "$1"
    "$2"
    exit 143
}
