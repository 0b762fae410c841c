#!/usr/bin/env bash
# Trains a small language model on eight ranks of two simulated nodes, kills ranks, and shows that nothing was lost.
# Needs Python 3.10 or newer and nothing else: the first call installs the rest into .venv.
#
#   --framework NAME  megatron (default) or deepspeed
#   --scene NAME      one fault alone: rank, writing, all, node or, with megatron, shrink or limit
#   --iterations N    default: 28, with --scene 16
#   --out DIR         where logs and the summary go; default: runs/demo or runs/demo-deepspeed
#
# Other arguments, --hidden 256 for example, go to launch/train_gpt.py or launch/train_deepspeed.py.

set -euo pipefail
NAME=demo
# shellcheck source=launch/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

framework=megatron
before=
for word in "$@"; do
    case $word in -h | --help) usage "$0" && exit ;; esac
    [ "$before" != --framework ] || framework=$word
    [ "$word" = "${word#--framework=}" ] || framework=${word#--framework=}
    before=$word
done
case $framework in
megatron | deepspeed) ;;
*) fail "--framework: '$framework' is not one of megatron, deepspeed" ;;
esac

prepare "$framework,metrics"
cd "$ROOT"
export PYTHONUNBUFFERED=1
exec "$PYTHON" -m launch.demo "$@"
