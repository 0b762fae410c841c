#!/usr/bin/env bash
# Trains a small GPT on eight ranks of two simulated nodes, kills ranks, and shows that nothing was lost.
# Needs Python 3.11 and nothing else. Arguments go to launch/demo.py: try --help, or --scene rank.

set -euo pipefail
NAME=demo
# shellcheck source=launch/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

prepare megatron
cd "$ROOT"
export PYTHONUNBUFFERED=1
exec "$PYTHON" -m launch.demo "$@"
