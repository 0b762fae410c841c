#!/usr/bin/env bash
# Trains with another program's own pretrain_gpt.py on CPU ranks, undisturbed and under ftckpt with ranks killed, and
# compares what both log.
#
#   bash tests/probe/run.sh megatron-lm DIR [--scene NAME|all] [--ranks N] [--keep FOLDER] [pretrain_gpt.py flags...]
#   bash tests/probe/run.sh megatron-deepspeed DIR [the same]
#   bash tests/probe/run.sh megatron-lm DIR --launcher ftckpt --scene gpt --train-iters 100
#   bash tests/probe/run.sh fused-adam DIR [pytest's arguments...]
#
# DIR is a checkout: for megatron-lm core_v0.16.1 of Megatron-LM, whose scenes are in tests/probe/scenes.py; for
# megatron-deepspeed 4efb479d of Megatron-DeepSpeed, with those in tests/probe/megatron_deepspeed.py (try --help in
# place of DIR). --launcher ftckpt starts runs by ftckpt run: kills wait until it can restart ranks without imports, which
# takes iterations. For fused-adam Transformer Engine from 2.1 or Apex from 23.05: tests/integrations/test_fused_adam.py
# with the real Python of its optimizer, over kernels in torch.

set -euo pipefail
NAME=probe
# shellcheck source=launch/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../launch/environment.sh"

probe=${1:-}
case $probe in
megatron-lm | megatron-deepspeed | fused-adam) shift ;;
*) fail "usage: $0 megatron-lm|megatron-deepspeed|fused-adam DIR [flags]" ;;
esac
if [ "$probe" = fused-adam ]; then
    [ -d "${1:-}" ] || fail "usage: $0 $probe DIR [pytest's arguments]; DIR holds a checkout"
    FTCKPT_TEST_CHECKOUT=$(cd "$1" && pwd)
    export FTCKPT_TEST_CHECKOUT
    shift
    prepare "$ALL_EXTRAS"
    cd "$ROOT"
    exec "$PYTHON" -m pytest -m "" tests/integrations/test_fused_adam.py "$@"
fi
case "${1:-}" in
-h | --help) ;;
*) [ -f "${1:-}/pretrain_gpt.py" ] || fail "usage: $0 $probe DIR [flags]; DIR holds a checkout" ;;
esac
prepare "$ALL_EXTRAS"
if [ -d "$1" ]; then
    pip_install six regex pybind11
    # The wheel has the data set helpers built; Megatron-DeepSpeed builds others by itself.
    [ "$probe" = megatron-deepspeed ] ||
        cp -n "$("$PYTHON" -c 'import megatron.core as m; print(m.__path__[0])')"/datasets/helpers_cpp*.so \
            "$1/megatron/core/datasets/"
    set -- "$(cd "$1" && pwd)" "${@:2}"
fi
cd "$ROOT"
export PYTHONUNBUFFERED=1 PYTHONPATH="$ROOT"
exec "$PYTHON" -m tests.probe "$probe" "$@"
