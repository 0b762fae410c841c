# shellcheck shell=bash
# Sourced by smp_step.sh and smp_pod.sh, which set PYTHON, JOB, ARENA and NODE: runs the SMP until this script is told to
# end.

END_SECS=${FTCKPT_SMP_END_SECS:-20}

# run_smp [WORD...]: returns when SIGTERM has come; where the SMP ends by itself, so does the script, with its code.
run_smp() {
    local code=0
    TOLD=
    trap 'TOLD=1' TERM
    # In a process group of its own: what tells this script to end must not end the SMP, which saves.
    set -m
    "$PYTHON" -m ftckpt.smp --job "$JOB" --arena "$ARENA" --node "$NODE" "$@" </dev/null &
    SMP=$!
    set +m
    # In turns: a signal right before the wait would be seen behind it.
    while [ -z "$TOLD" ] && kill -0 "$SMP" 2>/dev/null; do
        sleep 5 &
        wait -n "$SMP" "$!" || true
    done
    if [ -z "$TOLD" ]; then
        wait "$SMP" || code=$?
        exit "$code"
    fi
    trap '' TERM
}

# end_smp: memory stays as it is, also where the SMP has to be killed.
end_smp() {
    kill -TERM "$SMP" 2>/dev/null || true
    # One that stands still must keep no node, and no pod until its grace is over.
    for ((left = END_SECS; left > 0; left--)); do
        kill -0 "$SMP" 2>/dev/null || break
        sleep 1 &
        wait -n "$SMP" "$!" || true
    done
    kill -KILL "$SMP" 2>/dev/null || true
    wait "$SMP" || true
    exit 143
}
