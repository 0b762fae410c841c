#!/usr/bin/env bash
# Lints, type checks and tests ftckpt. Needs Python 3.10 or newer and nothing else.
#
#   --unit  tests of one process alone
#   --all   the slow tests too
#
# Other arguments go to pytest.

set -euo pipefail
NAME=tests
# shellcheck source=launch/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

case ${1:-} in -h | --help) usage "$0" && exit ;; esac
prepare "$ALL_EXTRAS"
cd "$ROOT"

say "ruff check"
"$PYTHON" -m ruff check --quiet . || fail "ruff has complaints"
"$PYTHON" -m ruff format --check --quiet . || fail "files are not formatted: run 'ruff format .'"
tier=()
case ${1:-} in
--unit)
    tier=(tests/components)
    shift
    ;;
--all)
    tier=(-m "" --hypothesis-profile longer)
    shift
    ;;
esac
say "mypy"
"$PYTHON" -m mypy &
# mypy has one core. On another one tests are compiled, which each of the processes below would do for itself; what is
# wrong with them these say.
"$PYTHON" -m pytest --collect-only -qq ${tier[@]+"${tier[@]}"} "$@" >/dev/null 2>&1 || true
wait $! || fail "mypy has complaints"
say "pytest"
output=$(mktemp)
trap 'rm -f "$output"' EXIT
code=0
# Most tests wait for processes that they have started: three files at a time keep two cores busy. In their order, jobs
# before units: a long file at the end would have one core to itself.
"$PYTHON" -m pytest -n 3 --dist loadfile --no-loadscope-reorder ${tier[@]+"${tier[@]}"} "$@" 2>&1 | tee "$output" || code=$?
closing=$(grep -E '(passed|failed|errors?|skipped|deselected|no tests ran)\b.* in [0-9.]+s' "$output" | tail -n 1 || true)
closing=$(printf '%s' "$closing" | sed -E 's/^=+ //; s/ =+$//')
printf '%s: %s\n' "$NAME" "${closing:-pytest ended with code $code}"
exit "$code"
