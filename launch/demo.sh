#!/usr/bin/env bash
# Trains a small language model on eight ranks of two simulated nodes, kills ranks, and shows that nothing was lost.
# Needs Python 3.11 and nothing else. Arguments go to launch/demo.py: try --help, --scene rank or --framework deepspeed.

set -euo pipefail
NAME=demo
# shellcheck source=launch/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

framework=megatron
before=
for word in "$@"; do
    [ "$before" != --framework ] || framework=$word
    [ "$word" = "${word#--framework=}" ] || framework=${word#--framework=}
    before=$word
done
case $framework in
megatron | deepspeed) ;;
*) fail "--framework: '$framework' is not one of megatron, deepspeed" ;;
esac

prepare "$framework"
cd "$ROOT"
export PYTHONUNBUFFERED=1
exec "$PYTHON" -m launch.demo "$@"
