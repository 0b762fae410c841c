#!/usr/bin/env bash
# Trains with Megatron-LM's own pretrain_gpt.py on CPU ranks, undisturbed and under ftckpt with ranks killed, and
# compares what both log. Succeeds if all losses, learning rates, gradient norms, loss scales and consumed samples are
# the same. Two scenes change the layout, from memory and by way of ftckpt convert: there losses differ by rounding.
#
#   bash launch/check_megatron_lm.sh DIR [--scene NAME|all] [--ranks N] [--keep FOLDER] [pretrain_gpt.py flags...]
#
# DIR is a checkout of Megatron-LM at core_v0.16.1. Scenes are in launch/megatron_lm_scenes.py; try --help.

set -euo pipefail
NAME=check_megatron_lm
# shellcheck source=launch/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

case "${1:-}" in
-h | --help) ;;
*) [ -f "${1:-}/pretrain_gpt.py" ] || fail "usage: $0 DIR [--scene NAME|all] [flags]; DIR holds a checkout of Megatron-LM" ;;
esac
prepare "$ALL_EXTRAS"
if [ -d "$1" ]; then
    pip_install six regex pybind11
    # The wheel has the data set helpers built.
    cp -n "$("$PYTHON" -c 'import megatron.core as m; print(m.__path__[0])')"/datasets/helpers_cpp*.so \
        "$1/megatron/core/datasets/"
    set -- "$(cd "$1" && pwd)" "${@:2}"
fi
cd "$ROOT"
export PYTHONUNBUFFERED=1 PYTHONPATH="$ROOT"
exec "$PYTHON" -m launch.check_megatron_lm "$@"
