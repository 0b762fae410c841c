# shellcheck shell=bash
# Sourced by demo.sh and test.sh, which set NAME: makes or reuses a virtual environment and installs ftckpt into it.
#
#   FTCKPT_VENV    where it lies; default: .venv in the repository
#   FTCKPT_PYTHON  the interpreter that makes it; default: python3.11, then python3
#
# A stamp in the environment remembers what was installed, so that the next call is done at once.

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${FTCKPT_VENV:-$ROOT/.venv}
PYTHON=$VENV/bin/python
# By exact version: pip then takes a CPU build where one is at hand, instead of gigabytes for GPUs.
TORCH="torch==2.13.0"
# Releases with which the tests and the demo run; users keep what they have.
CONSTRAINTS=$ROOT/launch/constraints.txt

# Ranks start often: without bytecode on the disk each of them compiles ftckpt anew.
unset PYTHONDONTWRITEBYTECODE

say() {
    printf '%s: %s\n' "$NAME" "$*"
}

fail() {
    printf '%s: %s\n' "$NAME" "$*" >&2
    exit 1
}

# usage SCRIPT: prints the comment at its head.
usage() {
    sed -n '2,/^$/s/^# \{0,1\}//p' "$1"
}

# find_python: prints an interpreter of at least 3.10.
find_python() {
    local candidate
    for candidate in ${FTCKPT_PYTHON:+"$FTCKPT_PYTHON"} python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python of version 3.10 or newer was found; install one, or name it with FTCKPT_PYTHON"
}

# stamp EXTRAS: prints a hash of everything that decides what an installation contains.
stamp() {
    {
        printf '%s %s %s\n' "$1" "$TORCH" "$ROOT"
        "$PYTHON" -c 'import sys; print(sys.version)'
        cat "$ROOT/pyproject.toml" "$ROOT/launch/environment.sh" "$CONSTRAINTS"
    } | "$PYTHON" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# installed EXTRAS: whether its stamp matches, or that of all extras, which include them.
installed() {
    local extras
    [ -x "$PYTHON" ] || return 1
    for extras in "$1" "$ALL_EXTRAS"; do
        [ "$(cat "$VENV/.ftckpt-$extras" 2>/dev/null)" = "$(stamp "$extras")" ] && return 0
    done
    return 1
}

# Without bytecode: pip compiles on one core what "compile_all" compiles on all of them.
pip_install() {
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-input --no-compile "$@"
}

# Files that are no Python of this version, such as templates, are left as they are.
compile_all() {
    "$PYTHON" -m compileall -q -j 0 "$VENV/lib" >/dev/null 2>&1 || true
}

ALL_EXTRAS=megatron,deepspeed,storage,metrics,cli,dev

# prepare EXTRAS: afterwards $PYTHON has ftckpt, torch and the extras.
prepare() {
    local base
    installed "$1" && return
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        base=$(find_python)
        say "making a virtual environment in $VENV with $("$base" --version)"
        "$base" -m venv "$VENV" || fail "$base cannot make a virtual environment (its venv module is missing?)"
    fi
    say "installing $TORCH (the first time takes minutes)"
    pip_install "$TORCH" || fail "pip could not install $TORCH"
    say "installing ftckpt with the extras $1"
    (cd "$ROOT" && pip_install --constraint "$CONSTRAINTS" --editable ".[$1]") || fail "pip could not install ftckpt[$1]"
    compile_all
    stamp "$1" >"$VENV/.ftckpt-$1"
}
